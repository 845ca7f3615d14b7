"""What attention on a CPU takes beside its results: turned heads, gathered keys, masks. No torch here."""

from __future__ import annotations

from anycore.contract.costs import StepShape, activation_bytes, reference_workspace

PADDING = 512
"""Padded places of a group of decoding requests: `attention.CALL_COST`."""

ALIGNED = 16
"""Packed requests are padded to a multiple of it: `attention.ALIGNED`."""

MAKING_A_MASK, WITH_A_WINDOW = 9, 19
"""Bytes a place: int64 distances and bools."""


def workspace(shape: StepShape) -> int:
    """How far the widest moment of attention, or masks beside the MLP, go beyond `activation_bytes`."""
    counted = activation_bytes(shape)
    heads = (shape.heads + shape.kv_heads) * shape.head_dim
    stream = shape.element * (shape.hidden + heads + shape.kv_heads * shape.head_dim)  # residual; q, k, v
    out = shape.element * shape.heads * shape.head_dim
    turned = (4 if shape.element == 4 else shape.element) * heads  # rotated queries and keys
    turning = 10 * heads if shape.element < 4 else turned  # while it is done in float32
    angles = 8 * shape.head_dim if shape.gated else 0
    begun = shape.rows * (stream + angles)
    if shape.softcap:
        return begun + shape.rows * turned + reference_workspace(shape) - counted
    gathered, mask = _paged(shape) if shape.block_size else _packed(shape)
    making = mask // 4 * (WITH_A_WINDOW if shape.windowed else MAKING_A_MASK)
    moments = (
        begun + shape.rows * turning,
        begun + shape.rows * turned + making,
        begun + shape.rows * (turned + 2 * out) + mask + gathered,
        counted + shape.rows * angles + mask,
    )
    return max(moments) - counted


def _paged(shape: StepShape) -> tuple[int, int]:
    """Keys and values of one layer's decoding requests side by side, or of its longest prompt; masks of prompts that
    go on where an earlier step ended.
    """
    tokens = min(shape.kept, shape.seqs * (shape.longest + shape.block_size)) + PADDING
    keys = 2 * tokens * shape.kv_heads * shape.head_dim * shape.element
    places = shape.rows * (shape.longest + shape.block_size)
    return keys + 12 * tokens, 4 * places


def _packed(shape: StepShape) -> tuple[int, int]:
    """Without a cache, requests of like length are stacked; without a window a mask has one row a request."""
    padded = shape.rows + ALIGNED * min(shape.seqs, shape.rows)
    copies = shape.element * padded * (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    return copies, 4 * padded * (shape.longest + ALIGNED if shape.windowed else 1)
