"""The tools of a request: checked, and what the choice among them means."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from anycore.errors import BadRequest, Unsupported
from anycore.text.replies.form import Formats, no_tools
from anycore.text.replies.parts import Tool
from anycore.text.schemas import tidied

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class Offered:
    """The tools that the model is shown."""

    tools: tuple[Tool, ...] = ()
    shown: list[dict[str, Any]] | None = None  # as the template sees them
    forced: bool = False  # the reply has to be a call


def offered(given: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, formats: Formats) -> Offered:
    """Return what a request offers to its model.

    Args:
        given: `tools` of the OpenAI API.
        choice: its `tool_choice`.

    Raises:
        BadRequest: a tool is malformed, or the choice does not go with the tools.
        Unsupported: the model has no known way of calling tools.
    """
    if not given:
        if choice not in (None, "none", "auto"):
            raise BadRequest(f"tool_choice {_short(choice)} needs tools", param="tool_choice")
        return Offered()
    if len(given) > MAX_TOOLS:
        raise BadRequest(f"tools takes at most {MAX_TOOLS} entries, {len(given)} given", param="tools")
    tools = tuple(_tool(tool, f"tools[{i}]") for i, tool in enumerate(given))
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"tools: the name {twice!r} is there twice", param="tools")
    if choice == "none":
        return Offered()
    if formats.tools is None:
        raise no_tools()
    if choice in (None, "auto"):
        return Offered(tools, list(given))
    if choice == "required":
        return Offered(tools, list(given), forced=True)
    allowed, forced = _chosen(choice, names)
    return Offered(tuple(tool for tool in tools if tool.name in allowed), list(given), forced)


def _tool(tool: Any, path: str) -> Tool:
    if not isinstance(tool, dict):
        raise BadRequest(f"{path} must be an object", param=path)
    if tool.get("type", "function") != "function":
        raise Unsupported(f"{path}.type must be function, not {_short(tool['type'])}", param=path)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{path}.function must be an object with name and parameters", param=path)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise BadRequest(
            f"{path}.function.name must be 1 to 64 letters, digits, _, - or ., not {_short(name)}", param=path
        )
    parameters = function.get("parameters") or NO_PARAMETERS
    if not isinstance(parameters, dict):
        raise BadRequest(f"{path}.function.parameters must be a JSON schema", param=path)
    kinds = parameters.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise BadRequest(
            f"{path}.function.parameters must describe an object, since arguments are one, not {_short(kinds)}",
            param=path,
        )
    strict = function.get("strict") or False
    if not isinstance(strict, bool):
        raise BadRequest(f"{path}.function.strict must be true or false", param=path)
    return Tool(name, tidied(parameters), strict)


def _chosen(choice: str | dict[str, Any], names: list[str]) -> tuple[set[str], bool]:
    """Return the names that a tool_choice object allows, and whether one of them has to be called."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if isinstance(choice, dict) and kind == "function":
        function = choice.get("function")
        wanted, forced = {function.get("name") if isinstance(function, dict) else choice.get("name")}, True
    elif isinstance(choice, dict) and kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        listed = inner.get("tools") if isinstance(inner, dict) else None
        if not isinstance(listed, list) or inner.get("mode", "auto") not in ("auto", "required"):
            raise BadRequest("tool_choice.allowed_tools needs mode auto or required, and tools", param="tool_choice")
        wanted = {_name(tool) for tool in listed}
        forced = inner.get("mode") == "required"
    else:
        raise BadRequest(
            f"tool_choice must be none, auto, required or an object that names a function, not {_short(choice)}",
            param="tool_choice",
        )
    chosen = {name for name in wanted if name in names}
    if len(chosen) < len(wanted) or not wanted:
        unknown = next((name for name in wanted if name not in names), None)
        raise BadRequest(
            f"tool_choice names {_short(unknown)}, which is not among tools: {', '.join(names)}", param="tool_choice"
        )
    return chosen, forced


def _name(tool: Any) -> Any:
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


def _short(value: Any) -> str:
    return json.dumps(value, default=str)[:60]
