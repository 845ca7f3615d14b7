"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.errors import BadRequest
from anycore.server.bodies import JsonRoute
from anycore.server.choosing import choosing
from anycore.server.door import Caller, State, admit, offload, reply_id
from anycore.server.generation import Chunk, Generation, Prompt, settings_of
from anycore.server.logprobs import LogprobFormat, Offsets, joined
from anycore.server.prompts import cut_options
from anycore.server.protocol import responses
from anycore.server.protocol_completions import CompletionBody
from anycore.server.protocol_replies import Completion, CompletionChoice
from anycore.server.sampling import asked_tokens, check_body, check_sequences, sampling_of
from anycore.server.scopes import INFER
from anycore.server.sse import DONE, EventStream, event, first_of, json_response, unless_gone
from anycore.server.state import ServedModel
from anycore.server.structured import answer_of, made
from anycore.text.fim import infill_of, render_infill

router = APIRouter(tags=["generate"], route_class=JsonRoute, dependencies=[INFER])

DEFAULT_MAX_TOKENS = 16  # as in the OpenAI API


@router.post("/v1/completions", response_model=None, responses=responses(Completion, stream=True))
async def completions(request: Request, body: CompletionBody, state: State, caller: Caller) -> Response:
    """Continue one or several prompts; with `stream`, as server-sent events of the same object."""
    model = admit(state, body, body.model, Task.GENERATE)
    check_sequences(body, state.config.max_request_sequences, len(body.prompt))
    _check(body, model.slot.config.scheduling_policy)
    asked = asked_tokens(body)
    defaults = model.sampling_defaults.values
    answer = answer_of(body)
    sampling = sampling_of(
        body,
        defaults,
        model.renderer.tokenizer,
        model.spec.vocab_size,
        max_tokens=caller.account.limit_output(asked, defaults.get("max_tokens", DEFAULT_MAX_TOKENS)),
        logprobs=body.logprobs,
        prompt_logprobs=_prompt_logprobs(body),
        grammar=None if answer is None else await made(answer),
    )
    sampling = choosing(body, sampling, model.spec.vocab_size)
    if body.suffix and not body.ignore_eos:
        ends = (*sampling.stop_token_ids, *infill_of(model.renderer.tokenizer).ends)
        sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(dict.fromkeys(ends)))
    size = sum(len(item) for item in body.prompt)
    prompts = await offload(size, _render, body, model)
    settings = settings_of("text", priority=body.priority, cache_salt=body.cache_salt, tenant=caller.account.tenant)
    generation = Generation(
        model,
        prompts,
        sampling,
        settings,
        caller,
        asked=asked is not None,
        interval=body.stream_interval,
        loud=state.config.log_prompts,
        best=body.n,
    )
    reply = CompletionReply(body, model, generation, reply_id(request, body.request_id))
    if body.stream:
        return EventStream(reply.events(await first_of(request, generation.chunks())))
    return json_response(reply.whole(await unless_gone(request.receive, generation.whole())))


def _check(body: CompletionBody, policy: str) -> None:
    """Refuse combinations of fields that contradict each other."""
    check_body(body, policy)
    if body.suffix and body.echo:
        raise BadRequest("echo cannot be had together with suffix: the answer stands between the two", param="echo")


def _prompt_logprobs(body: CompletionBody) -> int | None:
    """How many alternatives the engine computes for prompt tokens: what is asked for, and what echo shows."""
    counts = [c for c in (body.prompt_logprobs, body.logprobs if body.echo else None) if c is not None]
    return max(counts, default=None)


def _render(body: CompletionBody, model: ServedModel) -> list[Prompt]:
    """Return the prompts with the text that echo shows: as it was sent, unless that was ids or it has been changed."""
    prompts = []
    for i, item in enumerate(body.prompt):
        name = f"prompt[{i}]" if len(body.prompt) > 1 else "prompt"
        options = {"param": name, **cut_options(body)}
        if body.suffix:
            rendered = render_infill(model.renderer, item, body.suffix, body.add_special_tokens, **options)
        else:
            rendered = model.renderer.text(item, body.add_special_tokens, **options)
        text = item if isinstance(item, str) and not rendered.truncated and not body.suffix else None
        if text is None and (body.echo or body.return_prompt_text):
            text = model.renderer.tokenizer.decode(rendered.token_ids, skip_special_tokens=body.skip_special_tokens)
        prompts.append(Prompt(rendered.token_ids, text or ""))
    return prompts


class CompletionReply:
    """The parts of one answer that stay the same, and the two forms it leaves in."""

    def __init__(self, body: CompletionBody, model: ServedModel, generation: Generation, name: str) -> None:
        self._body = body
        self._generation = generation
        self._format = LogprobFormat(
            model.renderer.tokenizer,
            as_ids=body.return_tokens_as_token_ids,
            skip_special_tokens=body.skip_special_tokens,
        )
        self._id = f"cmpl-{name}"
        self._created = int(time.time())
        self._model = body.model or model.names[0]

    def whole(self, choices: list[Chunk]) -> Completion:
        written = [self._choice(chunk, self._offsets(chunk.choice), prompt=True) for chunk in choices]
        return {**self._reply(written), "usage": self._generation.usage()}

    async def events(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[bytes]:
        """What belongs to a prompt first, text next, the finish reason alone in a choice's last chunk, then usage."""
        body = self._body
        offsets: dict[int, Offsets] = {}  # where the tokens of each choice begin
        async for chunk in chunks:
            if chunk.choice not in offsets:
                offsets[chunk.choice] = self._offsets(chunk.choice)
                if body.echo or body.return_token_ids or body.return_prompt_text:
                    first = Chunk(chunk.choice)
                    yield event(self._chunk(self._choice(first, offsets[chunk.choice], prompt=True)))
            if chunk.finish is not None or chunk.text or body.return_token_ids or body.logprobs is not None:
                yield event(self._chunk(self._choice(chunk, offsets[chunk.choice])))
        options = body.stream_options
        if options is not None and options.include_usage:
            yield event({**self._reply([]), "usage": self._generation.usage()})
        yield DONE

    def _offsets(self, choice: int) -> Offsets:
        """Of the output of a choice: after the prompt, if that is echoed."""
        prompts, n = self._generation.prompts, self._body.n
        return self._format.offsets(len(prompts[choice // n].text) if self._body.echo else 0)

    def _choice(self, chunk: Chunk, offsets: Offsets, *, prompt: bool = False) -> CompletionChoice:
        """Write the next chunk of a choice; with `prompt`, what belongs to the prompt before it."""
        body, which = self._body, chunk.choice // self._body.n
        echoed = self._generation.prompts[which] if prompt and body.echo else None
        choice: CompletionChoice = {
            "index": chunk.choice,
            "text": (echoed.text if echoed else "") + chunk.text,
            "logprobs": None,
            "finish_reason": chunk.finish,
        }
        if body.logprobs is not None:
            shown = 1 + len(body.logprob_token_ids) if body.logprob_token_ids else body.logprobs
            written = self._format.completion(chunk.logprobs, chunk.token_ids, offsets, shown)
            if echoed:
                entries = self._generation.prompt_logprobs[which]
                before = self._format.completion(entries, echoed.token_ids, self._format.offsets(0), body.logprobs)
                written = joined(before, written)
            choice["logprobs"] = written
        if chunk.finish is not None:
            choice["stop_reason"] = chunk.stop_reason
        if body.return_token_ids:
            choice["token_ids"] = chunk.token_ids
        if prompt:
            self._add_prompt(choice, which)
        return choice

    def _add_prompt(self, choice: CompletionChoice, which: int) -> None:
        prompt = self._generation.prompts[which]
        if self._body.return_token_ids:
            choice["prompt_token_ids"] = prompt.token_ids
        if self._body.return_prompt_text:
            choice["prompt_text"] = prompt.text
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = self._format.prompt(self._generation.prompt_logprobs[which])

    def _chunk(self, choice: CompletionChoice) -> Completion:
        reply = self._reply([choice])
        options = self._body.stream_options
        if options is not None and options.include_usage:
            reply["usage"] = self._generation.usage() if options.continuous_usage_stats else None
        return reply

    def _reply(self, choices: list[CompletionChoice]) -> Completion:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
            "system_fingerprint": None,
        }
