"""A reply put together from its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from anycore.text.replies.form import Form
from anycore.text.replies.parts import Called, Part, Said, Thought


@dataclass(slots=True)
class Call:
    """A tool call. `arguments` is its JSON as the model wrote it: cut short if the reply was."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """What a model replied."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, part: Part, form: Form) -> Call | None:
        """Add a part; return the call that it begins, if it does."""
        if isinstance(part, Said):
            self.content += part.text
        elif isinstance(part, Thought):
            self.reasoning += part.text
        else:
            return self._call(part, form)
        return None

    def _call(self, part: Called, form: Form) -> Call | None:
        begun = None
        if part.name is not None:
            assert form.formats.tools is not None
            begun = Call(form.formats.tools.call_id(), part.name)
            self.calls.append(begun)
        self.calls[part.index].arguments += part.arguments
        return begun

    def message(self) -> dict[str, Any]:
        """Return the message of the OpenAI API, which may be put into a conversation."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        if self.reasoning:
            message["reasoning"] = self.reasoning
        return message


def read(form: Form, text: str) -> Reply:
    """Read a whole reply."""
    reader, reply = form.reader(), Reply()
    for part in [*reader.feed(text), *reader.end()]:
        reply.add(part, form)
    return reply


def arguments_of(call: Call) -> dict[str, Any] | None:
    """Return the arguments of a call; None if they are no JSON object."""
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
