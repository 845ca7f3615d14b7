"""From what a request holds to the tokens the model reads: prompts, chats, texts to embed, pairs to score.

Lengths are checked here, and this is the only place that cuts: special tokens, queries and a template's end stay.
Used by the server's front process and by `LLM`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from anycore.errors import BadRequest
from anycore.models.spec import ModelSpec
from anycore.text.cut import Cutter, Truncate, span_between, span_of
from anycore.text.messages import normalise
from anycore.text.prompts import document_prompt, prompt_of, query_prompt, refuse_instruction
from anycore.text.rerank_profiles import RerankProfile, profile_of
from anycore.text.template import ChatTemplates
from anycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Encoding

    from anycore.models.source import Source

THREADS = min(8, os.cpu_count() or 1)
PIECE = 16
"""Inputs that a thread renders in one go; so few are not worth a thread."""

Item = TypeVar("Item")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rendered:
    """Tokens ready for the engine."""

    token_ids: list[int]
    token_types: list[int] | None = None  # segment ids, where the model reads them
    truncated: bool = False
    text: str = ""  # what was tokenised; empty for token ids


class Renderer:
    """Turns the inputs of one model into tokens.

    Args:
        max_model_len: longest sequence in tokens.
        chat_template: file with a Jinja template to use instead of the model's.
        allow_request_template: whether a request may bring a template, which is a program.

    Raises:
        ConfigError: the template file cannot be used.
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
        self._profile = profile_of(spec, own.values())
        self._templates = ChatTemplates(own, self.tokenizer.special_tokens, chat_template, allow_request_template)
        self._warned_of_bos = False

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
        """
        cutter = self._cutter(truncate, side, param, room)
        if not isinstance(prompt, str):
            return self._fit_ids(self.check_ids(prompt, param), cutter)
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
            BadRequest: a message, an option or the template is at fault; `param` names it.
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
        return self._complete(prompt, add_special_tokens, self._cutter(truncate, side, "messages", room))

    def embedding(
        self,
        item: str | list[int],
        prompt_name: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        *,
        param: str = "input",
    ) -> Rendered:
        """Render a text to embed: the named prompt, or the model's default one, is put before it.

        Token ids are used as they are: no prompt, no special tokens.
        """
        if not isinstance(item, str):
            if prompt_name is not None:
                raise BadRequest("a prompt can only be put before text, not before token ids", param="prompt_name")
            return self._fit_ids(self.check_ids(item, param), self._cutter(truncate, side, param))
        if not item:
            raise BadRequest(f"{param} must not be an empty string", param=param)
        return self._one(prompt_of(self.spec.pooling, prompt_name) + item, self._cutter(truncate, side, param))

    def pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        apply_template: bool = True,
        *,
        param: str = "documents",
    ) -> Rendered:
        """Render a query and a document for a model that reads both at once. Only the document is ever cut.

        With `apply_template=False` a yes/no reranker gets query + document as they are, already templated.

        Raises:
            BadRequest: the model takes no instruction, or nothing but cutting the query would help.
        """
        cutter = self._cutter(truncate, side, param)
        if self._profile is not None:
            return self._ask(self._profile, query, document, instruction, apply_template, cutter)
        refuse_instruction(instruction)
        encoding = self._encode(query, param, document)
        return self._fit(encoding, query + document, cutter, span_of(encoding, 1))

    def query(
        self, text: str, instruction: str | None = None, truncate: Truncate = None, side: str = "right"
    ) -> Rendered:
        """Render a query for a bi-encoder, whose score is the cosine of two vectors. Put `document` beside it."""
        prompt = query_prompt(self.spec.pooling, instruction)
        return self._one(prompt + text, self._cutter(truncate, side, "query"))

    def document(
        self, text: str, truncate: Truncate = None, side: str = "right", *, param: str = "documents"
    ) -> Rendered:
        """Render a document for a bi-encoder."""
        return self._one(document_prompt(self.spec.pooling) + text, self._cutter(truncate, side, param))

    def each(self, render: Callable[[Item], Rendered], items: Sequence[Item]) -> Iterator[Rendered]:
        """Render many inputs, in order, on several threads: tokenizers work outside of Python's lock.

        What one refuses is raised where its turn comes.
        """
        if len(items) <= PIECE:
            yield from map(render, items)
            return
        pieces = [items[start : start + PIECE] for start in range(0, len(items), PIECE)]
        with ThreadPoolExecutor(min(THREADS, len(pieces)), "render") as pool:
            for rendered in pool.map(lambda piece: [render(item) for item in piece], pieces):
                yield from rendered

    def check_ids(self, ids: Sequence[Any], param: str) -> list[int]:
        """Return token ids of the client if the model has them.

        Raises:
            BadRequest: naming the place.
        """
        if not isinstance(ids, (list, tuple)) or not ids:
            raise BadRequest(f"{param} must be text or a list of at least one token id", param=param)
        for i, token in enumerate(ids):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.spec.vocab_size:
                raise BadRequest(
                    f"{param}: {str(token)[:40]!r} at position {i} is not a token id of this model "
                    f"(0 to {self.spec.vocab_size - 1})",
                    param=param,
                )
        return list(ids)

    def _ask(
        self,
        profile: RerankProfile,
        query: str,
        document: str,
        instruction: str | None,
        apply_template: bool,
        cutter: Cutter,
    ) -> Rendered:
        """Render a yes/no question: one text, of which only the document's tokens may be cut."""
        if apply_template:
            head = profile.head.format(instruction=instruction or profile.instruction, query=query)
            text = head + document + profile.suffix
        else:
            refuse_instruction(instruction)
            head, text = query, query + document
        encoding = self._encode(text, cutter.param, add_special_tokens=False, offsets=True)
        ends = len(text) - len(profile.suffix) if text.endswith(profile.suffix) else len(text)
        return self._fit(encoding, text, cutter, span_between(encoding, len(head), ends))

    def _complete(self, text: str, add_special_tokens: bool, cutter: Cutter) -> Rendered:
        encoding = self._encode(text, cutter.param, add_special_tokens=add_special_tokens)
        if add_special_tokens:
            self._warn_of_bos(encoding.ids)
        return self._fit(encoding, text, cutter)

    def _one(self, text: str, cutter: Cutter) -> Rendered:
        return self._fit(self._encode(text, cutter.param), text, cutter)

    def _encode(
        self, text: str, param: str, pair: str | None = None, add_special_tokens: bool = True, offsets: bool = False
    ) -> Encoding:
        try:
            return self.tokenizer.encoding(text, pair, add_special_tokens, offsets)
        except BadRequest as error:
            raise BadRequest(f"{param}: {error.message}", param=param) from None

    def _fit(self, encoding: Encoding, text: str, cutter: Cutter, span: tuple[int, int] | None = None) -> Rendered:
        """Cut an encoding to its limit. `span` is the run of tokens that may be cut: by default the text's own."""
        ids: list[int] = encoding.ids
        types: list[int] | None = encoding.type_ids if self.tokenizer.token_types else None
        if not ids:
            raise BadRequest(f"{cutter.param} gives no tokens", param=cutter.param)
        cut = cutter.cut(len(ids), *(span or span_of(encoding, 0)))
        if cut is None:
            return Rendered(ids, types, False, text)
        del ids[cut]
        if types is not None:
            del types[cut]
        return Rendered(ids, types, True, text)

    def _fit_ids(self, ids: list[int], cutter: Cutter) -> Rendered:
        cut = cutter.cut(len(ids), 0, len(ids))
        if cut is not None:
            del ids[cut]
        return Rendered(ids, truncated=cut is not None)

    def _cutter(self, truncate: Truncate, side: str, param: str, room: int | None = 0) -> Cutter:
        return Cutter(self.max_model_len, truncate, side, room, param)

    def _warn_of_bos(self, ids: list[int]) -> None:
        """Warn, once a model, of a text that begins with the BOS its tokenizer adds anyway."""
        bos = self.tokenizer.bos_id
        if bos is not None and ids[:2] == [bos, bos] and not self._warned_of_bos:
            self._warned_of_bos = True
            log.warning(
                "a prompt begins with two BOS tokens: its text has one and the tokenizer adds one; leave it out of the "
                "text or send add_special_tokens false (said once)"
            )
