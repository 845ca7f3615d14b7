"""Functions that a model may call, and the turns between the two until it has an answer."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from anycore.errors import BadRequest, ConfigError
from anycore.text.replies.message import Call, Reply, arguments_of

Function = Callable[..., Any]
log = logging.getLogger(__name__)

LONGEST = 2**16  # characters of a result that the model gets to read


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function with what a model is told of it.

    Args:
        parameters: JSON schema of its keyword arguments.
        function: called with them in a thread of its own; what it returns is given to the model, as JSON unless it is
            a string.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    function: Function

    @classmethod
    def of(cls, function: Function) -> FunctionTool:
        """Read description and parameters from type hints and a docstring in Google's style.

        Raises:
            ConfigError: they are not enough to go by.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        try:
            described = get_json_schema(function)["function"]
        except Exception as error:  # its own kinds, which moved between versions
            name = getattr(function, "__name__", repr(function))
            raise ConfigError(f"the tool {name} cannot be described: {error}", param="tools") from error
        return cls(described["name"], described["description"], described["parameters"], function)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as an entry of the OpenAI API's `tools`."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


@dataclass(frozen=True, slots=True)
class ToolConfig:
    """Limits on what a conversation may run."""

    max_tool_calls: int = 16  # in all its turns; then the model answers without tools
    tool_timeout: float = 30.0  # seconds for one call

    def __post_init__(self) -> None:
        if self.max_tool_calls < 0:
            raise BadRequest(f"max_tool_calls must be 0 or more, not {self.max_tool_calls}", param="tool_config")
        if not 0 < self.tool_timeout <= 3600:
            raise BadRequest(
                f"tool_timeout must be above 0 and at most 3600 seconds, not {self.tool_timeout:g}", param="tool_config"
            )


@dataclass(slots=True)
class Turns:
    """The turns of one conversation. `messages` are those that came after the ones it began with."""

    tools: dict[str, FunctionTool]
    config: ToolConfig
    messages: list[dict[str, Any]] = field(default_factory=list)
    calls: int = 0

    @property
    def open(self) -> bool:
        """Whether another call may be made."""
        return self.calls < self.config.max_tool_calls

    def take(self, reply: Reply) -> bool:
        """Add a reply and the results of its calls; return whether the model has to be asked again.

        Calls beyond the limit are not run, and the model is told so. Blocks while functions run, side by side.
        """
        self.messages.append(reply.message())
        if not reply.calls:
            return False
        allowed = max(0, self.config.max_tool_calls - self.calls)
        self.calls += len(reply.calls)
        results = run(self.tools, reply.calls[:allowed], self.config.tool_timeout)
        results += ["error: not run, the limit of calls is reached" for _ in reply.calls[allowed:]]
        for call, result in zip(reply.calls, results, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result})
        return True


def run(tools: dict[str, FunctionTool], calls: Sequence[Call], seconds: float) -> list[str]:
    """Run calls side by side; return what the model reads of each: its result, or why it has none.

    A function that does not end in time is left to itself.
    """
    results = [f"error: no answer within {seconds:g} s" for _ in calls]
    threads = []
    for i, call in enumerate(calls):

        def work(i: int = i, call: Call = call) -> None:
            results[i] = _result(tools, call)

        threads.append(threading.Thread(target=work, name=f"tool-{call.name}", daemon=True))
        threads[-1].start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return list(results)


def _result(tools: dict[str, FunctionTool], call: Call) -> str:
    tool = tools.get(call.name)
    if tool is None:
        return f"error: there is no tool {call.name!r}, only {', '.join(tools)}"
    arguments = arguments_of(call)
    if arguments is None:
        return "error: the arguments are no JSON object"
    try:
        found = tool.function(**arguments)
        text = found if isinstance(found, str) else json.dumps(found, ensure_ascii=False, default=str)
    except Exception as error:
        log.info("tool %s failed: %s", call.name, type(error).__name__)
        return f"error: {type(error).__name__}: {error}"[:LONGEST]
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} (cut: it has {len(text)} characters)"
