"""The ranks of one engine on a cluster: one bundle of a placement group each, wherever Ray has put it.

The engine's actor holds the first bundle and its process is the first rank. In each other bundle an actor starts a
`ranks.follower`, told as by `torchrun` where the first one is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

from anycore.errors import ConfigError

COMMAND = (sys.executable, "-m", "anycore.ranks.follower")


class Ranks:
    """All ranks but the first, which this process is about to start. Of one rank there is nothing to do."""

    def __init__(self, size: int, resources: dict[str, float]) -> None:
        self._size = size
        self._resources = resources
        self._actors: list[Any] = []

    def start(self) -> None:
        """Start the others, and tell this process's children who they are."""
        if self._size == 1:
            return
        import ray
        from ray.util import get_current_placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = get_current_placement_group()
        if group is None or group.bundle_count != self._size:
            raise ConfigError(
                f"--tensor-parallel-size {self._size} needs a placement group of {self._size} bundles",
                param="tensor_parallel_size",
            )
        host = ray.util.get_node_ip_address()
        common = {
            "WORLD_SIZE": str(self._size),
            "LOCAL_RANK": "0",  # Ray shows a process the devices of its bundle, and no others
            "MASTER_ADDR": host,
            "MASTER_PORT": str(free_port(host)),
        }
        os.environ.update(common, RANK="0")
        actor = ray.remote(Follower)
        options = {name.lower(): number for name, number in self._resources.items() if name in ("CPU", "GPU")}
        others = {name: number for name, number in self._resources.items() if name not in ("CPU", "GPU")}
        for rank in range(1, self._size):
            self._actors.append(
                actor.options(
                    num_cpus=options.get("cpu", 0),
                    num_gpus=options.get("gpu", 0),
                    resources=others or None,
                    scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
                ).remote({**common, "RANK": str(rank)})
            )

    def close(self) -> None:
        """End them."""
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
            self._actors = []


class Follower:
    """The actor of one rank: it lives as long as it is wanted, and its process no longer than it."""

    def __init__(self, variables: dict[str, str]) -> None:
        self._process = subprocess.Popen(COMMAND, env={**os.environ, **variables})

    def code(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()


def free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        port: int = found.getsockname()[1]
        return port
