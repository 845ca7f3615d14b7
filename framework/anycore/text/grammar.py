"""What an output has to look like, as the grammar that the engine keeps to; and a tokenizer's tokens for it.

The work is llguidance's: it refuses what it cannot hold to, so that no keyword of a schema is silently ignored. Why it
and no other: docs/design/0025-grammars.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from anycore.errors import BadRequest
from anycore.text.schemas import tidied

if TYPE_CHECKING:
    from llguidance import LLTokenizer

    from anycore.models.source import Source
    from anycore.models.spec import ModelSpec
    from anycore.text.tokenizer import Tokenizer

WHITESPACE = r"\n {0,32}| "
"""Between the parts of JSON: a space, or a new line and how far it is indented. Any amount could go on for ever."""

LONGEST = 2**18  # bytes of a grammar in llguidance's form; larger ones are refused
DEEPEST = 64  # levels of a JSON schema, as in vLLM


def json_object() -> str:
    """Any JSON object."""
    return json_schema({"type": "object"})


def json_schema(schema: str | bool | dict[str, Any], param: str = "response_format") -> str:
    """JSON that a schema accepts.

    Raises:
        BadRequest: it is not JSON, nested too deeply, or uses what cannot be held to; says which keyword.
    """
    from llguidance import LLMatcher

    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"the JSON schema is no JSON: {error}", param=param) from error
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise BadRequest(f"a JSON schema is an object, not {json.dumps(schema)[:40]}", param=param)
    if _deeper(schema, DEEPEST):
        raise BadRequest(f"the JSON schema is nested deeper than {DEEPEST} levels", param=param)
    written = json.dumps(tidied(schema))
    return checked(LLMatcher.grammar_from_json_schema(written, overrides={"whitespace_pattern": WHITESPACE}), param)


def regex(pattern: str, param: str = "structured_outputs") -> str:
    """Text that a regular expression matches as a whole."""
    from llguidance import LLMatcher

    return checked(LLMatcher.grammar_from_regex(pattern), param)


def choice(texts: Sequence[str], param: str = "structured_outputs") -> str:
    """One of several texts."""
    from llguidance import LLMatcher

    if not texts or not all(texts):
        raise BadRequest("choice needs at least one text, and none that is empty", param=param)
    rule = " | ".join(map(quoted, texts))
    return checked(LLMatcher.grammar_from_lark(f"start: {rule}"), param)


def free(grammar: str, param: str = "structured_outputs") -> str:
    """Text of a grammar in Lark's form, or in llama.cpp's GBNF."""
    from llguidance import grammar_from

    try:
        return checked(grammar_from("grammar", grammar), param)
    except ValueError as error:
        raise BadRequest(f"the grammar cannot be read: {error}", param=param) from error


def checked(grammar: str, param: str) -> str:
    """Return a grammar that can be used.

    Raises:
        BadRequest: it cannot; says why.
    """
    from llguidance import LLMatcher

    if len(grammar) > LONGEST:
        raise BadRequest(f"the grammar takes {len(grammar)} bytes, {LONGEST} are allowed", param=param)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise BadRequest(f"the output cannot be held to this: {messages[0].splitlines()[0]}", param=param)
    return grammar


def composed(top: str, answer: str | None = None, param: str = "structured_outputs") -> str:
    """A grammar in Lark's form in which `@answer` stands for another grammar, as the functions here return it.

    Raises:
        BadRequest: see `checked`.
    """
    grammars: list[dict[str, Any]] = [{"lark_grammar": top}]
    if answer is not None:
        own = json.loads(answer)["grammars"] if answer.startswith("{") else [{"lark_grammar": answer}]
        grammars += [own[0] | {"name": "answer"}, *own[1:]]
    return checked(json.dumps({"grammars": grammars}), param)


def speller(marks: dict[str, int]) -> Callable[[str], str]:
    """Return what makes a Lark term of a text: a string, or the token of a mark; `marks` are `mark_tokens`'."""
    parts = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or "(?!)")

    def spell(text: str) -> str:
        terms: list[str | int] = []
        start = 0
        for found in parts.finditer(text):
            terms += [text[start : found.start()], marks[found.group()]]
            start = found.end()
        terms.append(text[start:])
        return " ".join(f"<[{term}]>" if isinstance(term, int) else quoted(term) for term in terms if term != "")

    return spell


def quoted(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def mark_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """The tokens of a model that are marks of replies, or parts of such, special or not, by their texts.

    A grammar has to name them: text without them is free of marks. Reads all added tokens, of which some models have
    thousands.
    """
    # Here, because the grammars of these formats are made with what stands above.
    from anycore.text.replies.formats import REASONING_FORMATS, TOOL_FORMATS

    marks = [mark for form in TOOL_FORMATS for mark in form.marks]
    marks += [mark for form in REASONING_FORMATS for mark in (form.start, form.end)]
    return {
        text: token
        for text, token in tokenizer.added_ids.items()
        if text.startswith(("<", "[")) and any(text in mark for mark in marks)
    }


def vocabulary_of(source: Source, spec: ModelSpec) -> LLTokenizer:
    """The tokens of a located model. Takes a moment, in which imports have a part."""
    from anycore.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(source)
    ends = spec.eos_ids or ([] if tokenizer.eos_id is None else [tokenizer.eos_id])
    return vocabulary(tokenizer, spec.vocab_size, ends)


def vocabulary(tokenizer: Tokenizer, size: int, ends: Collection[int]) -> LLTokenizer:
    """The bytes of a model's `size` tokens, and those of them that end a text.

    Raises:
        BadRequest: its texts are not the concatenation of its tokens' bytes (WordPiece's), or no token ends a text.
    """
    from llguidance import LLTokenizer, TokenizerWrapper

    if not tokenizer.streams or not ends:
        raise BadRequest("this model's tokens cannot be held to a grammar", param="structured_outputs")
    return LLTokenizer(TokenizerWrapper(_Tokens(tokenizer, size, ends)), n_vocab=size, eos_token=sorted(ends))


class _Tokens:
    """A tokenizer as llguidance wants it."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: Collection[int]) -> None:
        self.eos_token_id = min(ends)
        self.bos_token_id = tokenizer.bos_id
        self.special_token_ids = sorted(tokenizer.special_ids | set(ends) | set(mark_tokens(tokenizer).values()))
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(size)]
        self._encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(text, add_special_tokens=False)

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def _deeper(value: Any, levels: int) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_deeper(part, levels - 1) for part in parts)
