"""From the body of a chat to what generates its replies and what reads them; other APIs go through it, too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from anycore.errors import BadRequest
from anycore.server.choosing import choosing
from anycore.server.generation import Generation, Prompt, settings_of
from anycore.server.prompts import chat_options, cut_options
from anycore.server.sampling import asked_tokens, check_body, sampling_of
from anycore.server.structured import answer_of, made
from anycore.text.replies.form import Form, Wanted
from anycore.text.replies.offer import Offered, offered

if TYPE_CHECKING:
    from anycore.server.door import Call
    from anycore.server.protocol_generate import ChatBody
    from anycore.server.protocol_pool import TokenizeBody
    from anycore.server.state import ServedModel
    from anycore.text.draft import Rendered


async def conversation(body: ChatBody | TokenizeBody, model: ServedModel) -> Rendered:
    """Render a conversation as the model would be given it, and do no more.

    Raises:
        BadRequest: a field is wrong.
    """
    assert body.messages is not None  # of what is to be tokenised, who calls has seen to it
    shown = offered(body.tools, body.tool_choice, model.formats).shown
    return await asyncio.to_thread(model.renderer.chat, body.messages, **chat_options(body), tools=shown)


async def begin(body: ChatBody, model: ServedModel, caller: Call, *, loud: bool = False) -> tuple[Generation, Form]:
    """Check and render a conversation; return what generates its replies and what reads them.

    Raises:
        BadRequest: a field is wrong, or what the reply is to be like cannot be held to.
    """
    _check(body, model.slot.config.scheduling_policy)
    asked = asked_tokens(body)
    offer, answer = offered(body.tools, body.tool_choice, model.formats), answer_of(body)
    options = {**chat_options(body), **cut_options(body), "tools": offer.shown}
    rendered = await asyncio.to_thread(model.renderer.chat, body.messages, **options)
    form = await _form(body, model, offer, answer, rendered.text)
    defaults = model.sampling_defaults.values
    sampling = sampling_of(
        body,
        defaults,
        model.renderer.tokenizer,
        model.spec.vocab_size,
        max_tokens=caller.account.limit_output(asked, defaults.get("max_tokens")),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=form.grammar,
    )
    sampling = choosing(body, sampling, model.spec.vocab_size)
    generation = Generation(
        model,
        [Prompt(rendered.token_ids, rendered.text)],
        sampling,
        settings_of("chat", priority=body.priority, cache_salt=body.cache_salt, tenant=caller.account.tenant),
        caller,
        asked=asked is not None,
        interval=body.stream_interval,
        loud=loud,
        kept=form.kept,
        best=body.n,
    )
    return generation, form


async def _form(
    body: ChatBody, model: ServedModel, offer: Offered, answer: Callable[[], str] | None, prompt: str
) -> Form:
    """Return the form of the reply to a rendered prompt; grammars are made on threads of their own."""
    wanted = Wanted(offer.tools, offer.forced, body.parallel_tool_calls, budget=body.thinking_token_budget)
    if answer is None and not wanted.held and wanted.budget is None:
        return model.formats.form(wanted, prompt)

    def make() -> Form:
        return model.formats.form(wanted if answer is None else replace(wanted, answer=answer()), prompt)

    return await made(make)


def _check(body: ChatBody, policy: str) -> None:
    """Refuse combinations of fields that contradict each other."""
    check_body(body, policy)
    if body.top_logprobs and not body.logprobs:
        raise BadRequest("top_logprobs needs logprobs: true", param="top_logprobs")
