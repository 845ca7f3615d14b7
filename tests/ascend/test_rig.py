"""The rig itself: what it must refuse, and that its device behaves like one."""

from __future__ import annotations

import pytest
import torch
import torch_npu
from rig.install import CALLS
from rig.limits import LimitError


def test_calls_are_counted_and_computed(npu: torch.device) -> None:
    before = CALLS["npu::npu_rms_norm"]
    x, weight = torch.randn(3, 8), torch.rand(8)
    normed, _ = torch_npu.npu_rms_norm(x.to(npu), weight.to(npu), 1e-6)
    assert normed.device == npu
    assert torch.allclose(normed.cpu(), torch.nn.functional.rms_norm(x, (8,), weight, 1e-6), atol=1e-6)
    assert CALLS["npu::npu_rms_norm"] == before + 1


def test_an_operator_without_a_reference_is_an_error(npu: torch.device) -> None:
    with pytest.raises(LimitError, match="npu_fast_gelu has no reference"):
        torch_npu.npu_fast_gelu(torch.zeros(2, device=npu))


def test_an_operator_that_the_chip_lacks_is_not_computed_on_the_host(npu: torch.device) -> None:
    with pytest.raises(RuntimeError, match="special_erfcx"):
        torch.special.erfcx(torch.zeros(2, device=npu))


def test_wrong_arguments_fail_in_torch_npu(npu: torch.device) -> None:
    with pytest.raises(RuntimeError, match="epsilom"):
        torch_npu.npu_rms_norm(torch.zeros(2, 8, device=npu), torch.zeros(8, device=npu), epsilom=1e-6)


def test_new_memory_is_not_zero(npu: torch.device) -> None:
    torch.npu.empty_cache()
    assert torch.empty(1 << 23, device=npu).isnan().all()


def test_conversion_to_float64_gives_float32(npu: torch.device) -> None:
    assert torch.zeros(2, device=npu).double().dtype == torch.float32


def test_memory_ends_where_it_was_said_to(npu: torch.device) -> None:
    total = torch.npu.mem_get_info(npu)[1]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total, dtype=torch.uint8, device=npu)
    held = torch.empty(total // 4, dtype=torch.uint8, device=npu)
    assert torch.npu.memory_allocated(npu) >= held.nbytes


def test_graphs_run_at_replay_only(npu: torch.device) -> None:
    x = torch.ones(4, device=npu)
    graph = torch.npu.NPUGraph()
    with torch.npu.graph(graph):
        doubled = x * 2
    assert doubled.isnan().all()
    x.fill_(3)
    graph.replay()
    assert doubled.tolist() == [6.0] * 4


def test_nothing_comes_to_the_host_while_capturing(npu: torch.device) -> None:
    x = torch.ones(4, device=npu)
    with pytest.raises(RuntimeError), torch.npu.graph(torch.npu.NPUGraph()):
        x.sum().item()
