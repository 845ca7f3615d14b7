"""What a GPU takes beside tensors that every model has: context, libraries, kernels' scratch, graphs. No torch."""

from __future__ import annotations

from anycore.contract.costs import StepShape, graph_bytes

RUNTIME = 780 << 20
"""The context with the kernels that are loaded into it, and pinned buffers' counterparts (an H200: 777 to 779 MiB)."""

LIBRARIES = 2 * (32 << 20)
"""cuBLAS's workspace on Hopper, the largest, for the stream that steps run on and for the one they are captured on."""

PARTS = 3 * 160
"""Programs of a decode step that keep a part of a result: kernels.decode's PROGRAMS on the largest processors."""

DENSE = 64 << 20
"""A tile of a quantised matrix that cuBLAS multiplies (kernels.quantised_dense's WORKSPACE)."""

SPLIT = 32 << 20
"""Float32 parts of a product with a quantised matrix whose columns are split: two tiles a processor, at most."""

SUMS = 4 * 2 * 264 * 64 * 64
"""Float32 sums of tiles that programs of a product leave aside: two each, of kernels.products' largest shape."""

KEPT = 4 * 132 * 64 * 128
"""Float32 parts of a small product that the norm after it joins, of kernels.small_products' largest shapes."""

GRAPH = 2 << 20
"""A captured step of some hundred launches, in the driver's memory."""


def workspace(shape: StepShape) -> int:
    """Libraries, the float32 parts of results that programs leave to be joined, and tiles of quantised matrices."""
    group = max(16, shape.heads // shape.kv_heads)
    programs = max(2 * PARTS, shape.seqs * shape.kv_heads)
    joined = max(SUMS, 4 * programs * group * (max(16, shape.head_dim) + 2))
    return LIBRARIES + joined + KEPT + (DENSE + SPLIT if shape.quantised else 0)


def graphs(shape: StepShape) -> int:
    return graph_bytes(shape, GRAPH, mixed=True)
