"""The pool of threads behind the CPU kernels: several callers, forks, and work that is always all done."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of

from anycore_cpu.kernels.library import Kernels, PackedMatrix


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    return kernels_of(LEVELS[0])


def product(kernels: Kernels, rows: int) -> tuple[torch.Tensor, PackedMatrix, torch.Tensor]:
    """Enough work for every thread, and its result as one thread computes it."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 256, generator=generator).bfloat16()
    matrix = kernels.pack(torch.randn(1500, 256, generator=generator).bfloat16())
    kernels.set_threads(1)
    alone = kernels.linear(x, matrix, None)
    kernels.set_threads(2)
    return x, matrix, alone


def test_threads_change_no_bit_however_many_and_however_often(kernels: Kernels) -> None:
    x, matrix, alone = product(kernels, 70)
    for threads in (2, 3, 8):
        kernels.set_threads(threads)
        for _ in range(60):
            assert torch.equal(kernels.linear(x, matrix, None), alone)
    kernels.set_threads(2)


def test_callers_side_by_side_get_their_own_results(kernels: Kernels) -> None:
    work = [product(kernels, rows) for rows in (40, 50, 60, 70)]
    wrong: list[int] = []

    def call(index: int) -> None:
        x, matrix, alone = work[index]
        for _ in range(50):
            if not torch.equal(kernels.linear(x, matrix, None), alone):
                wrong.append(index)

    callers = [threading.Thread(target=call, args=(index,)) for index in range(len(work))]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_a_forked_child_makes_threads_of_its_own(kernels: Kernels) -> None:
    x, matrix, alone = product(kernels, 80)
    assert torch.equal(kernels.linear(x, matrix, None), alone)
    context = multiprocessing.get_context("fork")
    right = context.Value("i", 0)

    def child() -> None:
        right.value = int(all(torch.equal(kernels.linear(x, matrix, None), alone) for _ in range(5)))

    process = context.Process(target=child)
    process.start()
    process.join(timeout=30)
    if process.is_alive():
        process.kill()
        pytest.fail("the child waits for threads that it does not have")
    assert right.value == 1


def test_beside_processes_that_never_rest_no_bit_changes(kernels: Kernels) -> None:
    """The threads lose their cores, notice it, and sleep between pieces and at ends of jobs."""
    x, matrix, alone = product(kernels, 70)
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for threads in (2, 4):
            kernels.set_threads(threads)
            for _ in range(150):
                assert torch.equal(kernels.linear(x, matrix, None), alone)
    finally:
        kernels.set_threads(2)
        for loop in loops:
            loop.kill()
            loop.wait()
