"""Which of several equal engines a request goes to: the one that has most of its prompt's blocks, unless it is busy.

Integers and hashes only. The hashes are the engine's own, so that what is counted here is what it would find there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from anycore.engine.chains import Chain, Chains

CAPACITY = 1 << 17  # blocks that are remembered: 2 million tokens in blocks of 16, some 20 MB
MOST_BLOCKS = 1024  # of one prompt that are looked at: what two prompts share beyond them decides nothing
SLACK = 4  # a replica may be busier than the least busy one by a 4th of the sequences that it runs at once


def chain(tokens: Sequence[int], block_size: int, salt: str | None) -> list[bytes]:
    """The chained hashes of a prompt's full blocks, MOST_BLOCKS at most."""
    blocks = Chain(salt)
    Chains(block_size).extend(blocks, tokens[: MOST_BLOCKS * block_size])
    return blocks.keys


def slack_of(max_num_seqs: int) -> int:
    """By how many sequences a replica that has the prefix may be busier than the least busy one."""
    return max(1, max_num_seqs // SLACK)


def choose(loads: Sequence[int | None], matches: Sequence[int], slack: int, most: int, first: int = 0) -> int:
    """Choose a replica.

    Args:
        loads: sequences that each one runs or has waiting; None for one that takes nothing. One takes something.
        matches: blocks of the prompt that each one has.
        slack: what a replica may have more than the least loaded one, and still be chosen for its blocks.
        most: a load at which the next request would be refused, so that no blocks are a reason to go there.
        first: the replica that comes first among equal ones.
    """
    least = min(load for load in loads if load is not None)
    limit = max(least, min(least + slack, most - 1))
    fitting = [i for i, load in enumerate(loads) if load is not None and load <= limit]
    return max(fitting, key=lambda i: (matches[i], -(loads[i] or 0), -((i - first) % len(loads))))


class Holders:
    """Which replicas have been sent which blocks. The blocks that were asked for least recently are forgotten first.

    What a replica has evicted since is not known here; a wrong guess costs it a prefill that it would have had anyway.
    """

    def __init__(self, replicas: int, capacity: int = CAPACITY) -> None:
        self._replicas = replicas
        self._capacity = capacity
        self._masks: OrderedDict[bytes, int] = OrderedDict()  # hash -> bit i: replica i has been sent this block

    def __len__(self) -> int:
        return len(self._masks)

    def matches(self, hashes: Sequence[bytes]) -> list[int]:
        """How many leading blocks each replica has."""
        counts = [0] * self._replicas
        left = (1 << self._replicas) - 1
        for key in hashes:
            left &= self._masks.get(key, 0)
            if not left:
                break
            for replica in range(self._replicas):
                counts[replica] += left >> replica & 1
        return counts

    def add(self, hashes: Sequence[bytes], replica: int) -> None:
        """A replica is about to have these blocks."""
        for key in reversed(hashes):  # so that a prefix outlives what follows it
            self._masks[key] = self._masks.get(key, 0) | 1 << replica
            self._masks.move_to_end(key)
        while len(self._masks) > self._capacity:
            self._masks.popitem(last=False)

    def forget(self, replica: int) -> None:
        """A replica has begun anew, with an empty cache."""
        for key, mask in list(self._masks.items()):
            mask &= ~(1 << replica)
            if mask:
                self._masks[key] = mask
            else:
                del self._masks[key]
