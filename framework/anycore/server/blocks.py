"""One reply as blocks that open, grow and close: how the Responses and Messages APIs tell it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from enum import Enum

from anycore.server.generation import Chunk
from anycore.text.replies.form import Form
from anycore.text.replies.message import Call, Reply
from anycore.text.replies.parts import Called, Part, Said, Thought


class Kind(Enum):
    REASONING = "reasoning"
    TEXT = "text"
    CALL = "call"


@dataclass(slots=True)
class Block:
    """A run of parts of one kind. `text` is what it holds so far; of a call, its arguments."""

    index: int
    kind: Kind
    call: Call | None = None
    text: str = ""


class Change(Enum):
    OPENED = "opened"
    GREW = "grew"
    CLOSED = "closed"


Event = tuple[Change, Block, str]
"""What happened to a block, and the text that it grew by."""


class Blocks:
    """Reads one reply. When all its events have been taken, `blocks` are whole and `last` says how it ended."""

    def __init__(self, form: Form) -> None:
        self._form = form
        self._reader = form.reader()
        self._reply = Reply()
        self.blocks: list[Block] = []
        self.last = Chunk(0)
        self.thoughts = 0  # tokens of pieces that hold reasoning

    @property
    def called(self) -> bool:
        """Whether the reply calls tools."""
        return bool(self._reply.calls)

    async def read(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Event]:
        """Yield what happens to blocks while a reply is generated."""
        async for chunk in chunks:
            parts = self._reader.feed(chunk.text) if chunk.finish is None else self._reader.end()
            self.thoughts += len(chunk.token_ids) if any(isinstance(part, Thought) for part in parts) else 0
            for part in parts:
                for event in self._take(part):
                    yield event
            self.last = chunk
        for block in self.blocks[-1:]:
            yield Change.CLOSED, block, ""

    def _take(self, part: Part) -> Iterator[Event]:
        begun = self._reply.add(part, self._form)
        kind = Kind.TEXT if isinstance(part, Said) else Kind.REASONING if isinstance(part, Thought) else Kind.CALL
        block = self.blocks[-1] if self.blocks else None
        if block is None or block.kind is not kind or begun is not None:
            if block is not None:
                yield Change.CLOSED, block, ""
            block = Block(len(self.blocks), kind, begun)
            self.blocks.append(block)
            yield Change.OPENED, block, ""
        text = part.arguments if isinstance(part, Called) else part.text
        if text:
            block.text += text
            yield Change.GREW, block, text
