"""What attention on a CPU takes beside its results: turned heads, gathered keys, masks. No torch here."""

from __future__ import annotations

from dataclasses import replace

from anycore.contract.costs import StepShape, activation_bytes, reference_workspace
from anycore.contract.host import usable_cores
from anycore_cpu.kernels import build
from anycore_cpu.probe import processor_flags

PADDING = 512
"""Padded places of a group of decoding requests: `attention.CALL_COST`."""

ALIGNED = 16
"""Packed requests are padded to a multiple of it: `attention.ALIGNED`."""

NUMBERS = 32
"""Bytes a row: its id, position, slot and type."""

MAKING_A_MASK, WITH_A_WINDOW = 9, 19
"""Bytes a place: int64 distances and bools."""


def workspace(shape: StepShape) -> int:
    """How far a step goes beyond `activation_bytes`."""
    if build.available(processor_flags()):
        return _in_kernels(shape)
    # A rounded cache is read by the contract's own attention, as under a soft cap.
    return _in_torch(replace(shape, softcap=True) if shape.rounded else shape)


def _in_kernels(shape: StepShape) -> int:
    """Our attention works in place. A decoder's layer holds two more of its rows, the norm's and the result's.

    Where some layers have a window there are angles of two kinds, and norms behind each half (Gemma).
    """
    kinds = 2 if shape.window else 1
    row = shape.element * (1 + kinds) * shape.hidden + kinds * 4 * shape.head_dim if shape.gated else 0
    return shape.rows * (row + NUMBERS)


def _in_torch(shape: StepShape) -> int:
    """The widest moment of attention, or masks beside the MLP."""
    counted = activation_bytes(shape)
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    out = shape.element * shape.heads * shape.head_dim
    stream = shape.element * (shape.hidden + heads + shape.kv_heads * shape.head_dim)  # residual; q, k, v
    turned = turning = angles = 0
    if shape.gated:  # rotated queries and keys, and the same while it is done in float32
        turned = shape.element * heads
        turning = turned if shape.element == 4 else turned + 8 * heads
        angles = 8 * shape.head_dim
    begun = shape.rows * (stream + angles)
    if shape.softcap:
        return begun + shape.rows * turned + reference_workspace(shape) - counted
    gathered, masks, making = _paged(shape) if shape.block_size else _packed(shape)
    moments = (
        begun + shape.rows * turning,
        begun + shape.rows * turned + making,
        begun + shape.rows * (turned + 2 * out) + masks + gathered,
        counted + shape.rows * angles + masks,
    )
    return max(moments) - counted


Bytes = tuple[int, int, int]
"""Gathered keys and values; masks; masks while they are made."""


def _paged(shape: StepShape) -> Bytes:
    """Keys and values of one layer's decoding requests side by side, or of its longest prompt; masks of prompts that
    go on where an earlier step ended. A window leaves out the keys before it.
    """
    tokens = min(shape.kept, shape.seqs * (shape.longest + shape.block_size)) + PADDING
    keys = 2 * tokens * shape.kv_heads * shape.head_dim * shape.element + 12 * tokens
    longest = shape.longest + shape.block_size
    seen = min(longest, shape.window + shape.rows + shape.block_size) if shape.window else 0
    making = shape.rows * max(MAKING_A_MASK * longest, 4 * longest + WITH_A_WINDOW * seen)
    return keys, 4 * shape.rows * (longest + seen), making


def _packed(shape: StepShape) -> Bytes:
    """Without a cache, requests of like length are stacked; without a window a mask has one row a request."""
    padded = shape.rows + ALIGNED * min(shape.seqs, shape.rows)
    copies = shape.element * padded * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    seen = shape.longest + ALIGNED if shape.window else 1
    return copies, 4 * padded * seen, (WITH_A_WINDOW if shape.window else 4) * padded * seen


REQUESTS = 64
"""Most requests of a recorded decode step."""

TEXT_ROWS = 128
"""Most rows of a recorded text."""


CAPACITY, GROUP = 768, 256
"""Rows that texts of a group have at most, and should have: `texts.py`. They stay in a core's second cache."""


def recorded(shape: StepShape) -> int:
    """What recorded steps take: the widest moment of the largest one, and the buffers that batches are copied to. Of
    texts that are encoded in groups, each thread's has memory of its own.
    """
    if not build.available(processor_flags()):
        return 0
    rows = min(shape.seqs, REQUESTS) if shape.block_size else TEXT_ROWS
    blocks = -(-shape.longest // shape.block_size) if shape.block_size else 0
    groups = 0 if shape.block_size else usable_cores() * _working(shape, min(CAPACITY, shape.rows))
    if groups:  # they are recorded at CAPACITY rows, in memory that is given back
        groups = max(groups, _working(shape, CAPACITY))
    return _working(shape, rows) + rows * (4 * blocks + 44) + groups


def _working(shape: StepShape, rows: int) -> int:
    """Bytes that a recorded step of so many rows works in."""
    beside = shape.element * shape.hidden + 16 * shape.head_dim if shape.gated else 0  # a norm's result, angles twice
    step = activation_bytes(shape, rows) + rows * beside
    return step + step // 2  # half as much again lies between pieces that are in use
