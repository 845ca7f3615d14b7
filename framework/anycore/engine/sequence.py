"""One sequence inside the engine, from its admission to its end. It never leaves the engine's process."""

from __future__ import annotations

import math
from array import array
from enum import Enum
from typing import TYPE_CHECKING, Any

import msgspec

from anycore.contract.declare import Task
from anycore.engine.chains import Chain
from anycore.engine.request import NewRequest, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from anycore.engine.decodes import Decodes
    from anycore.engine.grammar import GrammarState
    from anycore.engine.searches import Search


class Status(str, Enum):
    COMPILING = "compiling"  # its grammar is not ready: the scheduler does not know it yet
    WAITING = "waiting"  # also after preemption
    RUNNING = "running"
    FINISHED = "finished"


class Timing(msgspec.Struct):
    """Moments of a sequence in seconds of the engine's monotonic clock; 0 means not reached."""

    arrived: float = 0.0
    started: float = 0.0  # first scheduled


class Request:
    """One sequence inside the engine: a list of tokens and a count of how many are computed. Mutable."""

    __slots__ = (
        "_num_computed",
        "_num_tokens",
        "arrival",
        "blocks",
        "cached",
        "chain",
        "deadline",
        "decodes",
        "eos_ids",
        "expected",
        "grammar",
        "id",
        "index",
        "is_pooled",
        "key",
        "leader",
        "max_total",
        "may_share",
        "needs_host",
        "new",
        "num_prompt",
        "preemptions",
        "prefilled",
        "prompt_scores",
        "published",
        "sampler",
        "search",
        "seat",
        "seed",
        "status",
        "stop_ids",
        "timing",
        "tokens",
    )

    def __init__(
        self, new: NewRequest, index: int, arrival: int, max_total: int, ids: array[int] | None = None
    ) -> None:
        """`ids`: those of the prompt, if they are at hand."""
        self.new = new
        self.id = new.id
        self.index = index  # of the sequence within the request
        self.arrival = arrival  # a counter: the order of admission
        self.max_total = max_total  # tokens at most, prompt included
        # Tokens, and how far they are computed.
        self.is_pooled = new.task is not Task.GENERATE
        # The prompt, then the output that the host has seen.
        self.tokens = array("q", new.token_ids) if ids is None else ids[:]
        self.num_prompt = len(new.token_ids)
        self._num_computed = 0
        self._num_tokens = self.num_prompt
        self.prefilled = False  # the whole prompt has been handed to the device once
        # Its place in the queues.
        self.key: tuple[float, ...] = ()  # rank under the policy; smaller runs first
        self.status = Status.WAITING
        self.seat = -1  # while it runs: its row in tables of `max_num_seqs` rows
        self.decodes: Decodes | None = None  # while it goes on with one token a step: they count for it
        self.leader: Request | None = None  # sequence 0, while this one waits to share its prompt's blocks
        self.preemptions = 0
        self.deadline = math.inf
        # Its KV blocks.
        self.blocks: list[int] = []  # block table
        self.chain = Chain(new.cache_salt)  # the full blocks of known tokens
        self.expected: list[bytes] = []  # blocks it told the pool it is about to compute
        self.published = 0  # leading blocks that others can find
        self.cached = 0  # prompt tokens found in the prefix cache at first admission
        # What is done with its last hidden state.
        self.eos_ids: frozenset[int] = frozenset()
        self.stop_ids: frozenset[int] = frozenset()  # tokens that end it, once it has min_tokens
        self.seed = 0
        self.needs_host = False  # its next token can only be chosen once the host has seen the last one
        self.may_share = not (new.sampling is not None and new.sampling.prompt_logprobs is not None)
        self.prompt_scores: list[TokenLogprob | None] = []
        self.sampler: Any = None  # engine/sampler.py's own
        self.grammar: GrammarState | None = None  # where its output is within its grammar
        self.search: Search | None = None  # the beam search that it makes one step for
        self.timing = Timing()

    @property
    def sampling(self) -> SamplingParams:
        """How it generates. Pooled requests have none, and are not asked."""
        assert self.new.sampling is not None
        return self.new.sampling

    @property
    def num_computed(self) -> int:
        """Rows handed to the device so far."""
        return self._num_computed if self.decodes is None else self.decodes.computed[self.seat]

    @num_computed.setter
    def num_computed(self, number: int) -> None:
        assert self.decodes is None, "counted by those that decode"
        self._num_computed = number

    @property
    def num_tokens(self) -> int:
        """Tokens the sequence has, those that only the device has seen included."""
        return self._num_tokens if self.decodes is None else self.decodes.computed[self.seat] + 1

    @num_tokens.setter
    def num_tokens(self, number: int) -> None:
        assert self.decodes is None, "counted by those that decode"
        self._num_tokens = number

    @property
    def num_output(self) -> int:
        """Generated tokens, those that only the device has seen included."""
        return self.num_tokens - self.num_prompt

    @property
    def remaining(self) -> int:
        """Rows still to compute before the next token can be sampled, or the pooled output taken."""
        return self.num_tokens - self.num_computed
