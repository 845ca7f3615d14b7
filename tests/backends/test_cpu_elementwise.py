"""Norms, gates and activations of the CPU kernels, at every level this machine can run, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract.ops import Ops
from anycore_cpu.kernels.library import ACTIVATIONS, Kernels

EXACT = Ops()
DTYPES = {"float32": (torch.float32, 2e-6), "bfloat16": (torch.bfloat16, 2**-8)}
SHAPES = ((1, 7), (3, 16), (2, 5, 33), (40, 576), (0, 16))


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: Tensor, exact: Tensor, tolerance: float, atol: float = 5e-7) -> None:
    torch.testing.assert_close(got.double(), exact, rtol=tolerance, atol=atol)


@pytest.mark.parametrize("name", DTYPES)
def test_norms(kernels: Kernels, name: str) -> None:
    dtype, tolerance = DTYPES[name]
    for seed, shape in enumerate(SHAPES):
        x, residual = (numbers(seed + i, *shape).to(dtype) for i in (0, 1))
        weight, bias = numbers(seed + 2, shape[-1]), numbers(seed + 3, shape[-1])
        for other in (None, residual):
            total = x if other is None else x + other
            rms, kept = kernels.norm(x, other, weight, None, 1e-6, centred=False)
            assert torch.equal(kept, total)
            exact = total.double() * (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
            close(rms, exact, tolerance)
            layer, kept = kernels.norm(x, other, weight, bias, 1e-6, centred=True)
            assert torch.equal(kept, total)
            close(layer, F.layer_norm(total.double(), shape[-1:], weight.double(), bias.double(), 1e-6), 4 * tolerance)


@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("name", DTYPES)
def test_activations_and_gates(kernels: Kernels, name: str, kind: str) -> None:
    dtype, tolerance = DTYPES[name]
    for seed, shape in enumerate(SHAPES):
        x = (numbers(seed, *shape[:-1], 2 * shape[-1]) * 4).to(dtype)
        close(kernels.activation(x, kind, gated=False), EXACT.activation(x.double(), kind), tolerance, 2e-6)
        close(kernels.activation(x, kind, gated=True), EXACT.gated(x.double(), kind), tolerance, 2e-5)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_far_out_and_of_nan(kernels: Kernels, kind: str) -> None:
    x = torch.tensor([-1e4, -200.0, -90.0, -12.0, 0.0, 12.0, 90.0, 1e4, torch.nan])
    torch.testing.assert_close(
        kernels.activation(x, kind, gated=False), EXACT.activation(x, kind), rtol=1e-6, atol=1e-6, equal_nan=True
    )


def test_what_kernels_do_not_know_is_refused(kernels: Kernels) -> None:
    with pytest.raises(ValueError, match=r"not torch\.float16"):
        kernels.activation(torch.zeros(2, 4).half(), "silu", gated=False)
    with pytest.raises(ValueError, match="'swish' is not one of silu"):
        kernels.activation(torch.zeros(2, 4), "swish", gated=False)
