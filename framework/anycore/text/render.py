"""From what a request holds to the tokens the model reads: prompts, chats, texts to embed, pairs to score.

Lengths are checked here, and this is the only place that cuts: special tokens, queries and a template's end stay.
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
from anycore.text.draft import Draft, Rendered, tokenise
from anycore.text.messages import normalise
from anycore.text.prompts import document_prompt, prompt_of, query_prompt, refuse_instruction
from anycore.text.rerank_profiles import RerankProfile, profile_of
from anycore.text.template import ChatTemplates
from anycore.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from anycore.models.source import Source

__all__ = ["Rendered", "Renderer"]

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = min(8, CORES)
PIECE = 64
"""Inputs that a thread renders in one go; so few are not worth a thread."""

Item = TypeVar("Item")

log = logging.getLogger(__name__)


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
        self._templates = ChatTemplates(own, self.tokenizer.special_tokens, chat_template, allow_request_template)
        self._profile = profile_of(spec, self._templates.usual, self._render)
        self._warned_of_bos = False
        highest = max(self.tokenizer.vocab_size - 1, *self.tokenizer.added_ids.values(), -1)
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
        return self._one(self.embedding_draft(item, prompt_name, truncate, side, param=param))

    def embedding_draft(
        self,
        item: str | list[int],
        prompt_name: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        *,
        param: str = "input",
    ) -> Draft | Rendered:
        """As `embedding`, for `each`."""
        if not isinstance(item, str):
            if prompt_name is not None:
                raise BadRequest("a prompt can only be put before text, not before token ids", param="prompt_name")
            return self._fit_ids(self.check_ids(item, param), self._cutter(truncate, side, param))
        if not item:
            raise BadRequest(f"{param} must not be an empty string", param=param)
        return self._vector_draft(prompt_of(self.spec.pooling, prompt_name), item, self._cutter(truncate, side, param))

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
        query_param: str = "query",
    ) -> Rendered:
        """Render a query and a document for a model that reads both at once. Only the document is ever cut.

        With `apply_template=False` a yes/no reranker gets query + document as they are, already templated.

        Raises:
            BadRequest: the model takes no instruction, or nothing but cutting the query would help.
        """
        names = {"param": param, "query_param": query_param}
        return self._one(self.pair_draft(query, document, instruction, truncate, side, apply_template, **names))

    def pair_draft(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        apply_template: bool = True,
        *,
        param: str = "documents",
        query_param: str = "query",
    ) -> Draft:
        """As `pair`, for `each`."""
        cutter = Cutter(self.max_model_len, truncate, side, 0, param, query_param)
        if self._profile is not None:
            return self._ask(self._profile, query, document, instruction, apply_template, cutter)
        refuse_instruction(instruction)
        prompt = self.spec.score.prompt if self.spec.score is not None else ""
        return Draft(prompt + query, cutter, pair=document)

    def query(
        self, text: str, instruction: str | None = None, truncate: Truncate = None, side: str = "right"
    ) -> Rendered:
        """Render a query for a bi-encoder, whose score is the cosine of two vectors. Put `document` beside it."""
        return self._one(self.query_draft(text, instruction, truncate, side))

    def query_draft(
        self, text: str, instruction: str | None = None, truncate: Truncate = None, side: str = "right"
    ) -> Draft:
        """As `query`, for `each`."""
        return self._vector_draft(
            query_prompt(self.spec.pooling, instruction), text, self._cutter(truncate, side, "query")
        )

    def document(
        self, text: str, truncate: Truncate = None, side: str = "right", *, param: str = "documents"
    ) -> Rendered:
        """Render a document for a bi-encoder."""
        return self._one(self.document_draft(text, truncate, side, param=param))

    def document_draft(
        self, text: str, truncate: Truncate = None, side: str = "right", *, param: str = "documents"
    ) -> Draft:
        """As `document`, for `each`."""
        return self._vector_draft(document_prompt(self.spec.pooling), text, self._cutter(truncate, side, param))

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
    ) -> Draft:
        """Put a yes/no question: one text, of which only the document's tokens may be cut."""
        if not apply_template or profile.instruction is None:
            refuse_instruction(instruction)
        default = self.spec.score.prompt if self.spec.score is not None else ""
        head, suffix = profile.around(query, instruction or default)
        if apply_template:
            text = head + document + suffix
        else:
            head, text = query, query + document
        ends = len(text) - len(suffix) if text.endswith(suffix) else len(text)
        return Draft(text, cutter, add_special_tokens=False, within=(len(head), ends))

    def _vector_draft(self, prompt: str, text: str, cutter: Cutter) -> Draft:
        """A text to be made a vector of, after a prompt; for a model that reads messages, as one of the user's."""
        pooling = self.spec.pooling
        if pooling is None or pooling.chat is None:
            return Draft(prompt + text, cutter)
        system = [{"role": "system", "content": prompt}] if prompt else []
        whole = self._render([*system, {"role": "user", "content": text}], dict(pooling.chat))
        shown = text if text in whole else text.strip()  # templates may trim what they show
        start = whole.rfind(shown)
        within = (start, start + len(shown)) if start >= 0 else None
        return Draft(whole, cutter, add_special_tokens=False, within=within)

    def _render(self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None) -> str:
        """Render messages as sentence-transformers does: nothing is begun after them, unless a variable says so."""
        rest = dict(variables or {})
        begin = bool(rest.pop("add_generation_prompt", False))
        template = self._templates.choose(None, False)
        return template.render(messages, add_generation_prompt=begin, arguments=rest)

    def _complete(self, text: str, add_special_tokens: bool, cutter: Cutter) -> Rendered:
        rendered = self._one(Draft(text, cutter, add_special_tokens=add_special_tokens))
        if add_special_tokens:
            self._warn_of_bos(rendered.token_ids)
        return rendered

    def _one(self, draft: Draft | Rendered) -> Rendered:
        return tokenise([draft], self.tokenizer, self._rows)[0]

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
