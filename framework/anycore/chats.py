"""Conversations of `LLM`: answered together, with tools that are only described or that are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from anycore.engine.request import SamplingParams, TokenLogprob
from anycore.errors import BadRequest
from anycore.text.draft import Rendered
from anycore.text.render import Renderer
from anycore.text.replies.form import Formats, Wanted
from anycore.text.replies.message import Reply, read
from anycore.text.replies.offer import offered
from anycore.toolbox import Function, FunctionTool, ToolConfig, Turns

Message = dict[str, Any]
ToolLike = dict[str, Any] | FunctionTool | Function


@dataclass(slots=True)
class GenerateOutput:
    """One generated sequence. With `n` above 1, `others` holds the further ones."""

    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    score: float | None = None  # of a beam search: the sum of log-probabilities over length ** length_penalty
    reply: Reply | None = None  # of a chat: what the text means
    messages: list[Message] = field(default_factory=list)  # of a chat: what to add to its conversation
    others: list[GenerateOutput] = field(default_factory=list)


Complete = Callable[[list[Rendered], list[SamplingParams], list[frozenset[int]]], list[GenerateOutput]]


@dataclass(frozen=True, slots=True)
class Chats:
    """What conversations need of a model. `complete` generates from prompts, all together, keeping some tokens."""

    renderer: Renderer
    formats: Formats
    complete: Complete

    def answer(
        self,
        several: list[list[Message]],
        sampling: list[SamplingParams],
        tools: Sequence[ToolLike],
        choice: str | dict[str, Any] | None,
        config: ToolConfig,
        options: dict[str, Any],
    ) -> list[GenerateOutput]:
        """Answer conversations; see `LLM.chat`."""
        given = [tool if isinstance(tool, dict | FunctionTool) else FunctionTool.of(tool) for tool in tools]
        functions = {tool.name: tool for tool in given if isinstance(tool, FunctionTool)}
        shown = [tool.shown if isinstance(tool, FunctionTool) else tool for tool in given]
        if not functions:
            return self._once(several, sampling, shown, choice, options)
        if len(functions) < len(given):
            raise BadRequest(
                "tools must have different names, and are all functions, which are run, or all descriptions",
                param="tools",
            )
        return self._turns(several, sampling, shown, choice, options, [Turns(functions, config) for _ in several])

    def _turns(
        self,
        several: list[list[Message]],
        sampling: list[SamplingParams],
        shown: list[dict[str, Any]],
        choice: str | dict[str, Any] | None,
        options: dict[str, Any],
        turns: list[Turns],
    ) -> list[GenerateOutput]:
        """Let conversations go on, all together, until none calls a function any more."""
        outputs: dict[int, GenerateOutput] = {}
        upcoming = list(range(len(several)))
        while upcoming:
            again = []
            for free in (True, False):  # those that have no calls left are shown no tools
                part = [i for i in upcoming if turns[i].open is free]
                conversations = [[*several[i], *turns[i].messages] for i in part]
                tools = shown if free else []
                found = self._once(conversations, [sampling[i] for i in part], tools, choice if free else None, options)
                for i, output in zip(part, found, strict=True):
                    assert output.reply is not None
                    if turns[i].take(output.reply):
                        again.append(i)
                    output.messages = turns[i].messages
                    outputs[i] = output
            upcoming, choice = again, None
        return [outputs[i] for i in range(len(several))]

    def _once(
        self,
        several: list[list[Message]],
        sampling: list[SamplingParams],
        tools: list[dict[str, Any]],
        choice: str | dict[str, Any] | None,
        options: dict[str, Any],
    ) -> list[GenerateOutput]:
        """Answer conversations once, and read what is answered."""
        offer = offered(tools, choice, self.formats)
        rendered = [self.renderer.chat(one, tools=offer.shown, **options) for one in several]
        forms = [
            self.formats.form(Wanted(offer.tools, offer.forced, answer=params.grammar), item.text)
            for params, item in zip(sampling, rendered, strict=True)
        ]
        held = [msgspec.structs.replace(p, grammar=form.grammar) for p, form in zip(sampling, forms, strict=True)]
        outputs = self.complete(rendered, held, [form.kept for form in forms])
        for output, form in zip(outputs, forms, strict=True):
            for each in (output, *output.others):
                each.reply = read(form, each.text)
                each.messages = [each.reply.message()]
        return outputs
