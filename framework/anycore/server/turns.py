"""Chats whose tools the server runs itself: turn after turn, until the model answers without calling any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anycore.errors import BadRequest, ConfigError, Unsupported
from anycore.server.aside import aside
from anycore.server.chat_reply import ChatReply
from anycore.server.conversation import begin
from anycore.server.generation import Chunk, Generation
from anycore.server.protocol import Usage, usage
from anycore.text.replies.form import Form
from anycore.text.replies.message import read
from anycore.toolbox import FunctionTool, ToolConfig, Turns

if TYPE_CHECKING:
    from anycore.plugins import Plugins
    from anycore.server.door import Call
    from anycore.server.protocol_generate import ChatBody
    from anycore.server.state import ServedModel, ServerState


@dataclass(slots=True)
class Answered:
    """The last turn, and what all turns took."""

    body: ChatBody
    model: ServedModel
    generation: Generation
    form: Form
    chunk: Chunk
    messages: list[dict[str, Any]]
    used: Usage

    def written(self, name: str) -> dict[str, Any]:
        """Write the answer: that of an ordinary chat, with the messages of all turns."""
        whole = ChatReply(self.body, self.model, self.generation, self.form, name).whole([self.chunk])
        return {**whole, "usage": self.used, "messages": self.messages}


async def all_turns(body: ChatBody, model: ServedModel, caller: Call, state: ServerState) -> Answered:
    """Let a conversation go on until it is answered.

    Raises:
        Unsupported: the server runs no tools, or not these.
        BadRequest: the request asks for what has no place here.
    """
    assert body.tool_config is not None
    tools = allowed(state, body.tool_config.tools)
    for name, refused in (("stream", body.stream), ("tools", bool(body.tools)), ("n", body.n != 1)):
        if refused:
            raise BadRequest(
                f"{name} does not go with tool_config, which answers once, whole and with the server's tools",
                param=name,
            )
    turns = Turns(tools, ToolConfig(body.tool_config.max_tool_calls, body.tool_config.tool_timeout))
    shown = [tool.shown for tool in tools.values()]
    counts = [0, 0, 0]  # prompt, output, cached
    again = True
    while again:
        first = not turns.messages
        changed = {
            "messages": [*body.messages, *turns.messages],
            "tools": shown if turns.open else None,
            "tool_choice": body.tool_choice if first and turns.open else None,
        }
        generation, form = await begin(body.model_copy(update=changed), model, caller, loud=state.config.log_prompts)
        chunk = (await generation.whole())[0]
        again = await aside(turns.take, read(form, chunk.text))
        used = generation.usage()
        spent = used["prompt_tokens"], used["completion_tokens"], used["prompt_tokens_details"]["cached_tokens"]
        counts = [a + b for a, b in zip(counts, spent, strict=True)]
    return Answered(body, model, generation, form, chunk, turns.messages, usage(*counts))


def check_tools(wanted: Sequence[str], plugins: Plugins) -> None:
    """Raise ConfigError unless plugins bring all tools that are to be run."""
    names = [tool.name for tool in plugins.tools]
    for name in wanted:
        if name not in names:
            known = f"they bring {', '.join(names)}" if names else "they bring none"
            raise ConfigError(f"--run-tools {name}: no plugin brings a tool of this name; {known}", param="run_tools")


def allowed(state: ServerState, names: list[str] | None) -> dict[str, FunctionTool]:
    """Return the tools that a request may have run, by their names."""
    found = {tool.name: tool for tool in (state.plugins.tools if state.plugins else ())}
    run = [name for name in state.config.run_tools if name in found]
    if not run:
        raise Unsupported("this server runs no tools: it has to be started with --run-tools NAME", param="tool_config")
    for name in names or ():
        if name not in run:
            raise Unsupported(f"tool {name[:64]!r} is not run here; there are {', '.join(run)}", param="tool_config")
    return {name: found[name] for name in (run if names is None else names)}
