"""Which launches may share a compiled kernel, with a kernel that only records its calls."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from anycore_cuda.kernels import launch as module
from anycore_cuda.kernels.launch import Launcher


class Recorder:
    """Stands for a kernel `(a_ptr, b_ptr, count, scale, BLOCK: constexpr)`, and for what it compiles to."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, constants: tuple[bool, ...] = (False, False, False, False, True)) -> None:
        self.params = [SimpleNamespace(is_constexpr=constant) for constant in constants]
        self.compiled: list[tuple[Any, ...]] = []
        self.direct: list[tuple[Any, ...]] = []
        self.prepared: list[tuple[Any, ...]] = []
        self.loaded = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def ordinary(*args: Any, **constants: Any) -> Recorder:
            self.compiled.append((grid, args, constants))
            return self

        return ordinary

    def warmup(self, *args: Any, grid: tuple[int, ...], **constants: Any) -> Recorder:
        self.prepared.append((grid, args, constants))
        return self

    def _init_handles(self) -> None:
        self.loaded += 1

    def run(self, *args: Any) -> None:
        self.direct.append(args)


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    driver = SimpleNamespace(active=SimpleNamespace(get_current_stream=lambda device: ("stream", device)))
    monkeypatch.setattr(module.triton.runtime, "driver", driver)
    return Launcher(direct=True)


class Elsewhere(torch.Tensor):
    def get_device(self) -> int:
        return 1


A, B = torch.zeros(64), torch.zeros(64)


def test_an_equal_launch_runs_the_binary_with_its_own_arguments(launcher: Launcher) -> None:
    kernel, other = Recorder(), torch.ones(64)
    launcher(kernel, (5,), A, B, 7, 0.5, BLOCK=32, num_warps=4)
    assert kernel.compiled == [((5,), (A, B, 7, 0.5), {"BLOCK": 32, "num_warps": 4})]
    launcher(kernel, (6, 2), A, other, 9, 0.25, BLOCK=32, num_warps=4)
    assert len(kernel.compiled) == 1
    pointers = (A.data_ptr(), other.data_ptr())
    assert kernel.direct == [
        (6, 2, 1, ("stream", -1), "function", "metadata", None, None, None, *pointers, 9, 0.25, None)
    ]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        ((A.half(), B, 7, 0.5), {"BLOCK": 32, "num_warps": 4}),
        ((A[1:], B, 7, 0.5), {"BLOCK": 32, "num_warps": 4}),  # no longer aligned to 16 bytes
        ((A, B, 16, 0.5), {"BLOCK": 32, "num_warps": 4}),
        ((A, B, 1, 0.5), {"BLOCK": 32, "num_warps": 4}),
        ((A, B, 1 << 31 | 1, 0.5), {"BLOCK": 32, "num_warps": 4}),  # no longer an int32
        ((A, B, 7, 2), {"BLOCK": 32, "num_warps": 4}),
        ((A, B, 7, 0.5), {"BLOCK": 64, "num_warps": 4}),
        ((A, B, 7, 0.5), {"BLOCK": 32, "num_warps": 8}),
        ((A, B, 7, 0.5), {"BLOCK": 32, "num_stages": 4}),
        ((A.as_subclass(Elsewhere), B, 7, 0.5), {"BLOCK": 32, "num_warps": 4}),
    ],
)
def test_what_a_kernel_is_compiled_for_tells_launches_apart(
    launcher: Launcher, args: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    kernel = Recorder()
    launcher(kernel, (5,), A, B, 7, 0.5, BLOCK=32, num_warps=4)
    launcher(kernel, (5,), *args, **constants)
    assert len(kernel.compiled) == 2
    assert kernel.direct == []


def test_kernels_do_not_share(launcher: Launcher) -> None:
    kernels = Recorder(), Recorder()
    for kernel in kernels:
        launcher(kernel, (5,), A, B, 7, 0.5, BLOCK=32)
        assert len(kernel.compiled) == 1


@pytest.mark.parametrize(
    ("direct", "constants"),
    [
        (False, (False, False, False, False, True)),  # a Triton whose compiled kernels are not known
        (True, (False, False, True, False, True)),  # a constant among what varies: it would be told by its kind only
        (True, (False, False, False, False, False)),  # a value with a name: its place among the arguments is not known
    ],
)
def test_other_launches_go_the_ordinary_way(launcher: Launcher, direct: bool, constants: tuple[bool, ...]) -> None:
    kernel, launch = Recorder(constants), Launcher(direct)
    for _ in range(3):
        launch(kernel, (5,), A, B, 7, 0.5, BLOCK=32)
    assert len(kernel.compiled) == 3
    assert kernel.direct == []


def test_inside_compiling_kernels_are_prepared_once_and_nothing_runs(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.triton, "AsyncCompileMode", lambda threads: nullcontext())
    monkeypatch.setattr(module.torch.cuda, "set_device", lambda device: None)
    kernel, known = Recorder(), Recorder()
    launcher(known, (5,), A, B, 7, 0.5, BLOCK=32)
    with launcher.compiling(torch.device("cuda", 0)):
        for _ in range(2):
            launcher(kernel, (5,), A, B, 7, 0.5, BLOCK=32)
            launcher(known, (5,), A, B, 7, 0.5, BLOCK=32)
    assert kernel.prepared == [((5,), (A, B, 7, 0.5), {"BLOCK": 32})]
    assert (kernel.loaded, kernel.compiled, kernel.direct) == (1, [], [])
    assert (known.prepared, known.direct) == ([], [])
    launcher(kernel, (5,), A, B, 7, 0.5, BLOCK=32)
    launcher(known, (5,), A, B, 7, 0.5, BLOCK=32)
    assert (len(kernel.compiled), len(known.direct)) == (1, 1)
