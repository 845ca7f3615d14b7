"""Ranks as threads of the test: they exchange through memory, and start at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from anycore import plugins
from anycore.config import ModelConfig
from anycore.contract.backend import Backend
from anycore.contract.collective import Collective
from anycore.engine.engine import Engine
from anycore.engine.launch import Prepared, build, prepare
from anycore.engine.sharing import Rank

T = TypeVar("T")

SECONDS = 120.0  # for one exchange
LOADED = plugins.load()


class Room:
    """Where threads lay down what they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size)
        self.places: list[Any] = [None] * size
        self.sums = self.gathers = 0

    def exchange(self, rank: int, mine: Any) -> list[Any]:
        self.places[rank] = mine
        self.barrier.wait(SECONDS)
        found = list(self.places)
        self.barrier.wait(SECONDS)
        return found


class ThreadRank(Collective):
    def __init__(self, room: Room, rank: int) -> None:
        self.room, self.rank, self.size = room, rank, room.size

    def all_reduce(self, x: Tensor) -> Tensor:
        self.room.sums += self.rank == 0
        first, *others = self.room.exchange(self.rank, x.clone())
        total = first.clone()
        for other in others:
            total += other
        return total

    def all_gather(self, x: Tensor) -> Tensor:
        self.room.gathers += self.rank == 0
        return torch.cat(self.room.exchange(self.rank, x.clone()), dim=-1)

    def least(self, numbers: list[int]) -> list[int]:
        return [min(column) for column in zip(*self.room.exchange(self.rank, numbers), strict=True)]


class Group:
    """The engines of all ranks of a model, on the CPU in float32 unless said otherwise."""

    def __init__(self, folder: Path, size: int, **settings: Any) -> None:
        self.settings = {"backend": "cpu", "dtype": "float32", "kv_cache_memory": 16 << 20, **settings}
        self.config = ModelConfig(model=str(folder), tensor_parallel_size=size, **self.settings)
        self.room = Room(size)
        self.engines = self._each(self._open)

    def run(self, work: Callable[[Engine], T]) -> list[T]:
        """What a piece of work brings in each rank, all at the same time."""
        return self._each(lambda rank: work(self.engines[rank]))

    def _open(self, rank: int) -> Engine:
        def join(backend: Backend) -> None:
            backend.ops.group = ThreadRank(self.room, rank)

        return build(ready(self.config, rank), join=join)

    def _each(self, work: Callable[[int], T]) -> list[T]:
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def go(rank: int) -> None:
            try:
                results[rank] = work(rank)
            except BaseException as error:
                errors.append(error)
                self.room.barrier.abort()

        threads = [threading.Thread(target=go, args=(rank,)) for rank in range(self.room.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[rank] for rank in range(self.room.size)]


def ready(config: ModelConfig, rank: int = 0) -> Prepared:
    return prepare(config, LOADED, rank=Rank(rank))
