"""What the CPU backend reads of the machine: container limits, processor flags, and the private operations it tries."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from anycore.choose import Choice
from anycore.contract import host
from anycore.contract.declare import Device, Level, Need, Task, find, mismatches
from anycore.contract.weights import DenseWeight
from anycore.engine.launch import prefer_native
from anycore.errors import PluginError
from anycore_cpu import packed, probe, support
from anycore_cpu.attention import CALL_COST, grouped
from anycore_cpu.kernels import build
from anycore_cpu.ops import CpuOps

MIB = 1 << 20


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of control groups in place of the machine's."""
    monkeypatch.setattr(host, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(host, "OWN", tmp_path / "own")
    return tmp_path


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_no_container_leaves_the_machine(groups: Path) -> None:
    assert list(host.memory_limits()) == []
    assert host.core_quota() is None
    assert 0 < host.memory_free() <= host.memory_total()


def test_version_2_limits_count_without_droppable_cache(groups: Path) -> None:
    (groups / "own").write_text("0::/slice/job\n")
    outer, inner = groups / "cgroup" / "slice", groups / "cgroup" / "slice" / "job"
    write(outer, memory__max=str(64 * MIB), memory__current=str(40 * MIB), memory__stat=f"inactive_file {10 * MIB}")
    write(inner, memory__max="max", memory__current=str(30 * MIB), cpu__max="150000 100000")
    write(outer, cpu__max="max 100000")
    assert list(host.memory_limits()) == [(64 * MIB, 30 * MIB)]
    assert host.memory_total() == 64 * MIB
    assert host.memory_free() == 34 * MIB
    assert host.core_quota() == 1.5
    assert host.usable_cores() == 1  # half a core is no core: threads would be stopped at every barrier


def test_version_1_limits(groups: Path) -> None:
    (groups / "own").write_text("4:memory:/job\n5:cpu,cpuacct:/job\n")
    write(
        groups / "cgroup" / "memory" / "job",
        memory__limit_in_bytes=str(32 * MIB),
        memory__usage_in_bytes=str(12 * MIB),
        memory__stat=f"cache 5\ntotal_inactive_file {2 * MIB}",
    )
    write(groups / "cgroup" / "memory", memory__limit_in_bytes=str((1 << 63) - 4096), memory__usage_in_bytes="1")
    write(groups / "cgroup" / "cpu" / "job", cpu__cfs_quota_us="200000", cpu__cfs_period_us="100000")
    write(groups / "cgroup" / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    assert list(host.memory_limits()) == [(32 * MIB, 10 * MIB)]
    assert host.core_quota() == 2.0


@pytest.mark.parametrize(
    ("flags", "chip", "level"),
    [
        ({"avx2", "avx512f", "avx512_bf16", "amx_bf16"}, "x86-amx-bf16", Level.NATIVE),
        ({"avx2", "avx512f", "avx512_bf16"}, "x86-avx512-bf16", Level.NATIVE),
        ({"avx2", "avx512f"}, "x86-avx512", Level.REFERENCE),
        ({"avx2", "fma"}, "x86-avx2", Level.REFERENCE),
        ({"asimd", "bf16"}, "arm-bf16", Level.NATIVE),
        ({"asimd", "fphp"}, "arm", Level.REFERENCE),
    ],
)
def test_bfloat16_is_native_where_the_chip_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], chip: str, level: Level
) -> None:
    """With kernels of our own and without; quantised weights stay small with them only."""
    monkeypatch.setattr(probe, "processor_flags", lambda: frozenset(flags))
    for kernels in (True, False):
        monkeypatch.setattr(build, "available", lambda flags, kernels=kernels: kernels)
        assert probe.chip() == (chip if kernels else f"{chip}-plain")
        need = Need(Task.GENERATE, "causal", "LlamaForCausalLM", "bfloat16", 64, chip=probe.chip())
        assert find(support.SPEC.support, need).level is (level if kernels else Level.REFERENCE)
        wide = find(support.SPEC.support, replace(need, weights="float32"))
        assert wide.level is (Level.NATIVE if kernels else Level.REFERENCE)
        assert kernels or "anycore doctor says why" in wide.note
        fitting = [row for row in support.SPEC.support if not mismatches(row, replace(need, scheme="w4a16"))]
        assert bool(fitting) == kernels


def test_probe_keeps_the_reason_of_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> int:
        raise OSError("no /proc here")

    monkeypatch.setattr(probe, "memory_total", broken)
    found = probe.probe()
    assert not found.available
    assert "no /proc here" in found.reason


def test_there_is_one_device() -> None:
    with pytest.raises(PluginError, match="not 1"):
        support.SPEC.open(1)


def test_private_operations_are_tried_before_they_are_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(len(x), 96, dtype=x.dtype)

    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operation")

    for name, substitute in (("linear", wrong), ("reorder", missing)):
        with monkeypatch.context() as patch:
            patch.setattr(packed, name, substitute)
            ops = CpuOps()
            assert ops.packs == set()
            x, weight = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16()
            assert torch.equal(ops.linear(x, ops.pack(DenseWeight(weight))), F.linear(x, weight))


def test_groups_of_like_length_waste_little() -> None:
    lengths = [4000, 10, 3990, 12, 700, 11, 3600, 3995]
    groups = grouped(list(range(len(lengths))), lengths, None)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        longest = max(lengths[i] for i in group)
        assert sum(longest - lengths[i] for i in group) <= CALL_COST
    assert [1, 3, 5] in groups
    assert grouped([0, 1], [4000, 10], window=8) == [[0, 1]]


@pytest.mark.parametrize(
    ("chip", "dtype"), [("x86-avx512-bf16-plain", "bfloat16"), ("x86-avx2-plain", "float32"), ("riscv64", "float32")]
)
def test_plain_torch_computes_in_what_the_chip_is_fast_at(chip: str, dtype: str) -> None:
    """A checkpoint in bfloat16, `--dtype auto`: neither type is native there, the rows are in order."""
    own = Need(Task.GENERATE, "causal", "LlamaForCausalLM", "bfloat16", 64, chip=chip)
    device = Device(0, "a processor", chip)
    choice = Choice(support.SPEC, device, own, find(support.SPEC.support, own))
    found = prefer_native(choice, lambda _: [own, replace(own, weights="float32")])
    assert found.need.weights == dtype
    assert found.support.level is Level.REFERENCE
