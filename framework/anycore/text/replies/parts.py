"""What a reply is made of, and what a format has to bring so that its text can be read and asked for.

A reader takes a model's text in pieces of any size and gives out parts. Joined, the parts are the same however the
text was cut: a whole reply is read by feeding its text at once.
"""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

Spell = Callable[[str], str]
"""Makes a Lark term of a text: a string in quotes, with the model's special tokens in it named by their ids."""


@dataclass(frozen=True, slots=True)
class Said:
    """Text for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of the model's reasoning."""

    text: str


@dataclass(frozen=True, slots=True)
class Called:
    """A piece of a tool call. The first of a call has its name; the `arguments` of all, joined, are its JSON object."""

    index: int  # of the call in the reply, from 0
    name: str | None = None
    arguments: str = ""


Part = Said | Thought | Called


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)  # JSON schema of its arguments, which are an object
    strict: bool = False  # hold the arguments to the schema even where the model is free to call or not


class Reader(ABC):
    """Reads one reply. Text that may be the beginning of a mark is held back until that is clear."""

    @abstractmethod
    def feed(self, text: str) -> list[Part]:
        """Take the next piece of text."""

    @abstractmethod
    def end(self) -> list[Part]:
        """Give out what was held back: the text is over, perhaps in the middle of a call."""


class ToolFormat(ABC):
    """How a family of models writes tool calls."""

    name: ClassVar[str]  # as --tool-parser gives it
    opening: ClassVar[str] = ""
    """Text that begins the calls of a reply; empty where calls are bare, and then the whole reply."""
    marks: ClassVar[tuple[str, ...]] = ()
    """Texts by which calls are found. Where they are tokens of a model, they are kept in its text and not said."""

    @abstractmethod
    def fits(self, template: str) -> bool:
        """Whether a model with this chat template writes calls so."""

    @abstractmethod
    def reader(self, tools: Sequence[Tool]) -> Reader:
        """Return a new reader, for a reply of a model that was shown these tools."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], spell: Spell, parallel: bool) -> str:
        """Return Lark rules, the first of them named `calls`, of one call or, with `parallel`, several.

        They begin after the `opening`. Arguments are held to their schema by llguidance's `%json {...}`.
        """

    def call_id(self) -> str:
        """Return a new name for a call, such as templates of these models take back."""
        return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models sets its reasoning apart: by two marks, the first of which the prompt may hold."""

    name: str  # as --reasoning-parser gives it
    start: str
    end: str

    def fits(self, template: str) -> bool:
        """Whether a model with this chat template reasons so."""
        return self.start in template and self.end in template


Format = ToolFormat | ReasoningFormat
