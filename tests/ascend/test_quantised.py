"""Quantised weights beyond what the kit's small models reach."""

from __future__ import annotations

import torch

from anycore.contract.check_weights import ROUNDED, exact_rows, on_device
from anycore.contract.formats import Format
from anycore.models.quantised.rounding import quantise
from anycore_ascend.quantised import LARGEST, Int8Handle
from anycore_ascend.support import SPEC


def test_a_head_of_more_rows_than_an_operand_may_have_is_several() -> None:
    backend = SPEC.open(0)
    generator = torch.Generator().manual_seed(0)
    weight = quantise(torch.randn(LARGEST + 3, 32, generator=generator).mul(32**-0.5).half(), Format("int8"))
    handle = backend.ops.pack(on_device(weight, backend))
    assert isinstance(handle, Int8Handle)
    assert [len(scale) for _, scale in handle.parts] == [LARGEST, 3]
    x = torch.randn(2, 32, generator=generator).half()
    got = backend.ops.linear(backend.memory.upload(x), handle).cpu().double()
    assert float((got - x.double() @ exact_rows(weight).T).abs().max()) < ROUNDED
