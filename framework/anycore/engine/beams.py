"""Beam search over one prompt: which sequences are followed, which have ended, and when nothing better can come.

Sequences, scores and ends are those of Hugging Face transformers' `generate(num_beams=width)`. No tensors.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from anycore.engine.request import Beams, FinishReason, TokenLogprob


class Branch(NamedTuple):
    """A token that may come next. `adjusted` is its log-probability after penalties, biases and bans."""

    token_id: int
    adjusted: float
    logprob: float  # by the model alone
    top: Sequence[tuple[int, float]] = ()  # the most likely (id, logprob) at its place, if they were asked for


@dataclass(frozen=True, slots=True)
class Beam:
    """A sequence that is followed."""

    token_ids: list[int] = field(default_factory=list)  # generated so far
    total: float = 0.0  # of the adjusted log-probabilities
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one a token, where they were asked for
    tail: bytes = b""  # end of its text, as far as a stop string may have begun in it


@dataclass(frozen=True, slots=True)
class Ended:
    """A sequence that has ended: by a stop id, its last token, by a stop string, or by its length."""

    beam: Beam
    score: float
    finish: FinishReason
    stop_reason: int | str | None = None


class Ends:
    """What ends a sequence.

    Args:
        max_tokens: the length at which everything ends.
        min_tokens: no stop of any kind counts within so many tokens.
        eos_ids: ids that end it without being named as the reason.
        stop_ids: ids that end it and are.
        stops: texts that end it, found in the bytes that `bytes_of` gives for a token.
    """

    def __init__(
        self,
        max_tokens: int,
        min_tokens: int = 0,
        eos_ids: frozenset[int] = frozenset(),
        stop_ids: frozenset[int] = frozenset(),
        stops: Sequence[str] = (),
        bytes_of: Callable[[int], bytes] = lambda token: b"",
    ) -> None:
        self.max_tokens = max_tokens
        self.count = len(eos_ids | stop_ids)  # of ids
        self._min_tokens = min_tokens
        self._eos_ids = eos_ids
        self._stop_ids = stop_ids
        self._stops = [(stop, stop.encode()) for stop in stops]
        self._kept = max((len(encoded) for _, encoded in self._stops), default=1) - 1  # bytes of a tail
        self._bytes_of = bytes_of

    @property
    def texts(self) -> bool:
        """Whether any token at all may end a sequence."""
        return bool(self._stops)

    def of(self, beam: Beam, token: int) -> tuple[FinishReason, int | str | None] | None:
        """Say whether a beam ends with a further token, and by what."""
        length = len(beam.token_ids) + 1
        if length > self._min_tokens:
            if token in self._eos_ids:
                return FinishReason.STOP, None
            if token in self._stop_ids:
                return FinishReason.STOP, token
            text = self._text(beam, token)
            found = [stop for stop, encoded in self._stops if encoded in text]
            if found:
                return FinishReason.STOP, max(found, key=len)
        return (FinishReason.LENGTH, None) if length >= self.max_tokens else None

    def tail(self, beam: Beam, token: int) -> bytes:
        """What is kept of a beam's text after a further token."""
        return self._text(beam, token)[-self._kept :] if self._kept else b""

    def _text(self, beam: Beam, token: int) -> bytes:
        return beam.tail + self._bytes_of(token) if self._stops else b""


class BeamSearch:
    """One search. Compute what may follow each of `live`, hand it to `advance`, until `done`."""

    def __init__(self, params: Beams, ends: Ends, *, logprobs: bool = False) -> None:
        """`logprobs`: whether sequences keep those of their tokens."""
        self.live = [Beam()]  # best first
        self.ended: list[Ended] = []  # best first, at most `width`
        self.done = False
        self._params = params
        self._ends = ends
        self._logprobs = logprobs

    @property
    def branches(self) -> int:
        """How many of the likeliest next tokens of each beam `advance` has to know.

        Of so many, `width` go on whichever end their sequence. Where texts may, it is as many as transformers looks at.
        """
        width = self._params.width
        return width + max(self._ends.count, width if self._ends.texts else 0)

    def advance(self, branches: Sequence[Sequence[Branch]]) -> None:
        """Take the likeliest next tokens of each beam in `live`, best first; none has a probability of 0."""
        width = self._params.width
        found = [(beam, branch) for beam, own in zip(self.live, branches, strict=True) for branch in own]
        found.sort(key=lambda pair: -(pair[0].total + pair[1].adjusted))
        live: list[Beam] = []
        for rank, (beam, branch) in enumerate(found):
            end = self._ends.of(beam, branch.token_id)
            if end is None and len(live) < width:
                live.append(self._grown(beam, branch))
            elif end is not None and rank < width:  # further ones end unseen: they are only there to go on
                self._end(self._grown(beam, branch), *end)
            if rank >= width - 1 and len(live) == width:
                break
        self.live = live
        self.done = not live or (len(self.ended) == width and not self._may_improve(live[0]))

    def best(self, count: int) -> list[Ended]:
        """The `count` best sequences, best first; fewer only where fewer are possible at all."""
        return self.ended[:count]

    def _grown(self, beam: Beam, branch: Branch) -> Beam:
        logprobs = beam.logprobs
        if self._logprobs:
            ranked = [token for token, _ in branch.top]
            rank = ranked.index(branch.token_id) + 1 if branch.token_id in ranked else 0
            logprobs = [*logprobs, TokenLogprob(branch.token_id, branch.logprob, rank, list(branch.top))]
        tail = self._ends.tail(beam, branch.token_id)
        return Beam([*beam.token_ids, branch.token_id], beam.total + branch.adjusted, logprobs, tail)

    def _end(self, beam: Beam, finish: FinishReason, reason: int | str | None) -> None:
        ended = Ended(beam, self._score(beam, len(beam.token_ids)), finish, reason)
        insort_right(self.ended, ended, key=lambda each: -each.score)
        del self.ended[self._params.width :]

    def _score(self, beam: Beam, length: int) -> float:
        return float(beam.total / length**self._params.length_penalty)

    def _may_improve(self, best: Beam) -> bool:
        """Whether to go on with `width` sequences ended. A guess, as in transformers: scores may rise with length."""
        params = self._params
        if params.early_stopping is True:
            return False
        length = len(best.token_ids)
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self._ends.max_tokens
        return self._score(best, length) > self.ended[-1].score
