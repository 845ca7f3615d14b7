"""Text as it is generated: one stream of chunks that serves SSE and whole replies alike.

A chunk holds text together with exactly the tokens that it took, so no view of an answer runs ahead of another.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from anycore.contract.declare import Task
from anycore.engine.request import Delta, FinishReason, NewRequest, SamplingParams, TokenLogprob
from anycore.errors import ContextLengthExceeded
from anycore.server import choosing
from anycore.server.accounts import Tenant
from anycore.server.merge import merge
from anycore.server.protocol import Usage, usage
from anycore.server.protocol_replies import Finish
from anycore.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from anycore.server.door import Call
    from anycore.server.state import ServedModel

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One rendered prompt."""

    token_ids: list[int]
    text: str  # as sent where it was sent as text, else decoded


@dataclass(slots=True)
class Chunk:
    """A piece of one choice; `finish` stands alone in its last one."""

    choice: int  # prompt * n + sequence
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # one a token, if asked for
    finish: Finish | None = None
    stop_reason: int | str | None = None


REASONS: dict[FinishReason, Finish] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
}


class Generation:
    """All choices of one HTTP request: `n` for each prompt.

    Args:
        settings: the engine's view of a request, without its tokens and limits: priority, salt, tenant.
        caller: at whose expense, and until when.
        asked: whether sampling.max_tokens comes from the request; a default is cut to what fits.
        interval: tokens gathered before a chunk is handed on.
        loud: whether prompts and outputs go to the log.
        kept: special tokens that stay in the text, whatever the sampling says.
        best: of a prompt's sequences `whole` returns so many, by their log-probability; None: all of them.
    """

    def __init__(
        self,
        model: ServedModel,
        prompts: list[Prompt],
        sampling: SamplingParams,
        settings: NewRequest,
        caller: Call,
        *,
        asked: bool,
        interval: int = 1,
        loud: bool = False,
        kept: frozenset[int] = frozenset(),
        best: int | None = None,
    ) -> None:
        self.prompts = prompts
        self.count = len(prompts) * sampling.n
        self._n = sampling.n
        # Filled before a prompt's first chunk, if they were asked for.
        self.prompt_logprobs: list[list[TokenLogprob | None]] = [[] for _ in prompts]
        self._model = model
        self._caller = caller
        self._interval = interval
        self._loud = loud
        self._kept = kept
        self._best = sampling.n if best is None else best
        self._cached = [0] * len(prompts)
        self._generated = 0
        self._requests = [
            msgspec.structs.replace(
                settings,
                id=f"{settings.id}-{i}",
                token_ids=prompt.token_ids,
                sampling=_fit(sampling, len(prompt.token_ids), model.max_model_len, asked),
            )
            for i, prompt in enumerate(prompts)
        ]
        caller.account.take_prompt(sum(len(prompt.token_ids) for prompt in prompts))

    def usage(self) -> Usage:
        """Tokens so far; each prompt counts once, whatever `n`."""
        return usage(sum(len(p.token_ids) for p in self.prompts), self._generated, sum(self._cached))

    async def chunks(self) -> AsyncIterator[Chunk]:
        """Yield what is generated, choices interleaved. Leaving early ends the requests in the engine.

        Raises:
            AnycoreError: as the engine says.
        """
        sources = [self._one(i) for i in range(len(self._requests))]
        async for chunk in merge(sources, max(1, self._model.window // self._n)):
            if self._loud:
                log.info("%s choice %d: %r %s", self._requests[0].id, chunk.choice, chunk.text, chunk.finish or "")
            yield chunk

    async def whole(self) -> list[Chunk]:
        """Return every choice as one chunk, in order; where the best of more are returned, a prompt's best first."""
        found = [Chunk(i) for i in range(self.count)]
        texts: list[list[str]] = [[] for _ in found]
        async for chunk in self.chunks():
            choice = found[chunk.choice]
            texts[chunk.choice].append(chunk.text)
            choice.token_ids += chunk.token_ids
            choice.logprobs += chunk.logprobs
            choice.finish, choice.stop_reason = chunk.finish, chunk.stop_reason
        for choice, parts in zip(found, texts, strict=True):
            choice.text = "".join(parts)
        return choosing.best(found, self._best, self._n)

    async def _one(self, which: int) -> AsyncIterator[Chunk]:
        """Yield the chunks of one prompt's sequences."""
        request = self._caller.in_time(self._requests[which], self._model)
        sampling = request.sampling
        assert sampling is not None
        if self._loud:
            log.info("%s prompt: %r", request.id, self.prompts[which].text or request.token_ids)
        tokenizer = self._model.renderer.tokenizer
        texts = [Detokenizer(tokenizer, sampling, request.token_ids, self._kept) for _ in range(sampling.n)]
        pending = [Chunk(which * sampling.n + i) for i in range(sampling.n)]
        async with self._model.slot.submit(request) as stream:
            async for delta in stream:
                self._cached[which] = max(self._cached[which], delta.cached_tokens)
                if delta.prompt_logprobs is not None:
                    self.prompt_logprobs[which] = delta.prompt_logprobs
                self._caller.account.add_output(len(delta.token_ids))
                chunk = pending[delta.index]
                if self._grow(chunk, texts[delta.index], delta):
                    stream.stop(delta.index)
                if chunk.finish is None and (not chunk.text or len(chunk.token_ids) < self._interval):
                    continue
                if chunk.token_ids:
                    yield Chunk(chunk.choice, chunk.text, chunk.token_ids, chunk.logprobs)
                if chunk.finish is not None:
                    yield Chunk(chunk.choice, finish=chunk.finish, stop_reason=chunk.stop_reason)
                pending[delta.index] = Chunk(chunk.choice)

    def _grow(self, chunk: Chunk, text: Detokenizer, delta: Delta) -> bool:
        """Add a delta to a chunk; return whether a stop string ended the sequence before the engine did."""
        piece = text.feed(delta.token_ids, delta.finish, delta.all_text)
        chunk.text += piece.text
        chunk.token_ids += delta.token_ids[: piece.tokens]
        chunk.logprobs += (delta.logprobs or [])[: piece.tokens]
        self._generated += piece.tokens
        if piece.stop is not None:
            chunk.finish, chunk.stop_reason = "stop", piece.stop
            return delta.finish is None
        if delta.finish is not None:
            chunk.finish, chunk.stop_reason = REASONS[delta.finish], delta.stop_reason
        return False


def settings_of(
    kind: str,
    *,
    task: Task = Task.GENERATE,
    priority: int = 0,
    cache_salt: str | None = None,
    tenant: Tenant = Tenant(),  # noqa: B008
) -> NewRequest:
    """What all engine requests of one HTTP request share; `id` is unique whatever id the client chose."""
    new_id = f"{kind}-{uuid.uuid4().hex}"
    return NewRequest(
        id=new_id,
        task=task,
        token_ids=[],
        priority=priority,
        cache_salt=cache_salt,
        tenant=tenant.name,
        weight=tenant.weight,
    )


def _fit(sampling: SamplingParams, prompt: int, longest: int, asked: bool) -> SamplingParams:
    """Check that prompt and output fit the model's length.

    Raises:
        ContextLengthExceeded: with the numbers.
    """
    wanted = sampling.max_tokens
    if asked and wanted is not None and prompt + wanted > longest:
        raise ContextLengthExceeded(
            f"{prompt} prompt tokens and max_tokens {wanted} are {prompt + wanted}, "
            f"this model takes at most {longest} together",
            param="max_tokens",
        )
    if not asked and prompt >= longest:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens, this model takes at most {longest} with the answer", param="prompt"
        )
    if asked or wanted is None:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=min(wanted, longest - prompt))
