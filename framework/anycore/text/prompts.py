"""The prompts of an embedder: text that its files want before an input, by name."""

from __future__ import annotations

import re

from anycore.errors import BadRequest
from anycore.models.spec import PoolingSpec

QUERY_PROMPTS = ("query", "search_query", "Retrieval-query")
DOCUMENT_PROMPTS = ("document", "passage", "search_document", "Retrieval-document", "corpus")
"""Names under which sentence-transformers files keep the prompts of a search, in the order they are looked for."""
INSTRUCT = re.compile(r"Instruct: .*\nQuery:", re.DOTALL)
"""A query prompt whose first line is the instruction."""


def prompt_of(pooling: PoolingSpec | None, name: str | None) -> str:
    """Return the prompt of this name; without a name the default one, or nothing.

    Raises:
        BadRequest: there is none of this name.
    """
    prompts = _prompts(pooling)
    if name is None:
        default = pooling.default_prompt if pooling is not None else None
        return "" if default is None else prompts[default]
    if name not in prompts:
        known = ", ".join(sorted(prompts)) or "none"
        raise BadRequest(f"the model has no prompt {name[:40]!r}; it has: {known}", param="prompt_name")
    return prompts[name]


def query_prompt(pooling: PoolingSpec | None, instruction: str | None) -> str:
    """Return what comes before a search query, with the request's instruction if it has one.

    Raises:
        BadRequest: the model's query prompt has no place for an instruction.
    """
    prompt = _first(pooling, QUERY_PROMPTS)
    if instruction is None:
        return prompt
    if not INSTRUCT.fullmatch(prompt):
        refuse_instruction(instruction)
    return f"Instruct: {instruction}\nQuery:"


def document_prompt(pooling: PoolingSpec | None) -> str:
    """Return what comes before a document that is searched."""
    return _first(pooling, DOCUMENT_PROMPTS)


def refuse_instruction(instruction: str | None) -> None:
    """Raise BadRequest if there is an instruction where the model takes none."""
    if instruction is not None:
        raise BadRequest("this model takes no instruction here", param="instruction")


def _first(pooling: PoolingSpec | None, names: tuple[str, ...]) -> str:
    prompts = _prompts(pooling)
    return prompt_of(pooling, next((name for name in names if name in prompts), None))


def _prompts(pooling: PoolingSpec | None) -> dict[str, str]:
    return {} if pooling is None else dict(pooling.prompts)
