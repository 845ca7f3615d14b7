"""What the ranks of one model exchange: several processes, each with a part of every matrix, that step together.

Models call `Ops.all_reduce` and `Ops.all_gather`, which ask the group that `Backend.join` has put there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE = timedelta(minutes=30)
"""For one exchange. A rank that is dead or hung is found long before, by whoever watches the processes."""

LOOPBACK = "lo"


class Collective:
    """The ranks of a model, seen from one of them. Of these there is one, which has everything already."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum over ranks, in place; each rank gets the same numbers."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the last dimension over ranks: [.., N] of each → [.., size * N]."""
        return x

    def least(self, numbers: list[int]) -> list[int]:
        """The smallest of each number over ranks, on the host."""
        return numbers

    def close(self, lost: bool = False) -> None:
        """Leave the group. `lost`: a rank is gone, and what a device waits for may never come."""


ALONE = Collective()


class Group(Collective):
    """Ranks that exchange through torch.distributed. A process belongs to one group at most."""

    def __init__(
        self, kind: str, device: torch.device, store: Store, rank: int, size: int, one_host: bool = False
    ) -> None:
        """Wait for all ranks.

        Args:
            kind: what torch.distributed calls its backend (`Backend.collective`).
            device: of the tensors that are exchanged.
            store: where ranks find one another.
            one_host: nothing needs to be heard beyond this machine.
        """
        import torch.distributed as dist

        self.rank, self.size = rank, size
        self.device = device
        self._dist = dist
        self._gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its older name
        bound: dict[str, Any] = {} if device.type == "cpu" else {"device_id": device}
        with loopback() if one_host else unchanged():
            dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=PATIENCE, **bound)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._dist.all_reduce(x)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        parts = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        self._gather(parts, x.contiguous())
        return torch.cat(parts.chunk(self.size), dim=-1)

    def least(self, numbers: list[int]) -> list[int]:
        x = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        self._dist.all_reduce(x, self._dist.ReduceOp.MIN)
        return [int(number) for number in x.tolist()]

    def close(self, lost: bool = False) -> None:
        if self._dist.is_initialized() and not (lost and self.device.type != "cpu"):
            self._dist.destroy_process_group()


@contextmanager
def loopback() -> Iterator[None]:
    """Let gloo take the machine's own interface: a container's host name may lead nowhere."""
    name = "GLOO_SOCKET_IFNAME"
    if name in os.environ or not os.path.exists(f"/sys/class/net/{LOOPBACK}"):
        yield
        return
    os.environ[name] = LOOPBACK
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def unchanged() -> Iterator[None]:
    yield
