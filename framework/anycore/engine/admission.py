"""At an engine's door: whether a request fits it, and the sequences or the search that one becomes."""

from __future__ import annotations

import math
import os
from array import array

import numpy as np

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.request import NewRequest, SamplingParams
from anycore.engine.sampler import LOW_64, mixed
from anycore.engine.searches import Search, needs_texts
from anycore.engine.sequence import Request
from anycore.errors import BadRequest, ContextLengthExceeded, InvalidGrammar
from anycore.models.spec import ModelSpec


class Admission:
    """Checks the requests of one engine and numbers them by arrival.

    Args:
        timeout: seconds after which every request is given up; None: those that say so alone.
        seed: what the seeds of requests without one are made of; 0: of chance.
    """

    def __init__(self, spec: ModelSpec, task: Task, limits: Limits, timeout: float | None, seed: int) -> None:
        self.spec = spec
        self.task = task
        self.limits = limits
        self._timeout = timeout
        self.seed = seed
        self._eos_ids = frozenset(spec.eos_ids)
        self._arrivals = 0

    def check(self, new: NewRequest, *, grammars: bool, texts: bool) -> array[int]:
        """Refuse what does not fit, and return its ids.

        `grammars`, `texts`: whether the engine keeps to the ones and knows the others.

        Raises:
            BadRequest: naming the field.
        """
        if new.task is not self.task:
            raise BadRequest(f"this engine serves {self.task.value}, not {new.task.value}", code="task_not_supported")
        length = len(new.token_ids)
        if length == 0:
            raise BadRequest("the input has no tokens", param="prompt")
        ids = self._known(new.token_ids)
        longest = self.limits.max_model_len
        if length > longest:
            raise ContextLengthExceeded(f"the input has {length} tokens, this model takes at most {longest}")
        if new.sampling is not None:
            self._check_sampling(new.sampling, length, grammars, texts)
        if new.pooling is not None and new.pooling.dimensions is not None:
            self._check_dimensions(new.pooling.dimensions)
        return ids

    def sequences(self, new: NewRequest, ids: array[int], now: float) -> list[Request]:
        """Make a request's sequences; without sampling it has one."""
        return [self._sequence(new, ids, index, now) for index in range(sequences_of(new))]

    def search(self, new: NewRequest, now: float) -> Search:
        """Make the beam search that a request asks for."""
        self._arrivals += 1
        longest = self.limits.max_model_len
        return Search(new, self._eos_ids, longest, self._arrivals, now, self.deadline(new, now))

    def deadline(self, new: NewRequest, now: float) -> float:
        """When a request that arrives now is given up."""
        seconds = [s for s in (new.deadline, self._timeout) if s is not None]
        return now + min(seconds) if seconds else math.inf

    def _known(self, token_ids: list[int]) -> array[int]:
        """The ids, all of the vocabulary. Looked at as numbers of the machine: prompts are long."""
        try:
            ids = array("q", token_ids)
            low, high = int(np.min(ids)), int(np.max(ids))
        except OverflowError:
            low, high = min(token_ids), max(token_ids)
        for i in (low, high):
            if not 0 <= i < self.spec.vocab_size:
                raise BadRequest(
                    f"token id {i} is outside the vocabulary (0 to {self.spec.vocab_size - 1})", param="prompt"
                )
        return ids

    def _check_sampling(self, sampling: SamplingParams, length: int, grammars: bool, texts: bool) -> None:
        sampling.check_vocabulary(self.spec.vocab_size)
        self._check_left(sampling)
        if sampling.grammar is not None and not grammars:
            raise InvalidGrammar("this engine keeps to no grammars", param="structured_outputs")
        if needs_texts(sampling) and not texts:
            raise BadRequest("this engine knows no texts, which a beam search with stop needs", param="stop")
        asked, longest = sampling.max_tokens, self.limits.max_model_len
        if asked is not None and length + asked > longest:
            raise ContextLengthExceeded(
                f"{length} prompt tokens and max_tokens {asked} are {length + asked}, "
                f"this model takes at most {longest} together",
                param="max_tokens",
            )

    def _check_left(self, sampling: SamplingParams) -> None:
        """Refuse a request whose own bans leave it no token to begin with."""
        if sampling.allowed_token_ids is None:
            return
        banned = {word[0] for word in sampling.bad_words_ids if len(word) == 1}
        if sampling.min_tokens:
            banned |= {*self._eos_ids, *sampling.stop_token_ids}
        if banned.issuperset(sampling.allowed_token_ids):
            raise BadRequest(
                "allowed_token_ids leaves no token: bad_words, or min_tokens with what would end the answer, bans them "
                "all",
                param="allowed_token_ids",
            )

    def _check_dimensions(self, asked: int) -> None:
        pooling = self.spec.pooling
        if pooling is not None and pooling.matryoshka and asked not in pooling.matryoshka:
            allowed = ", ".join(map(str, pooling.matryoshka))
            raise BadRequest(f"dimensions must be one of {allowed}, not {asked}", param="dimensions")
        if not 1 <= asked <= self.spec.vector_size:
            raise BadRequest(
                f"dimensions must be between 1 and {self.spec.vector_size}, not {asked}", param="dimensions"
            )

    def _sequence(self, new: NewRequest, ids: array[int], index: int, now: float) -> Request:
        self._arrivals += 1
        length = len(new.token_ids)
        total = length
        if new.sampling is not None:
            asked = new.sampling.max_tokens
            total = self.limits.max_model_len if asked is None else length + asked
        request = Request(new, index, self._arrivals, total, ids)
        request.timing.arrived = now
        request.deadline = self.deadline(new, now)
        if new.sampling is not None:
            request.eos_ids = self._eos_ids
            request.stop_ids = request.eos_ids if not new.sampling.ignore_eos else frozenset()
            request.stop_ids |= frozenset(new.sampling.stop_token_ids)
            request.seed = self._seed_of(new.sampling)
            request.needs_host = bool(new.sampling.bad_words_ids)
        return request

    def _seed_of(self, params: SamplingParams) -> int:
        if params.seed is not None:
            return params.seed & LOW_64
        if self.seed:
            return int(mixed(np.array([(self.seed << 32 ^ self._arrivals) & LOW_64], dtype=np.uint64))[0])
        return int.from_bytes(os.urandom(8), "little")


def sequences_of(new: NewRequest) -> int:
    """How many sequences a request asks for, or of how many beams its search goes on with."""
    if new.sampling is None:
        return 1
    return new.sampling.n if new.sampling.beams is None else new.sampling.beams.width
