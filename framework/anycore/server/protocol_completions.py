"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from anycore.engine.request import MAX_LOGPROBS
from anycore.server.protocol import input_schema, inputs
from anycore.server.protocol_generate import GenerateBody


class CompletionBody(GenerateBody):
    prompt: Annotated[
        list[str | list[int]],
        BeforeValidator(lambda value: inputs(value, "prompt", allow_empty_text=True)),
        input_schema("prompt"),
    ]
    suffix: str = Field("", description="what comes after the completion, for models that fill in the middle")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    add_special_tokens: bool = True
