"""What ranks on cards of one host exchange: through memory that each lets the others read, where that is faster.

NCCL takes 12 us for a sum over two cards however little is in it, and a layer has two such sums. Kernels that read
the other card's memory take 7 for one row, and 19 instead of 31 for 256 (two H200s, bfloat16, in graphs).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anycore.contract.collective import Group

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

SHARED_BYTES = 16 << 20
"""Of each rank's memory that others read. What is larger goes through NCCL."""

ONE_SHOT_BYTES = 256 << 10
"""Up to so many every rank reads all of it and sums it itself; more is summed in parts, which others then read."""

LEAVING = 10.0  # seconds for leaving the group, whose other ranks may have ended already
ALIGNMENT = 16  # bytes: what is exchanged is a multiple of that, or goes through NCCL

log = logging.getLogger(__name__)


class CardGroup(Group):
    """Ranks that own a card each."""

    def __init__(
        self,
        kind: str,
        device: torch.device,
        store: Store,
        rank: int,
        size: int,
        one_host: bool,
        forget: Callable[[], None],
    ) -> None:
        """As `Group`. `forget` drops the graphs that exchanges were captured in: NCCL does not leave before."""
        super().__init__(kind, device, store, rank, size, one_host)
        self._forget = forget
        self._shared: Tensor | None = None
        """Bytes [SHARED_BYTES]; None: there is no such way between these cards."""
        if one_host and self.least([int(self._reaches_all())])[0]:
            self._share()

    def all_reduce(self, x: Tensor) -> Tensor:
        shared = self._shared
        count = x.numel() * x.element_size()
        if (
            shared is None
            or x.dtype not in (torch.bfloat16, torch.float32)
            or count > SHARED_BYTES
            or count % ALIGNMENT
        ):
            return super().all_reduce(x)
        x = x.contiguous()
        place = shared[:count].view(x.dtype).view(x.shape)
        if self.size == 2 and count <= ONE_SHOT_BYTES:  # of more ranks each would sum in an order of its own
            summed: Tensor = self._ops.one_shot_all_reduce_copy(place, x, "sum", self._name)
            return summed
        place.copy_(x)
        self._ops.two_shot_all_reduce_out(place, "sum", self._name, x)
        return x

    def close(self, lost: bool = False) -> None:
        self._forget()
        self._shared = None
        leaving = Thread(target=super().close, args=(lost,), name="ranks-leave", daemon=True)
        leaving.start()
        leaving.join(LEAVING)
        if leaving.is_alive():
            log.warning("NCCL has not left its group within %g s: this process can be part of no other one", LEAVING)

    def _reaches_all(self) -> bool:
        """Whether this card reads the memory of all others. Ranks of a host have cards in a row."""
        mine = self.device.index
        others = (mine - self.rank + rank for rank in range(self.size) if rank != self.rank)
        return all(torch.cuda.can_device_access_peer(mine, other) for other in others)

    def _share(self) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._ops: Any = torch.ops.symm_mem
        group = self._dist.group.WORLD
        assert group is not None
        self._name = group.group_name
        self._shared = symmetric.empty(SHARED_BYTES, dtype=torch.uint8, device=self.device)
        symmetric.rendezvous(self._shared, self._name)
