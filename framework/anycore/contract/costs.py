"""What the largest step takes in memory, from plain numbers: terms that the memory plan and backends share. No torch.

A backend whose kernels keep more or less than the contract's defaults says so in `BackendSpec.workspace`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SAMPLED_ROWS = 64
"""Rows of logits that `contract.sampling` treats at a time; its [rows, V] temporaries are counted for so many."""

SAMPLING_BYTES = 48
"""Bytes per logit while a row is sampled: float32 and int64 copies, a sort, float64 probabilities."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step that is ever asked for. Sizes are counts of elements, but for `element`."""

    rows: int  # tokens computed in one step
    seqs: int  # requests in one step
    longest: int  # tokens of one request
    kept: int  # tokens the KV cache holds; 0: there is none
    block_size: int  # 0: there is no KV cache
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocab: int  # logits a sampled row has; 0: no head is loaded
    element: int  # bytes of an activation
    gated: bool = True  # a decoder: its MLP multiplies two halves, and it keeps a residual stream
    window: int = 0  # the longest of the layers that see the last tokens only; 0: all see everything
    softcap: bool = False
    reference: bool = False  # the row of the table that was chosen is a reference row
    quantised: bool = False  # some matrices are
    rounded: bool = False  # the KV cache is
    ranks: int = 1  # that have this model's logits in parts


def activation_bytes(shape: StepShape, rows: int | None = None) -> int:
    """The widest moment of a step, within the attention or the MLP of one layer.

    A decoder's layer holds its input, the residual stream, their sum and its norm, beside q, k, v and the attention
    output or the MLP's two halves and their product. An encoder's holds its input, what attention made of it and the
    norm of their sum, beside the same or the MLP before and after its activation.
    """
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    if shape.gated:
        width = 4 * shape.hidden + max(attention, 3 * shape.intermediate)
    else:
        width = 3 * shape.hidden + max(attention, 2 * shape.intermediate)
    return shape.element * width * (shape.rows if rows is None else rows)


def logits_bytes(shape: StepShape) -> int:
    """One row of logits a sequence in float32 and in the head's own type, a copy for log-probabilities, what
    penalties count of each, and the temporaries of sampling. Ranks put logits together from parts, in two copies.
    """
    own = shape.element if shape.element < 4 else 0
    own += 8 if shape.ranks > 1 else 0
    return shape.vocab * ((12 + own) * shape.seqs + SAMPLING_BYTES * min(shape.seqs, SAMPLED_ROWS))


def reference_workspace(shape: StepShape) -> int:
    """What the contract's own attention takes: one request's keys, values and queries in float32, and its scores
    [heads, rows, tokens] three times over.
    """
    rows = min(shape.rows, shape.longest)
    scores = 12 * shape.heads * rows * shape.longest
    keys = 2 * shape.longest * shape.kv_heads * shape.head_dim * (shape.element + 8)
    return scores + keys + 12 * rows * shape.heads * shape.head_dim


MIXED_GRAPHS = 32
"""Kinds of steps with prompts that are captured, at most."""

MIXED_PROMPTS = 16
"""Prompts of a step that is captured: fewer than these, since the last place is nobody's."""

MIXED_ROWS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Rows of captured steps with prompts. Larger steps take longer to compute than to launch."""


def mixed_rows(most: int) -> list[int]:
    """Rows that steps with prompts are captured for, where a step has `most` at most."""
    return [*(size for size in MIXED_ROWS if size < most), *((most,) if most <= MIXED_ROWS[-1] else ())]


def buckets(most: int) -> list[int]:
    """Batch sizes to capture: close together where a step is short, never more than an eighth too large from 64 on."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 32, 32)]
    return [size for size in sizes if size < most] + [most]


def graph_bytes(shape: StepShape, each: int, sizes: Sequence[int] | None = None, mixed: bool = False) -> int:
    """What `contract.graphs` takes: its buffers, the memory that captured steps share, as wide as the largest of them,
    what every one leaves there for its caller, and `each` of the driver's own. Nothing where nothing decodes.

    A batch size is captured with and without sampling, and both again for batches that share a prefix. `mixed`: steps
    with prompts are captured, too.
    """
    if not shape.block_size:
        return 0
    captured = buckets(shape.seqs) if sizes is None else sorted({min(size, shape.seqs) for size in sizes})
    blocks = -(-shape.longest // shape.block_size)
    buffers = shape.seqs * (4 * blocks + 72)  # block tables, and what else lies on a desk
    shared = activation_bytes(shape, captured[-1]) + captured[-1] * shape.vocab * (8 + shape.element)
    left = sum(captured) * (shape.element * shape.hidden + 25)  # hidden rows, ids, whether they are finite, both again
    total = buffers + shared + 4 * (left + len(captured) * each)
    rows = mixed_rows(shape.rows) if mixed else []
    if rows:
        buffers = shape.seqs * 4 * blocks + rows[-1] * 24
        wider = max(0, activation_bytes(shape, rows[-1]) - shared)
        total += buffers + wider + MIXED_GRAPHS * (each + (shape.seqs + MIXED_PROMPTS) * shape.element * shape.hidden)
    return total
