"""The body of /v1/completions."""

from __future__ import annotations

from pydantic import Field

from anycore.server import protocol_generate
from anycore.server.protocol_search import SearchBody


class CompletionBody(protocol_generate.CompletionBody, SearchBody):
    suffix: str = Field("", description="what comes after the completion, for models that fill in the middle")
