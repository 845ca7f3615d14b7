"""The self-check: a model's own kinds of operations, computed small on the device and compared with exact results.

It takes well under a second and runs before weights are loaded. What a kernel computes wrongly without an error, for
one head size, data type or chip, is found here and not by users.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from anycore.contract import checks
from anycore.contract.backend import Backend
from anycore.contract.checks import AttentionCase
from anycore.contract.declare import BackendSpec, Level
from anycore.errors import PluginError

MOST_KV_HEADS = 2
"""Heads beyond these are more of the same; what counts is how many share a KV head."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a model asks of the operations."""

    dtype: str
    causal: bool
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int = 0  # 0: no KV cache
    windows: tuple[int | None, ...] = (None,)
    softcap: float | None = None
    activation: str | None = None
    rotary: bool = True
    generates: bool = True
    kv_cache: str | None = None  # a name from KV_CACHES: the cache is rounded


def self_check(backend: Backend, shape: Shape) -> None:
    """Compare each operation with float64.

    Raises:
        PluginError: one is wrong, or fails; names it.
    """
    with torch.inference_mode():
        for name, check in operations(backend, shape):
            try:
                check()
            except AssertionError as error:
                raise PluginError(
                    f"backend {backend.name} computes {name} wrongly on {backend.device}: {error}. Nothing it served "
                    "could be trusted. Versions that do not belong together are the usual cause: see `anycore doctor`",
                    param="backend",
                ) from error
            except Exception as error:
                raise PluginError(
                    f"{name} fails on {backend.device} of backend {backend.name}: {type(error).__name__}: {error}",
                    param="backend",
                ) from error


def declared(spec: BackendSpec, chip: str) -> Iterator[Shape]:
    """The shapes that a backend's table names for a chip, each head size with query heads in groups of four."""
    for row in spec.support:
        if row.level is Level.UNSUPPORTED or (row.chips and chip not in row.chips):
            continue
        causal = row.attention == "causal"
        for dtype in row.weights:
            for head_dim in row.head_dims or (64, 128):
                windows = (None, 64) if "sliding_window" in row.features else (None,)
                size = (row.block_sizes or (16,))[0] if causal else 0
                yield Shape(
                    dtype, causal, 4, 1, head_dim, size, windows, activation="silu", rotary=causal, generates=causal
                )


def operations(backend: Backend, shape: Shape) -> Iterator[tuple[str, Callable[[], None]]]:
    """Each operation's name, and its check."""
    kv_heads = min(shape.kv_heads, MOST_KV_HEADS)
    case = AttentionCase(
        shape.dtype,
        shape.head_dim,
        shape.causal,
        shape.block_size,
        softcap=shape.softcap,
        heads=kv_heads * shape.heads // shape.kv_heads,
        kv_heads=kv_heads,
        kv_cache=shape.kv_cache,
    )
    kind = f"of head size {shape.head_dim} in {shape.dtype}"
    for window in dict.fromkeys(shape.windows):
        # The checked requests are a few blocks long: a window has to be shorter to be seen.
        own = replace(case, window=None if window is None else min(window, shape.block_size + 3))
        where = "" if window is None else " in a window"
        if shape.block_size:
            cache = f"a KV cache in {shape.kv_cache}" if shape.kv_cache else "a KV cache"
            yield f"attention to {cache}{where}, {kind}", lambda own=own: checks.check_paged_attention(backend, own)  # type: ignore[misc]
        else:
            yield f"attention{where}, {kind}", lambda own=own: checks.check_packed_attention(backend, own)  # type: ignore[misc]
    yield "matrix products", lambda: checks.check_linear(backend, shape.dtype, 7, (64, 48), biased=True)
    yield "norms", lambda: checks.check_norms(backend, shape.dtype, 5, 64, with_residual=True)
    if shape.rotary:
        heads = case.heads, case.kv_heads, case.head_dim
        yield f"rotation {kind}", lambda: checks.check_rotary(backend, shape.dtype, 5, *heads)
    if shape.activation is not None:
        activation = shape.activation
        yield f"activation {activation}", lambda: checks.check_gated(backend, shape.dtype, activation, 5, 64)
    if shape.generates:
        yield "sampling", lambda: checks.check_sampling(backend, rows=400)
