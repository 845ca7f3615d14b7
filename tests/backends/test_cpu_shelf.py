"""The memory that packed matrices of float32 lie in."""

from __future__ import annotations

import gc
import mmap
import random
import weakref
from typing import Any

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of

from anycore_cpu.kernels import shelf
from anycore_cpu.kernels.shelf import ALIGNED, Shelf


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Shelf:
    """Boards of 64 KiB, for matrices of 1 KiB and more."""
    monkeypatch.setattr(shelf, "BOARD", 1 << 16)
    monkeypatch.setattr(shelf, "LEAST", 1 << 10)
    return Shelf()


def test_matrices_lie_apart_and_aligned_however_large(small: Shelf) -> None:
    chance, made = random.Random(0), []
    for number in range(60):
        matrix = small.empty(chance.choice((100, 256, 301, 5000, 30_000)), torch.float32)
        assert matrix.data_ptr() % ALIGNED == 0
        assert matrix.untyped_storage().nbytes() == matrix.nbytes  # as memory is counted
        made.append((matrix.fill_(number), number))
    assert all(bool((matrix == number).all()) for matrix, number in made)


def test_a_board_goes_with_its_last_matrix(small: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    boards: list[weakref.ref[Any]] = []
    take = shelf.board

    def watched(size: int) -> Any:
        made = take(size)
        boards.append(weakref.ref(made))
        return made

    monkeypatch.setattr(shelf, "board", watched)
    first, second = small.empty(4000, torch.float32), small.empty(4000, torch.float32)
    third = small.empty(16_000, torch.float32)
    assert len(boards) == 2
    del first
    gc.collect()
    assert boards[0]() is not None
    assert bool((second.fill_(7) == 7).all())
    del second
    gc.collect()
    assert boards[0]() is None
    assert bool((third.fill_(8) == 8).all())


def test_tiny_matrices_and_other_types_stay_where_torch_puts_them(small: Shelf) -> None:
    small.empty(10, torch.float32)
    assert not small.is_used
    kernels = kernels_of(LEVELS[0])
    used = kernels.shelf.is_used
    kernels.pack(torch.zeros(600, 300).bfloat16())
    assert kernels.shelf.is_used == used


def test_a_system_without_such_pages_has_others(small: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345)
    assert bool((small.empty(1000, torch.float32).fill_(3) == 3).all())
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert bool((small.empty(1000, torch.float32).fill_(3) == 3).all())
