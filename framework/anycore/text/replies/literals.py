"""Values written nearly as JSON: strings in other quotes, keys without them, Python's words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from anycore.text.replies.scan import SPACE, Pass, Steps
from anycore.text.replies.values import as_json

BARE = re.compile(r"[^,()\[\]{}]+")
_BARE_KEY = re.compile(r"[^,:(\[\]){}]+")
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
DEEPEST = 64  # brackets in brackets


class LiteralPass(Pass):
    """A pass over text with such values in it.

    Args:
        quotes: what stands around strings; of two with the same beginning the longer first.
        unescape: makes a string of what stands between quotes. With it a backslash keeps a quote from ending a string.
    """

    bare = BARE  # what a value without quotes is made of

    def __init__(self, quotes: Sequence[str], unescape: Callable[[str], str] | None) -> None:
        self.quotes = tuple(quotes)
        self.unescape = unescape
        super().__init__()

    def value(self, schema: Any, root: dict[str, Any], depth: int = 0) -> Steps[str | None]:
        """Take a value and return its JSON; None if it is broken or cut off."""
        yield from self.space()
        text = yield from self.quoted()
        if text is not None or depth > DEEPEST:
            return None if text is None else json.dumps(text, ensure_ascii=False)
        if (yield from self.peek()) in tuple(_CLOSERS):
            return (yield from self._nested(depth))
        bare = yield from self.run(self.bare)
        if not bare.strip(SPACE) or not (yield from self.peek()):
            return None
        return as_json(bare.strip(SPACE), schema, root)

    def key(self) -> Steps[str | None]:
        """Take a key, quoted or not, and the colon behind it."""
        yield from self.space()
        text = yield from self.quoted()
        if text is None:
            text = (yield from self.run(_BARE_KEY)).strip(SPACE) or None
        yield from self.space()
        return text if (yield from self.literal(":")) else None

    def quoted(self) -> Steps[str | None]:
        """Take a string and return its content; None if none is there or it does not end."""
        quote = yield from self.literal(*self.quotes)
        if not quote:
            return None
        pieces: list[str] = []
        marks = (quote,) if self.unescape is None else ("\\", quote)
        while True:
            text, mark = yield from self.upto(*marks)
            pieces.append(text)
            if mark == quote:
                return "".join(pieces) if self.unescape is None else self.unescape("".join(pieces))
            escaped = yield from self.peek()
            if not escaped:
                return None
            pieces.append(mark + escaped)
            self.at += 1

    def _nested(self, depth: int) -> Steps[str | None]:
        opener = yield from self.peek()
        self.at += 1
        parts: list[str] = []
        while True:
            yield from self.space()
            if (yield from self.literal(_CLOSERS[opener])):
                inner = ", ".join(parts)
                return f"{{{inner}}}" if opener == "{" else f"[{inner}]"
            if parts and not (yield from self.literal(",")):
                return None
            yield from self.space()
            if parts and (yield from self.peek()) == _CLOSERS[opener]:
                continue
            key = None
            if opener == "{":
                key = yield from self.key()
                if key is None:
                    return None
            value = yield from self.value({}, {}, depth + 1)
            if value is None:
                return None
            parts.append(value if key is None else f"{json.dumps(key, ensure_ascii=False)}: {value}")
