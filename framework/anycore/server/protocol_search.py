"""Fields of a generate body: which of several sequences are returned, and of which ids the log-probabilities."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from anycore.engine.request import MAX_LENGTH_PENALTY, MAX_LOGPROB_TOKEN_IDS, MAX_WIDTH
from anycore.server.protocol import MAX_TOKEN_ID, Body


class SearchBody(Body):
    """Chat and completions share these."""

    best_of: int | None = Field(
        None, ge=1, le=MAX_WIDTH, description="sequences of which the best n are returned; the beams of a beam search"
    )
    use_beam_search: bool = Field(False, description="follow best_of beams, by default n, instead of drawing")
    length_penalty: float = Field(
        1.0,
        ge=-MAX_LENGTH_PENALTY,
        le=MAX_LENGTH_PENALTY,
        description="beam search: a score is divided by its length to this power",
    )
    early_stopping: bool | Literal["never"] = Field(
        False, description="beam search: whether to end with as many sequences as beams, as in transformers"
    )
    logprob_token_ids: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] | None = Field(
        None,
        min_length=1,
        max_length=MAX_LOGPROB_TOKEN_IDS,
        description="give the log-probabilities of these ids instead of the likeliest ones; needs logprobs",
    )
