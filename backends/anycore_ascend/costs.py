"""What an NPU takes beside tensors that every model has, as numbers for the memory plan. No torch."""

from __future__ import annotations

from anycore.contract.costs import StepShape, graph_bytes, reference_workspace

RUNTIME = 1 << 30
"""The context, its streams and the operators that are loaded into it. Not measured yet."""

OPERATORS = 256 << 20
"""Workspaces that aclnn operators ask for, the largest of them at a time, and the masks. Not measured yet."""

GRAPH = 4 << 20

GRAPH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
"""Few, since every graph takes streams of the device, and none larger than a block: padding needs slots of its own."""


def workspace(shape: StepShape) -> int:
    """A native row's heads, padded to the cache's size; a reference row's attention in plain torch besides."""
    padded = 4 * shape.element * shape.rows * shape.heads * max(64, shape.head_dim)
    return OPERATORS + padded + (reference_workspace(shape) if shape.reference or shape.softcap else 0)


def graphs(shape: StepShape) -> int:
    return graph_bytes(shape, GRAPH, GRAPH_SIZES)
