"""The look at the NVIDIA driver: every answer it can give, with a driver that is played."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from anycore.contract.declare import Level, Need, Task, find
from anycore.errors import Unsupported
from anycore_cuda import probe as look
from anycore_cuda.probe import VISIBLE, Board, visible
from anycore_cuda.support import SPEC

BOARDS: list[Board] = [("GPU-aa", "NVIDIA H200", "sm90", 10), ("GPU-ab", "NVIDIA L4", "sm89", 20)]


class NVMLError(Exception):
    pass


def driver(*boards: Board, fails: str = "", slices: bool = False) -> Any:
    """A pynvml that knows these boards; with `slices` each is cut, and its first slice has half the memory."""

    def init() -> None:
        if fails:
            raise NVMLError(fails)

    def memory(handle: Any) -> Any:
        index, cut = handle
        return SimpleNamespace(total=boards[index][3] // (2 if cut else 1))

    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_DEVICE_MIG_ENABLE=1,
        nvmlInit=init,
        nvmlShutdown=lambda: None,
        nvmlSystemGetDriverVersion=lambda: b"580.1",
        nvmlDeviceGetCount=lambda: len(boards),
        nvmlDeviceGetHandleByIndex=lambda index: (index, False),
        nvmlDeviceGetCudaComputeCapability=lambda handle: tuple(map(int, boards[handle[0]][2][2:])),
        nvmlDeviceGetMigMode=lambda handle: (int(slices), int(slices)),
        nvmlDeviceGetMigDeviceHandleByIndex=lambda handle, index: (handle[0], True),
        nvmlDeviceGetName=lambda handle: boards[handle[0]][1] + (" MIG" if handle[1] else ""),
        nvmlDeviceGetUUID=lambda handle: boards[handle[0]][0].encode(),
        nvmlDeviceGetMemoryInfo=memory,
    )


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything is installed, whatever this one has."""
    monkeypatch.setattr(look, "installed", lambda package: {"torch": "2.11.0", "triton": "3.6.0"}.get(package))
    monkeypatch.setattr(look, "find_spec", lambda module: object())
    monkeypatch.delenv(VISIBLE, raising=False)


def test_devices_are_listed_with_chip_memory_and_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(*BOARDS))
    found = look.probe()
    assert [(d.index, d.name, d.chip, d.memory) for d in found.devices] == [
        (0, "NVIDIA H200", "sm90", 10),
        (1, "NVIDIA L4", "sm89", 20),
    ]
    assert found.versions["driver"] == "580.1"


def test_a_cut_gpu_is_its_first_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(BOARDS[0], slices=True))
    device = look.probe().devices[0]
    assert (device.name, device.memory) == ("NVIDIA H200 MIG", 5)


def test_the_drivers_own_words_are_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(fails="Driver Not Loaded"))
    found = look.probe()
    assert not found.available
    assert "Driver Not Loaded" in found.reason
    assert "driver" in found.advice


def test_hidden_gpus_are_said_to_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", driver(*BOARDS))
    monkeypatch.setenv(VISIBLE, "-1")
    found = look.probe()
    assert not found.available
    assert VISIBLE in found.reason
    assert "2 GPUs" in found.reason


def test_a_torch_for_processors_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look, "installed", lambda package: "2.11.0+cpu")
    found = look.probe()
    assert "2.11.0+cpu" in found.reason
    assert found.advice


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("1,0", ["GPU-ab", "GPU-aa"]),
        ("GPU-ab", ["GPU-ab"]),
        ("GPU-a", []),
        ("0,7,1", ["GPU-aa"]),
        ("0,0", ["GPU-aa"]),
        ("", []),
    ],
)
def test_visible_devices_in_their_order(value: str, names: list[str]) -> None:
    assert [board[0] for board in visible(BOARDS, {VISIBLE: value})] == names


def test_old_chips_are_refused_with_the_reason() -> None:
    need = Need(Task.GENERATE, "causal", "LlamaForCausalLM", "bfloat16", 64, chip="sm75")
    with pytest.raises(Unsupported, match=r"compute capability 8\.0"):
        find(SPEC.support, need)
    new = Need(Task.GENERATE, "causal", "LlamaForCausalLM", "bfloat16", 64, chip="sm90")
    assert find(SPEC.support, new).level is Level.NATIVE
