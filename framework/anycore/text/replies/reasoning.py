"""Reads reasoning apart from what is said."""

from __future__ import annotations

from anycore.text.replies.parts import Part, Reader, ReasoningFormat, Said, Thought


class PlainReader(Reader):
    """Reads a reply that is nothing but text."""

    def feed(self, text: str) -> list[Part]:
        return [Said(text)] if text else []

    def end(self) -> list[Part]:
        return []


class ReasoningReader(Reader):
    """Reads a reply that begins with reasoning, if it has any; what follows goes to another reader.

    White space around the marks belongs to neither part. Reasoning without an end is reasoning up to the end.

    Args:
        inside: whether the prompt holds the first mark already. Models that write it again are forgiven.
    """

    def __init__(self, form: ReasoningFormat, after: Reader, *, inside: bool) -> None:
        self._form = form
        self._after = after
        self._inside = inside
        self._state = self._beginning
        self._fresh = True  # nothing of the part under way was given out yet
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        self._held += text
        return self._state()

    def end(self) -> list[Part]:
        found: list[Part] = []
        if self._state == self._thinking or (self._inside and self._state == self._beginning):
            found += self._think(self._held.rstrip())
        elif self._held:
            found += self._after.feed(self._held)
        self._held = ""
        return found + self._after.end()

    def _beginning(self) -> list[Part]:
        """Decide whether the reply begins with reasoning."""
        text, start = self._held.lstrip(), self._form.start
        if start.startswith(text[: len(start)]) and len(text) < len(start):
            return []
        if text.startswith(start):
            self._held, self._state = text[len(start) :], self._thinking
        elif self._inside:
            self._state = self._thinking
        else:
            self._fresh, self._state = False, self._saying
        return self._state()

    def _thinking(self) -> list[Part]:
        where = self._held.find(self._form.end)
        if where >= 0:
            found = self._think(self._held[:where].rstrip())
            self._held = self._held[where + len(self._form.end) :]
            self._fresh, self._state = True, self._saying
            return found + self._saying()
        ready = self._held[: len(self._held) - overlap(self._held, self._form.end)].rstrip()
        self._held = self._held[len(ready) :]
        return self._think(ready)

    def _saying(self) -> list[Part]:
        text = self._held.lstrip() if self._fresh else self._held
        self._fresh, self._held = self._fresh and not text, ""
        return self._after.feed(text) if text else []

    def _think(self, text: str) -> list[Part]:
        text = text.lstrip() if self._fresh else text
        self._fresh = self._fresh and not text
        return [Thought(text)] if text else []


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of a text may be the beginning of a mark."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def thinking(form: ReasoningFormat, prompt: str) -> bool:
    """Whether a prompt ends within the model's reasoning."""
    return prompt.rstrip().endswith(form.start.rstrip())


def thought(form: ReasoningFormat, prompt: str) -> bool:
    """Whether a prompt ends where reasoning is over, so that the reply has none."""
    return prompt.rstrip().endswith(form.end)
