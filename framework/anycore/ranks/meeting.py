"""Where ranks find one another: in a file on one machine, at MASTER_ADDR where `torchrun` started them on several."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from anycore.errors import ConfigError

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

PATIENCE = timedelta(minutes=10)
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the environment says of a rank that a launcher has started: the variables that `torchrun` sets."""

    rank: int
    size: int
    on_host: int
    host: str
    port: int
    kept_by_agent: bool  # the launcher keeps the store; else the first rank does
    attempt: str = "0"  # the launcher's: what was written before a restart is not for this one

    @property
    def address(self) -> str:
        """ZeroMQ's, of the interface by which the others reach the first rank; without a port."""
        return f"tcp://{socket.gethostbyname(self.host)}"

    def store(self) -> Store:
        """What all ranks read and write. The first rank's has to live as long as the group."""
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        keeps = self.rank == 0 and not self.kept_by_agent
        kept = TCPStore(self.host, self.port, self.size, keeps, PATIENCE, wait_for_workers=False)
        return PrefixStore(f"anycore/{self.attempt}", kept)


def from_environment(environ: Mapping[str, str] = os.environ) -> Meeting | None:
    """What a launcher has said; None where there is none.

    Raises:
        ConfigError: it has said a part of it.
    """
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    missing = [name for name in VARIABLES if name not in environ]
    if missing:
        raise ConfigError(f"RANK and WORLD_SIZE are set, as by torchrun, but not {', '.join(missing)}")
    rank, size, on_host = (int(environ[name]) for name in VARIABLES[:3])
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(rank, size, on_host, environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), agent, attempt)


def announced(size: int) -> Meeting | None:
    """The same for the first of `size` ranks.

    Raises:
        ConfigError: the launcher has started another number of them.
    """
    found = from_environment()
    if found is not None and found.size != size:
        raise ConfigError(
            f"--tensor-parallel-size {size}, but WORLD_SIZE is {found.size}: every process that the launcher starts is "
            "a rank of the model",
            param="tensor_parallel_size",
        )
    return found


def file_store(path: str, size: int) -> Store:
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    return FileStore(path, size)
