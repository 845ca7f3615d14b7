"""Calls written as JSON: values whose text is passed on as it comes, and objects of a name and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from anycore.text.replies.scan import Pass, Steps

Give = Callable[[str], None]

_BETWEEN = re.compile(r"[\s,:\w.+-]+")  # of an object or array: neither brackets nor strings
_SCALAR = re.compile(r"[\w.+-]+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\["\\/bfnrtu])*"')
_IN_STRING = re.compile(r'[^"\\]+')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = '"\\/bfnrtu'
_CLOSERS = {"{": "}", "[": "]"}
ARGUMENTS = ("arguments", "parameters")
_BARE_KEYS = ("name", "type", "id", *ARGUMENTS)


class JsonPass(Pass):
    """A pass over text with JSON in it.

    JSON is followed, not parsed: brackets must fit and strings must end. In strings, control characters and unknown
    escapes, which models write, are given out as JSON wants them.
    """

    def value(self, give: Give) -> Steps[bool]:
        """Pass a JSON value on, as far as it goes. Returns whether it is whole."""
        first = yield from self.peek()
        if first == '"':
            return (yield from self.string(give))
        if first in tuple(_CLOSERS):
            return (yield from self._nested(give))
        scalar = yield from self.run(_SCALAR)
        if not scalar or not (yield from self.peek()):
            return False
        give(scalar)
        return True

    def _nested(self, give: Give) -> Steps[bool]:
        closers: list[str] = []
        while char := (yield from self.peek()):
            if char == '"':
                if not (yield from self.string(give)):
                    return False
                continue
            if between := _BETWEEN.match(self.text, self.at):
                give(between[0])
                self.at = between.end()
                continue
            if char in _CLOSERS:
                closers.append(_CLOSERS[char])
            elif closers.pop() != char:
                return False
            give(char)
            self.at += 1
            if not closers:
                return True
        return False

    def string(self, give: Give) -> Steps[bool]:
        """Pass a JSON string on, with its quotes. Returns whether it is whole."""
        if whole := _STRING.match(self.text, self.at):  # it is all there, and in order
            give(whole[0])
            self.at = whole.end()
            return True
        if not (yield from self.literal('"')):
            return False
        give('"')
        while char := (yield from self.peek()):
            if char == "\\":
                escaped = yield from self.peek(1)
                if not escaped:
                    return False
                give("\\" + escaped if escaped in _ESCAPES else "'" if escaped == "'" else f"\\\\{_plain(escaped)}")
                self.at += 2
            elif char == '"':
                give('"')
                self.at += 1
                return True
            elif found := _IN_STRING.match(self.text, self.at):
                give(_plain(found[0]))
                self.at = found.end()
        return False

    def word(self) -> Steps[str | None]:
        """Take a JSON string and return its content; None if none is there or it does not end."""
        raw: list[str] = []
        whole = yield from self.string(raw.append)
        return _content("".join(raw)) if whole else None

    def arguments(self, give: Give) -> Steps[bool]:
        """Pass the arguments of a call on. Returns whether they are whole. None at all are an empty object.

        A string with JSON in it stands for that JSON.
        """
        if (yield from self.peek()) in tuple(_CLOSERS):
            whole = yield from self.value(give)
        else:
            raw: list[str] = []
            whole = yield from self.value(raw.append)
            text = "".join(raw)
            content = (_content(text) or "").strip() if text.startswith('"') else text
            if whole:
                give("{}" if content in ("", "null") else content if content.startswith("{") else text)
        self.open = self.open and not whole
        return whole

    def call(self, known: Collection[str] | None = None) -> Steps[bool]:
        """Read an object of a name and arguments, in any order, and give out the call.

        Args:
            known: names of the tools, where nothing else says that the object is a call: it is none without one of
                these names, without arguments, or with keys that calls do not have.

        Returns:
            Whether it is whole and a call. A call that is not whole may have been given out as far as it went.
        """
        name: str | None = None
        early: list[str] | None = None  # arguments that came before the name
        begun = done = False
        if not (yield from self.literal("{")):
            return False
        while not (yield from self._closed()):
            key = yield from self.word()
            yield from self.space()
            if key is None or not (yield from self.literal(":")) or (known is not None and key not in _BARE_KEYS):
                return False
            yield from self.space()
            if key == "name" and name is None:
                name = yield from self.word()
                if name is None or (known is not None and name not in known):
                    return False
                if known is None or early is not None:
                    self.begin(name)
                    self.argue("".join(early or ()))
                    begun, done = True, early is not None
                    self.open = not done
            elif key in ARGUMENTS and not done and early is None:
                if name is None:
                    early = []
                elif not begun:
                    self.begin(name)
                    begun = True
                if not (yield from self.arguments(self.argue if early is None else early.append)):
                    return False
                done = early is None
            elif not (yield from self.value(lambda text: None)):
                return False
        if begun and not done:
            self.argue("{}")
            self.open = False
        return begun

    def _closed(self) -> Steps[bool]:
        """Take what stands between the parts of an object; return whether it ends."""
        yield from self.space()
        if (yield from self.literal(",")):
            yield from self.space()
        return bool((yield from self.literal("}")))


def _plain(text: str) -> str:
    """Text as it may stand in a JSON string."""
    return _CONTROL.sub(lambda found: json.dumps(found[0])[1:-1], text)


def _content(raw: str) -> str | None:
    """The content of a JSON string."""
    try:
        return str(json.loads(raw)).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    except ValueError:
        return None
