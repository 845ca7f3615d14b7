"""The self-check: a backend that computes something wrongly does not serve, and hears which operation it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anycore.contract.selfcheck import Shape, declared, self_check
from anycore.errors import PluginError
from anycore.plugins import load
from anycore_cpu.backend import CpuBackend

DECODER = Shape("float32", True, 8, 2, 64, block_size=16, windows=(None, 5), activation="silu")
ENCODER = Shape("float32", False, 4, 4, 64, activation="gelu", rotary=False, generates=False)

Wrong = Callable[[Any], None]


def causal_encoder(ops: Any) -> None:
    right = ops.attention

    def wrong(q: Any, k: Any, v: Any, cache: Any, batch: Any, *rest: Any) -> Any:
        batch.causal = True
        return right(q, k, v, cache, batch, *rest)

    ops.attention = wrong


def without_windows(ops: Any) -> None:
    right = ops.attention
    ops.attention = lambda q, k, v, cache, batch, scale, window=None, softcap=None: right(
        q, k, v, cache, batch, scale, None, softcap
    )


def other_pairs(ops: Any) -> None:
    right = ops.rotary
    ops.rotary = lambda q, k, cos, sin: right(q, k, cos, -sin)


def lost_residual(ops: Any) -> None:
    right = ops.rms_norm
    ops.rms_norm = lambda x, weight, eps, residual=None: right(x, weight, eps)


def failing(ops: Any) -> None:
    def fail(*given: Any) -> Any:
        raise RuntimeError("error 561002")

    ops.gated = fail


def test_right_backends_pass() -> None:
    for shape in (DECODER, ENCODER):
        self_check(CpuBackend(), shape)


@pytest.mark.parametrize(
    ("shape", "break_it", "name"),
    [
        (ENCODER, causal_encoder, "computes attention, of head size 64 in float32 wrongly"),
        (DECODER, without_windows, "computes attention to a KV cache in a window, of head size 64 in float32 wrongly"),
        (DECODER, other_pairs, "computes rotation of head size 64 in float32 wrongly"),
        (DECODER, lost_residual, "computes norms wrongly"),
        (DECODER, failing, "activation silu fails on cpu of backend cpu: RuntimeError: error 561002"),
    ],
)
def test_wrong_operations_are_named(shape: Shape, break_it: Wrong, name: str) -> None:
    backend = CpuBackend()
    break_it(backend.ops)
    with pytest.raises(PluginError, match=name):
        self_check(backend, shape)


def test_shapes_of_a_table() -> None:
    spec = load().backend("cpu")
    shapes = list(declared(spec, "x86-amx-bf16"))
    assert {shape.dtype for shape in shapes} == {"float32", "bfloat16"}
    assert {shape.causal for shape in shapes} == {True, False}
