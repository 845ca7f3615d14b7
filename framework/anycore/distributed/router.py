"""Ray Serve's choice of an engine for a request: the same as among replicas on one machine, see `server.routing`.

Ray sends the class, and with it this module's globals, by value to every process that has a handle of the engines: what
such a process shares with it lies in another module.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from anycore.distributed.loads import loads_of
from anycore.server.routing import Holders, choose, slack_of

STOP = "stop"  # the method of an engine's actor that is for one of them alone
MOST = 1 << 30  # replicas refuse by themselves what is too much


class PrefixRouter(RequestRouter):  # type: ignore[misc]
    """Sends a request to the engine that has most of its prompt's blocks, unless others are far less busy.

    A request's second argument is the list of its blocks' hashes, or, of STOP, the name of the replica it is for.
    """

    def initialize_state(self, *, most: int, seats: int) -> None:
        """
        Args:
            most: engines that there may be.
            seats: requests that each runs at once.
        """
        self._places: dict[str, int] = {}  # by replica: its bit in `_holders`
        self._free = list(range(2 * most - 1, -1, -1))  # old ones may still leave when new ones are there
        self._holders = Holders(2 * most)
        self._slack = slack_of(seats)
        self._turn = 0
        self._loads = loads_of(self._deployment_id.name)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """All replicas, one a rank, in the order in which they are to be asked."""
        found = list(candidate_replicas or self._replicas.values())
        if not found:
            return []
        if pending_request is None:
            return [found]
        asked = pending_request.args[1] if len(pending_request.args) > 1 else []
        if pending_request.metadata.call_method == STOP:
            return [[each] for each in found if each.replica_id.unique_id == asked] or [found]
        places = [self._places.get(each.replica_id.unique_id) for each in found]
        matches = self._holders.matches(asked) if asked else []
        have = [0 if place is None or not matches else matches[place] for place in places]
        left: list[int | None] = [self._loads.of(each.replica_id.unique_id) for each in found]
        order: list[list[Any]] = []
        for _ in found:
            best = choose(left, have, self._slack, MOST, self._turn % len(found))
            left[best] = None
            order.append([found[best]])
        self._turn += 1
        return order

    def update_replicas(self, replicas: list[Any]) -> None:
        """Take note of which replicas there are."""
        super().update_replicas(replicas)
        names = {each.replica_id.unique_id for each in replicas}
        for name in self._places.keys() - names:
            self._drop(name)
        for name in names - self._places.keys():
            if self._free:
                self._places[name] = self._free.pop()
        self._loads.keep(names)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        super().on_replica_actor_died(replica_id)
        self._drop(replica_id.unique_id)

    def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
        name = replica_id.unique_id
        if pending_request.metadata.call_method == STOP:
            return
        self._loads.begin(pending_request.metadata.internal_request_id, name)
        if len(pending_request.args) > 1 and (place := self._places.get(name)) is not None:
            self._holders.add(pending_request.args[1], place)

    def on_request_completed(self, replica_id: Any, internal_request_id: str) -> None:
        self._loads.end(internal_request_id)

    def _drop(self, name: str) -> None:
        place = self._places.pop(name, None)
        if place is not None:
            self._holders.forget(place)
            self._free.append(place)
