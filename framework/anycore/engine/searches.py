"""Beam searches within an engine: each step of one is a request for a single token for every beam.

Such requests run, wait, lose their blocks and end like all others, and hold nothing between two steps: what they share
is found in the prefix cache. They keep the search's id, deadline and place in the queue.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from math import isinf
from typing import Protocol

import msgspec

from anycore.engine.beams import BeamSearch, Branch, Ended, Ends
from anycore.engine.request import Delta, NewRequest, SamplingParams
from anycore.engine.sequence import Request, Timing
from anycore.errors import BadRequest


class Tokens(Protocol):
    """What a search asks of a tokenizer."""

    special_ids: frozenset[int]

    def token_bytes(self, token_id: int) -> bytes: ...


class Search:
    """One beam search.

    Args:
        new: what was asked.
        eos_ids: the model's.
        longest: the model's length in tokens.
        arrival: its place among the requests of the engine.
        now: when it arrived.
        deadline: when it is given up.
    """

    def __init__(
        self, new: NewRequest, eos_ids: frozenset[int], longest: int, arrival: int, now: float, deadline: float
    ) -> None:
        assert new.sampling is not None
        beams = new.sampling.beams
        assert beams is not None
        self.new = new
        self._arrival = arrival
        self._deadline = deadline
        self.tokens: Tokens | None = None  # to be set before it runs, if it `needs_texts`
        self.told = Delta(id=new.id)  # what is known once the prompt is computed
        self.params = params = new.sampling
        self._eos_ids = eos_ids
        self._timing = Timing(arrived=now)
        self._preemptions = 0
        self._found: dict[int, list[Branch]] = {}  # of the step under way, by the beam
        room = longest - len(new.token_ids)
        ends = Ends(
            room if params.max_tokens is None else params.max_tokens,
            params.min_tokens,
            frozenset() if params.ignore_eos else eos_ids,
            frozenset(params.stop_token_ids),
            params.stop,
            self._bytes_of,
        )
        self._beams = BeamSearch(beams, ends, logprobs=params.logprobs is not None)

    @property
    def branches(self) -> int:
        """How many of the likeliest next tokens each of its requests is to bring."""
        return self._beams.branches

    @property
    def done(self) -> bool:
        return self._beams.done

    def take(self, request: Request, branches: list[Branch]) -> bool:
        """Take what one request of the step brought; return whether it was the last one."""
        self._found[request.index] = [branch for branch in branches if not isinf(branch.adjusted)]
        self._preemptions += request.preemptions
        if len(self._found) < len(self._beams.live):
            return False
        found, self._found = self._found, {}
        self._beams.advance([found[index] for index in range(len(self._beams.live))])
        return True

    def requests(self) -> list[Request]:
        """The next step's, one for each beam, as if it had generated the beam's tokens itself: as output, that is."""
        params = self.params
        live = self._beams.live
        length = len(live[0].token_ids) + 1
        params = msgspec.structs.replace(
            params,
            beams=None,
            n=1,
            temperature=0.0,
            max_tokens=length,
            min_tokens=min(params.min_tokens, length),
            prompt_logprobs=params.prompt_logprobs if length == 1 else None,
        )
        new = msgspec.structs.replace(self.new, sampling=params)
        requests = []
        for index, beam in enumerate(live):
            request = Request(new, index, self._arrival, len(new.token_ids) + length)
            request.tokens.extend(beam.token_ids)
            request.num_tokens = len(request.tokens)
            request.search, request.eos_ids = self, self._eos_ids
            request.needs_host = bool(params.bad_words_ids)
            request.timing, request.deadline = self._timing, self._deadline
            requests.append(request)
        return requests

    def answer(self) -> list[Delta]:
        """The last deltas, which are the first: one for each of the best sequences, with all of its tokens.

        Raises:
            BadRequest: fewer sequences are possible than are asked for.
        """
        best = self._beams.best(self.params.n)
        if len(best) < self.params.n:
            raise BadRequest(
                f"bans and biases leave {len(best)} sequences for a beam search, n is {self.params.n}", param="n"
            )
        return [self._delta(index, ended) for index, ended in enumerate(best)]

    def _bytes_of(self, token: int) -> bytes:
        assert self.tokens is not None
        skipped = self.params.skip_special_tokens and token in self.tokens.special_ids
        return b"" if skipped else self.tokens.token_bytes(token)

    def _delta(self, index: int, ended: Ended) -> Delta:
        delta = Delta(id=self.new.id, index=index, token_ids=ended.beam.token_ids, score=ended.score)
        delta.finish, delta.stop_reason = ended.finish, ended.stop_reason
        delta.all_text = isinstance(ended.stop_reason, str)
        delta.logprobs = ended.beam.logprobs if self.params.logprobs is not None else None
        delta.cached_tokens, delta.queue_seconds = self.told.cached_tokens, self.told.queue_seconds
        if index == 0:
            delta.prompt_logprobs, delta.preemptions = self.told.prompt_logprobs, self._preemptions
        return delta


class Texts:
    """The texts of a model's tokens, in which beam searches look for stop strings.

    Args:
        read: reads the tokenizer; called on a thread of its own, when a search first asks.
    """

    def __init__(self, read: Callable[[], Tokens]) -> None:
        self._read = read
        self._tokens: Future[Tokens] | None = None

    def get(self) -> Future[Tokens]:
        if self._tokens is None:
            thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
            self._tokens = thread.submit(self._read)
            thread.shutdown(wait=False)
        return self._tokens


def needs_texts(params: SamplingParams) -> bool:
    """Whether a search has to know the bytes of tokens."""
    return params.beams is not None and bool(params.stop)
