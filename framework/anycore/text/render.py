"""From what a request holds to the tokens the model reads: prompts, chats, and what `pooled` makes of other inputs.

Lengths are checked on the way, and nobody else cuts: special tokens, queries and a template's end stay.
Used by the server's front process and by `LLM`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from anycore.errors import BadRequest
from anycore.models.spec import ModelSpec
from anycore.text.cut import Cutter, Truncate
from anycore.text.draft import Draft, Rendered, fitted_ids, known_ids, tokenise
from anycore.text.messages import normalise
from anycore.text.pooled import PooledDrafts
from anycore.text.template import ChatTemplates
from anycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from anycore.models.source import Source

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = min(8, CORES)
PIECE = 64
"""Inputs that a thread renders in one go; so few are not worth a thread."""

Item = TypeVar("Item")

log = logging.getLogger(__name__)


class Renderer:
    """Turns the inputs of one model into tokens. Those of embed and rerank come from `pooled`, through `each`.

    Args:
        max_model_len: longest sequence in tokens.
        chat_template: file with a Jinja template to use instead of the model's.
        allow_request_template: whether a request may bring a template, which is a program.

    Raises:
        SourceError: there is no tokenizer, or it cannot be read.
        ConfigError: the tokenizer needs code from the checkpoint, or the template file cannot be used.
        Unsupported: a reranker for which no prompt is known, or a kind of tokenizer that is not.
    """

    def __init__(
        self,
        source: Source,
        spec: ModelSpec,
        max_model_len: int,
        chat_template: str | None = None,
        allow_request_template: bool = False,
    ) -> None:
        self.spec = spec
        self.max_model_len = max_model_len
        self.tokenizer = Tokenizer.from_source(source)
        own = self.tokenizer.chat_templates
        self._templates = ChatTemplates(own, self.tokenizer.special_tokens, chat_template, allow_request_template)
        self.pooled = PooledDrafts(spec, self._templates, max_model_len)
        self._warned_of_bos = False
        highest = max(self.tokenizer.vocab_size - 1, *self.tokenizer.added_ids.values(), -1)
        # Of the model's table; None: it has one for every token.
        self._rows = spec.vocab_size if highest >= spec.vocab_size else None
        if self._rows is not None:
            log.warning(
                "the tokenizer has tokens up to %d, the model rows for %d: texts with others are refused",
                highest,
                self._rows,
            )

    @property
    def templates(self) -> list[str]:
        """The chat templates in use, as text."""
        return self._templates.texts

    def text(
        self,
        prompt: str | list[int],
        add_special_tokens: bool = True,
        *,
        truncate: Truncate = None,
        side: str = "left",
        room: int | None = None,
        param: str = "prompt",
    ) -> Rendered:
        """Render a prompt to complete. Token ids are used as they are.

        Args:
            truncate: see `cut.Truncate`.
            side: where it is cut.
            room: tokens to leave for the output; None leaves the check of the length to the caller.

        Raises:
            BadRequest: it has no tokens, or some that the model lacks; or it is too long (`ContextLengthExceeded`).
        """
        cutter = Cutter(self.max_model_len, truncate, side, room, param)
        if not isinstance(prompt, str):
            return fitted_ids(known_ids(prompt, self.spec.vocab_size, param), cutter)
        return self._complete(prompt, add_special_tokens, cutter)

    def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        add_special_tokens: bool = False,
        truncate: Truncate = None,
        side: str = "left",
        room: int | None = None,
    ) -> Rendered:
        """Render a conversation. Blocks while the template runs; templates add the special tokens themselves.

        Raises:
            BadRequest: a message, an option or the template is at fault, or it is all too long; `param` names it.
        """
        if add_generation_prompt and continue_final_message:
            raise BadRequest(
                "add_generation_prompt begins a new message, continue_final_message goes on with the last: set one",
                param="continue_final_message",
            )
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        prompt = self._templates.choose(chat_template, bool(tools)).render(
            normalise(messages),
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            arguments=chat_template_kwargs,
        )
        cutter = Cutter(self.max_model_len, truncate, side, room, "messages")
        return self._complete(prompt, add_special_tokens, cutter)

    def each(self, draft: Callable[[Item], Draft | Rendered], items: Sequence[Item]) -> Iterator[Rendered]:
        """Render many inputs, in order: pieces of them each in one call of the tokenizer, outside of Python's lock.

        What one refuses is raised where the turn of its piece comes.
        """

        def render(piece: Sequence[Item]) -> list[Rendered]:
            return tokenise([draft(item) for item in piece], self.tokenizer, self._rows)

        if len(items) <= PIECE:
            yield from render(items)
            return
        pieces = [items[start : start + PIECE] for start in range(0, len(items), PIECE)]
        with ThreadPoolExecutor(min(THREADS, len(pieces)), "render") as pool:
            for rendered in pool.map(render, pieces):
                yield from rendered

    def _complete(self, text: str, add_special_tokens: bool, cutter: Cutter) -> Rendered:
        draft = Draft(text, cutter, add_special_tokens=add_special_tokens)
        (rendered,) = tokenise([draft], self.tokenizer, self._rows)
        if add_special_tokens:
            self._warn_of_bos(rendered.token_ids)
        return rendered

    def _warn_of_bos(self, ids: list[int]) -> None:
        """Warn, once a model, of a text that begins with the BOS its tokenizer adds anyway."""
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos] and not self._warned_of_bos:
            self._warned_of_bos = True
            log.warning(
                "a prompt begins with two BOS tokens: its text has one and the tokenizer adds one; leave it out of the "
                "text or send add_special_tokens false (said once)"
            )
