"""What readers of tool calls are made of: one pass over text that arrives in pieces.

A reader is written as if the whole text were there: `read` is a generator that yields wherever it needs more. What it
does depends on the text alone and never on how it was cut, because every look ahead waits until its answer is sure.
"""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from collections.abc import Generator, Iterator
from itertools import groupby
from typing import TypeVar

from anycore.text.replies.parts import Called, Part, Reader, Said

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Work that yields where it needs more text, and returns a T."""

SPACE = " \t\r\n"
NAME = re.compile(r"[\w.\-/]+")  # of a tool, where nothing else says where it ends


class Pass(Reader):
    """A reader written as one pass.

    Text that a mark began is held (`attempt`) until it is a call, so that it can be said if it is none. White space
    next to calls belongs to the format and is not said.
    """

    def __init__(self) -> None:
        self.text = ""  # what has come, from `held` or `at` on
        self.at = 0  # of the next character in it
        self.held: int | None = None  # where to go back to
        self.over = False
        self.calls = 0
        self.open = False  # the arguments of the last call are not whole
        self.parts: list[Part] = []
        self._gap = ""  # white space that may stand before a call
        self._said = False  # anything
        self._called = False  # nothing was said after the last call
        self._keys: set[str] = set()  # of arguments that were given one by one
        self._steps = self.read()

    @abstractmethod
    def read(self) -> Steps[None]:
        """Read the reply, from its start to its end."""

    def feed(self, text: str) -> list[Part]:
        cut = self.at if self.held is None else self.held
        self.text = self.text[cut:] + text
        self.at -= cut
        self.held = None if self.held is None else 0
        return self._go()

    def end(self) -> list[Part]:
        self.over = True
        parts = self._go()
        if self._gap and not self._called:
            parts.append(Said(self._gap))
        self._gap = ""
        return parts

    def _go(self) -> list[Part]:
        next(self._steps, None)
        parts, self.parts = self.parts, []
        return list(_joined(parts))

    # Giving

    def say(self, text: str) -> None:
        """Give out text, except white space at its end, which may stand before a call.

        Behind a call that is not whole there is no text, but what is left of it.
        """
        if self.open:
            return
        text = self._gap + text
        body = text.rstrip(SPACE)
        self._gap = text[len(body) :]
        if body:
            self.parts.append(Said(body.lstrip(SPACE) if self._called and not self._said else body))
            self._said, self._called = True, False

    def begin(self, name: str) -> None:
        """Give out the name of the next call. What was held is that call's."""
        self.held = None
        self._gap = ""
        self._called = self.open = True
        self.parts.append(Called(self.calls, name))
        self.calls += 1
        self._keys = set()

    def argue(self, text: str) -> None:
        """Give out a piece of the arguments of the call that began last."""
        if text:
            self.parts.append(Called(self.calls - 1, None, text))

    def argument(self, key: str, value: str) -> None:
        """Give out one argument, as JSON. A key counts once."""
        if key not in self._keys:
            self.argue(f"{', ' if self._keys else '{'}{json.dumps(key, ensure_ascii=False)}: {value}")
            self._keys.add(key)

    def close(self) -> None:
        """Give out the end of arguments that were given one by one."""
        self.argue("}" if self._keys else "{}")
        self.open = False

    # Taking

    def attempt(self, mark: str, block: Steps[bool]) -> Steps[bool]:
        """Read the block that a mark began, and return whether it is one. If not, the mark was text and is said."""
        self.held = self.at
        found = (yield from block) or self.held is None
        if found:
            self._gap = ""
        else:
            self.at = self.held or 0
            self.say(mark)
        self.held = None
        return found

    def prose(self, *marks: str) -> Steps[str]:
        """Say text up to the first of these marks, take that and return it; "" at the end of the text."""
        while True:
            text, mark = self._some(marks)
            self.say(text)
            if mark or self.over:
                return mark
            yield

    def upto(self, *marks: str) -> Steps[tuple[str, str]]:
        """Take text up to the first of these marks and that, and return both; the mark is "" at the end of the text."""
        pieces: list[str] = []
        while True:
            text, mark = self._some(marks)
            pieces.append(text)
            if mark or self.over:
                return "".join(pieces), mark
            yield

    def leave(self, *marks: str) -> Steps[str]:
        """Take what is left of a call up to the first of these marks, and that, and return the mark."""
        _, mark = yield from self.upto(*marks)
        self.open = False
        return mark

    def _some(self, marks: tuple[str, ...]) -> tuple[str, str]:
        """Take what has come of the text up to the first of these marks, and that if it is there."""
        found = [(where, mark) for mark in marks if (where := self.text.find(mark, self.at)) >= 0]
        where, mark = min(found) if found else (len(self.text) if self.over else self._safe(marks), "")
        text, self.at = self.text[self.at : where], where + len(mark)
        return text, mark

    def _safe(self, marks: tuple[str, ...]) -> int:
        """Return where the text ends without what may be the beginning of a mark."""
        length = len(self.text)
        firsts = {mark[0] for mark in marks}
        for start in range(max(self.at, length + 1 - max(map(len, marks))), length):
            if self.text[start] in firsts and any(mark.startswith(self.text[start:]) for mark in marks):
                return start
        return length

    def peek(self, ahead: int = 0) -> Steps[str]:
        """Return the next character, or one further ahead; "" behind the end of the text."""
        while self.at + ahead >= len(self.text):
            if self.over:
                return ""
            yield
        return self.text[self.at + ahead]

    def literal(self, *texts: str) -> Steps[str]:
        """Take the first of these texts that comes next, and return it, otherwise ""."""
        longest = max(map(len, texts))
        while True:
            rest = self.text[self.at : self.at + longest]
            for text in texts:
                if rest.startswith(text):
                    self.at += len(text)
                    return text
                if text.startswith(rest) and not self.over:
                    break
            else:
                return ""
            yield

    def ending(self, mark: str) -> Steps[bool]:
        """Take a mark, or as much of it as there is where the text is cut off. Returns whether it came."""
        if (yield from self.literal(mark)):
            return True
        rest = self.text[self.at :]
        cut_off = bool(rest) and self.over and mark.startswith(rest)
        self.at += len(rest) if cut_off else 0
        return cut_off

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take characters for as long as the pattern (of one or more of them) matches."""
        pieces = []
        while (yield from self.peek()) and (found := pattern.match(self.text, self.at)):
            pieces.append(found[0])
            self.at = found.end()
        return "".join(pieces)

    def space(self) -> Steps[None]:
        """Take white space."""
        while (yield from self.peek()) in tuple(SPACE):
            self.at += 1

    def follows(self, *texts: str) -> Steps[bool]:
        """Return whether one of these texts comes next, after white space; nothing is taken. What is cut off counts."""
        while True:
            rest = self.text[self.at :].lstrip(SPACE)
            if rest.startswith(texts):
                return True
            if self.over:
                return any(text.startswith(rest) for text in texts)
            if not any(text.startswith(rest) for text in texts):
                return False
            yield


def _joined(parts: list[Part]) -> Iterator[Part]:
    """Make one part of those in a row that belong together."""
    for _, group in groupby(parts, key=lambda part: part.index if isinstance(part, Called) else None):
        same = list(group)
        first = same[0]
        if isinstance(first, Called):
            yield Called(first.index, first.name, "".join(part.arguments for part in same if isinstance(part, Called)))
        else:
            yield Said("".join(part.text for part in same if isinstance(part, Said)))
