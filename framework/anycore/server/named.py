"""What the fields of other APIs are called here, so that none of them is read past in silence, and errors name what was
sent."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from anycore.errors import AnycoreError, BadRequest
from anycore.server.protocol import Body

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "max_tokens": ("max_output_tokens",),
    "max_completion_tokens": ("max_output_tokens", "max_tokens"),
    "max_output_tokens": ("max_tokens",),
    "max_new_tokens": ("max_tokens", "max_output_tokens"),
    "n_predict": ("max_tokens", "max_output_tokens"),
    "stop": ("stop_sequences",),
    "stop_sequences": ("stop",),
    "output_dimension": ("dimensions",),
    "truncate_dim": ("dimensions",),
    "dimensions": ("output_dimension",),
    "normalized": ("normalize",),
    "normalize_embeddings": ("normalize",),
    "embd_normalize": ("normalize",),
    "embedding_type": ("encoding_format",),
    "task": ("prompt_name",),
    "instruct": ("instruction",),
    "truncation": ("truncate",),
    "top_k": ("top_n",),
    "return_text": ("return_documents",),
}
"""Field of some API → what the same is called in those of ours that have it."""


def check_name(body: Body, name: str) -> None:
    """Refuse a field that this body has under another name, unless that one was sent, too.

    Raises:
        BadRequest: saying the name.
    """
    for ours in OTHER_NAMES.get(name, ()):
        if ours in type(body).model_fields and ours not in body.model_fields_set:
            raise BadRequest(f"{name} is called {ours} here", param=name, code="unknown_field")


@contextmanager
def named_as(sent: Mapping[str, str]) -> Iterator[None]:
    """Let errors about fields that a body was turned into (keys) name those that were sent (values)."""
    try:
        yield
    except AnycoreError as error:
        found = re.match(r"\w+", error.param or "")
        if found is not None and found[0] in sent:
            name = sent[found[0]]
            error.param = name + (error.param or "")[found.end() :]
            error.message = re.sub(rf"\b{found[0]}\b", name, error.message)
        raise
