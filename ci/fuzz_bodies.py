"""Requests that are almost right: valid bodies of every POST route, and what is done to them.

All chances come from one `random.Random`, so that a number makes the same requests again.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

MESSAGES = [{"role": "system", "content": "be short"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
SAMPLING = {"max_tokens": 4, "temperature": 0.5, "top_p": 0.9, "n": 1, "seed": 1, "stop": ["x"], "logit_bias": {"5": 1}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {"logprobs": True, "top_logprobs": 2, **SAMPLING},
    {"stream": True, "stream_options": {"include_usage": True}, **SAMPLING},
    {"max_tokens": 4, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"max_tokens": 4, "tools": [TOOL], "tool_choice": "none"},
]
RESPONSES: list[dict[str, Any]] = [
    {"input": "hi", "instructions": "be short", "max_output_tokens": 4, "reasoning": {"effort": "low"}},
    {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
        "stream": True,
        "max_output_tokens": 4,
        "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    },
]
ANTHROPIC: list[dict[str, Any]] = [
    {"system": "be short", "messages": MESSAGES[1:], "temperature": 0.5, "stop_sequences": ["x"]},
    {"messages": [{"role": "user", "content": "hi"}], "stream": True, "thinking": {"type": "disabled"}},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ["the fox", "a dog"], "echo": True, "logprobs": 1, **SAMPLING},
    {"prompt": [5, 6, 7], "stream": True, "min_p": 0.1, "ignore_eos": True, **SAMPLING},
    {"prompt": "a", "max_tokens": 4, "structured_outputs": {"regex": "[ab]+"}},
]
EMBEDDINGS: list[dict[str, Any]] = [
    {"input": ["a", "the river"], "encoding_format": "base64", "truncate": "END"},
    {"input": [[5, 6], [7]], "dimensions": 64, "normalize": True},
]
COHERE: list[dict[str, Any]] = [
    {"texts": ["a", "the river"], "input_type": "search_query", "embedding_types": ["float", "ubinary"]},
    {"inputs": [{"content": [{"type": "text", "text": "a"}]}], "output_dimension": 64, "truncate": "START"},
]
TEI: list[dict[str, Any]] = [{"inputs": ["a", "the river"], "truncate": True, "truncation_direction": "Left"}]
COMPARED: list[dict[str, Any]] = [{"inputs": {"source_sentence": "a", "sentences": ["the river"]}, "truncate": True}]
PREDICTED: list[dict[str, Any]] = [{"inputs": [["a river", "the bank"], ["a"]]}, {"inputs": "a", "raw_scores": True}]
CLASSES: list[dict[str, Any]] = [{"input": ["a river", "the bank"], "use_activation": False, "truncate": "END"}]
TEXTS: list[dict[str, Any]] = [{"query": "a river", "texts": ["the bank", "a fox"], "return_text": True}]
RANKS: list[dict[str, Any]] = [
    {"query": "a river", "documents": ["the bank", {"text": "a fox"}], "top_n": 2, "return_documents": True}
]
SCORES: list[dict[str, Any]] = [{"text_1": "a river", "text_2": ["the bank", "a fox"], "raw_scores": True}]
TOKENS: list[dict[str, Any]] = [
    {"prompt": "the quick fox", "add_special_tokens": True, "return_token_strs": True},
    {"messages": MESSAGES, "add_generation_prompt": False},
]
FAMILIES: list[tuple[str, str, list[dict[str, Any]]]] = [
    ("lm", "/v1/chat/completions", [{"messages": MESSAGES, **body} for body in CHATS]),
    ("lm", "/v1/responses", RESPONSES),
    ("lm", "/v1/responses/input_tokens", RESPONSES),
    ("lm", "/v1/messages", [{"max_tokens": 4, **body} for body in ANTHROPIC]),
    ("lm", "/v1/messages/count_tokens", [{"messages": MESSAGES[1:], "system": "be short"}]),
    ("lm", "/v1/completions", COMPLETIONS),
    ("embed", "/v1/embeddings", EMBEDDINGS),
    ("embed", "/v1/embed /v2/embed", COHERE),
    ("embed", "/embed", TEI),
    ("embed", "/similarity", COMPARED),
    ("rerank", "/predict", PREDICTED),
    ("rerank", "/classify /v1/classify", CLASSES),
    ("rerank", "/rerank", RANKS + TEXTS),
    ("rerank", "/v1/rerank /v2/rerank", RANKS),
    ("rerank", "/score /v1/score", SCORES),
    ("lm", "/tokenize /v1/tokenize", TOKENS),
    ("lm", "/detokenize /v1/detokenize", [{"tokens": [5, 6, 7]}]),
]
VALID: dict[str, list[dict[str, Any]]] = {
    path: [{"model": model, **body} for body in bodies] for model, paths, bodies in FAMILIES for path in paths.split()
}
"""Path -> bodies. Models are `lm`, `embed` and `rerank`."""


@dataclass
class Shot:
    """One request. Torn ones say other lengths than they have, so that the server may hang up on them."""

    path: str
    body: bytes
    headers: dict[str, str] = field(default_factory=lambda: {"content-type": "application/json"})
    is_torn: bool = False

    @property
    def wire(self) -> bytes:
        """What is sent."""
        headers = {"host": "fuzz", "connection": "close", "content-length": str(len(self.body)), **self.headers}
        lines = [f"POST {self.path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items() if value)]
        return "\r\n".join((*lines, "", "")).encode("latin-1") + self.body


class Raw(str):
    """Stands in a body as it is, whether it is JSON or not."""


class Twice(str):
    """A key that an object has twice; equal to no other, so that a dictionary holds both."""

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


NUMBERS = (0, -1, 1, 7, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, 10**40, 0.5, -0.0, 1e308, -1e308, 1e-320)
WORDS = (
    "",
    " ",
    "\0",
    "a",
    "é",
    "\ud83d\ude00",
    "\u202e",
    "\x7f\x1b[2J",
    "../../etc/passwd",
    "x" * 5000,
    "東京" * 3000,
)
OTHERS = (
    "null",
    "true",
    "false",
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-1e999",
    '"\\ud800"',
    '"\\x"',
    "01",
    "1.",
    "'a'",
)
MOST = 2**20  # bytes of a body: one over the server's limit is answered unread, and the answer may be lost
DEPTHS = (1, 30, 99, 101, 1000, 20_000)


def odd(chance: Random) -> Any:
    """A value that a field seldom has."""
    kind = chance.randrange(8)
    if kind == 0:
        return chance.choice(NUMBERS)
    if kind == 1:
        return chance.choice(WORDS)
    if kind == 2:
        return Raw(chance.choice(OTHERS))
    if kind == 3:
        depth = chance.choice(DEPTHS)
        opening, closing = chance.choice((("[", "]"), ('{"a":', "}")))
        return Raw(opening * depth + "1" + closing * depth)
    if kind == 4:
        return [chance.choice((1, "a", None, [1], {}, 5))] * chance.choice((0, 1, 2, 200, 3000))
    if kind == 5:
        return {chance.choice(WORDS[:6]): chance.choice((1, "a", None, [], {}))}
    if kind == 6:
        return {str(i): i for i in range(chance.choice((0, 5, 400, 3000)))}
    return chance.randrange(-(10**6), 10**6) / chance.choice((1, 3))


def written(value: Any) -> str:
    """JSON, but for what is raw."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {written(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(written, value)) + "]"
    return json.dumps(value)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a body."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *places(value[key]))]


def spoil(body: dict[str, Any], chance: Random, fields: list[str]) -> None:
    """Change one thing in a body; `fields` are names that some route reads."""
    container, key = chance.choice(places(body) or [(body, "model")])
    action = chance.randrange(9)
    if action == 0 and len(body) > 1:
        del container[key]
    elif action == 1:
        body[Twice(chance.choice(list(body)))] = odd(chance)
    elif action in (2, 3):
        body[chance.choice(fields)] = odd(chance)
    elif action == 4:
        body[chance.choice(WORDS[:8])] = odd(chance)
    elif action == 5:
        container[key] = [container.get(key) if isinstance(container, dict) else container[key]]
    elif action == 6 and isinstance(container, dict):
        container[key] = copy.deepcopy(chance.choice([inner[at] for inner, at in places(body)] or [1]))
    else:
        container[key] = odd(chance)


def cut(shot: Shot, chance: Random) -> None:
    shot.body = shot.body[: chance.randrange(len(shot.body) + 1)]


def flip(shot: Shot, chance: Random) -> None:
    body = bytearray(shot.body)
    for _ in range(chance.randrange(1, 6)):
        at = chance.randrange(len(body) + 1)
        body[at : at + chance.randrange(2)] = chance.choice(
            (b"\xff", b"\0", b"\xc0\x80", b"\xed\xa0\x80", b'"', b"{", b"]")
        )
    shot.body = bytes(body)


def recode(shot: Shot, chance: Random) -> None:
    text = shot.body.decode(errors="replace")
    shot.body = text.encode(chance.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7")), "replace")


def append(shot: Shot, chance: Random) -> None:
    shot.body += chance.choice((b"}", b" {}", b"\0" * 50, b"\r\n\r\n", b" " * 100_000, b"// end"))


def retype(shot: Shot, chance: Random) -> None:
    shot.headers["content-type"] = chance.choice(
        (
            "",
            "text/plain",
            "application/json; charset=utf-16",
            "application/xml",
            "multipart/form-data",
            "a" * 3000,
            ";",
        )
    )


def mislead(shot: Shot, chance: Random) -> None:
    """Headers that say what is not so, or ask for what there is not."""
    shot.headers |= chance.choice(
        (
            {"content-encoding": "gzip"},
            {"expect": "100-continue"},
            {"x-request-timeout": chance.choice(("nan", "-1", "1e400", "soon", "0"))},
            {"authorization": chance.choice(("Bearer", "Basic eA==", "Bearer " + "k" * 4000))},
            {"x-request-id": chance.choice(("\t", "x" * 9000, "é"))},
        )
    )


def tear(shot: Shot, chance: Random) -> None:
    """Say another length than is sent. Who sends it ends the connection then."""
    shot.is_torn = True
    shot.headers |= chance.choice(
        (
            {"content-length": str(len(shot.body) + chance.randrange(1, 1000))},
            {"content-length": str(max(0, len(shot.body) - chance.randrange(1, 40)))},
            {"content-length": chance.choice(("-1", "1e3", "9" * 30, "0x10", "5, 6"))},
            {"content-length": "", "transfer-encoding": chance.choice(("chunked", "gzip", "identity"))},
            {"transfer-encoding": "chunked"},
        )
    )


DEEDS: tuple[Callable[[Shot, Random], None], ...] = (cut, flip, flip, recode, append, retype, mislead, tear)


def shot_of(seed: int, fields: list[str]) -> Shot:
    """The request of a number."""
    chance = Random(seed)
    path = chance.choice(list(VALID))
    body = copy.deepcopy(chance.choice(VALID[path]))
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3))):
        spoil(body, chance, fields)
    shot = Shot(path, written(body).encode("utf-8", "surrogatepass")[:MOST])
    if chance.random() < 0.3:
        chance.choice(DEEDS)(shot, chance)
    return shot
