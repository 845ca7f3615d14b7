"""More sequences than are returned: the beams of a search, or `best_of` that are drawn, of which the best are kept."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from anycore.engine.request import MAX_WIDTH, Beams, SamplingParams
from anycore.errors import BadRequest

if TYPE_CHECKING:
    from anycore.server.generation import Chunk
    from anycore.server.protocol_search import SearchBody

NEUTRAL: dict[str, tuple[float, ...]] = {"temperature": (0, 1), "top_p": (1,), "top_k": (0, -1), "min_p": (0,)}
"""Values of fields about drawing that ask for nothing, so that a beam search may come with them."""


def choosing(body: SearchBody, sampling: SamplingParams, vocab_size: int) -> SamplingParams:
    """Return the sampling with what a `SearchBody` asks of the engine, which may be more sequences than are returned.

    Raises:
        BadRequest: fields contradict each other, ask for what a beam search cannot do, or name ids that there are not.
    """
    changes: dict[str, Any] = {}
    if body.logprob_token_ids:
        if sampling.logprobs is None:
            raise BadRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")
        changes["logprob_token_ids"] = tuple(body.logprob_token_ids)
    drawn = sampling.n if body.best_of is None else body.best_of
    if drawn < sampling.n:
        raise BadRequest(f"best_of {drawn} is less than n {sampling.n}", param="best_of")
    if body.use_beam_search:
        changes["beams"] = _beams(body, drawn)
    elif body.length_penalty != 1 or body.early_stopping:
        name = "length_penalty" if body.length_penalty != 1 else "early_stopping"
        raise BadRequest(f"{name} needs use_beam_search: true", param=name)
    elif drawn > sampling.n:
        _refuse_stream(body, "best_of", "the best sequences are known when all have ended")
        changes |= {"n": drawn, "logprobs": sampling.logprobs or 0}
    chosen = msgspec.structs.replace(sampling, **changes)
    chosen.check_vocabulary(vocab_size)
    return chosen


def best(choices: list[Chunk], n: int, drawn: int) -> list[Chunk]:
    """Keep, of `drawn` choices of each prompt, the `n` with the highest log-probability a token, best first."""
    if drawn == n:
        return choices
    kept: list[Chunk] = []
    for start in range(0, len(choices), drawn):
        ranked = sorted(choices[start : start + drawn], key=_likelihood, reverse=True)
        kept += [replace(choice, choice=len(kept) + i) for i, choice in enumerate(ranked[:n])]
    return kept


def _likelihood(choice: Chunk) -> float:
    values = [entry.logprob for entry in choice.logprobs]
    return sum(values) / max(1, len(values))


def _beams(body: SearchBody, width: int) -> Beams:
    _refuse_stream(body, "use_beam_search", "which sequence is the best is known when all have ended")
    if width > MAX_WIDTH:
        raise BadRequest(f"a beam search has at most {MAX_WIDTH} beams, n is {width}", param="n")
    for name, values in NEUTRAL.items():
        value = getattr(body, name)
        if value is not None and value not in values:
            raise BadRequest(f"a beam search draws nothing: leave {name} out or send {values[0]}", param=name)
    return Beams(width=width, length_penalty=body.length_penalty, early_stopping=body.early_stopping)


def _refuse_stream(body: SearchBody, name: str, why: str) -> None:
    if getattr(body, "stream", False):
        raise BadRequest(f"{name} is not available in a stream: {why}; send stream: false", param="stream")
