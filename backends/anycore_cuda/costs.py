"""What a GPU takes beside tensors that every model has: context, libraries, kernels' scratch, graphs. No torch."""

from __future__ import annotations

from anycore.contract.costs import StepShape, graph_bytes

RUNTIME = 640 << 20
"""The context with the kernels that are loaded into it, and pinned buffers' counterparts."""

LIBRARIES = 2 * (32 << 20)
"""cuBLAS's workspace on Hopper, the largest, for the stream that steps run on and for the one they are captured on."""

PARTS = 6 * 160
"""Programs of a decode step that keep a part of a result: kernels.decode's PROGRAMS on the largest processors."""

GRAPH = 2 << 20
"""A captured step of some hundred launches, in the driver's memory."""


def workspace(shape: StepShape) -> int:
    """Libraries, and the float32 parts of results that decode programs leave for each other to join."""
    group = max(16, shape.heads // shape.kv_heads)
    programs = max(2 * PARTS, shape.seqs * shape.kv_heads)
    return LIBRARIES + 4 * programs * group * (max(16, shape.head_dim) + 2)


def graphs(shape: StepShape) -> int:
    return graph_bytes(shape, GRAPH)
