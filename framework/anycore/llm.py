"""`LLM`: a model in this process, for scripts and notebooks. The same engine that the server runs, without HTTP."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from anycore import plugins
from anycore.chats import Chats, GenerateOutput, ToolLike
from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.defaults import sampling_defaults
from anycore.engine.grammar import Grammars
from anycore.engine.launch import prepare
from anycore.engine.pooling import comparable, similarity
from anycore.engine.request import Beams, Delta, FinishReason, NewRequest, PoolingParams, SamplingParams
from anycore.engine.searches import Texts
from anycore.errors import AnycoreError, BadRequest, TaskNotSupported
from anycore.models.source import Progress
from anycore.ranks.leader import open_model
from anycore.text.detokenizer import Detokenizer
from anycore.text.grammar import vocabulary_of
from anycore.text.render import Rendered, Renderer
from anycore.text.replies.form import Formats
from anycore.toolbox import ToolConfig

Prompt = str | list[int]
Message = dict[str, Any]
Vector = NDArray[np.float32]

STEPS_AHEAD = 2
"""Requests for so many full steps are handed to the engine before each, so that it begins before all are tokenised."""


class LLM:
    """A model opened for one task.

    Args:
        model: folder, GGUF file, hub id, modelscope:ID or pkg:NAME.
        task: "auto", "generate", "embed" or "rerank".
        progress: called with (phase, fraction) while loading and over batches of work.
        settings: fields of `ModelConfig`.

    Raises:
        AnycoreError: the model cannot be served; the message says what to change.
    """

    def __init__(self, model: str, *, task: str = "auto", progress: Progress | None = None, **settings: Any) -> None:
        unknown = set(settings) - set(ModelConfig.__slots__)
        if unknown:
            raise TypeError(f"LLM has no settings {', '.join(sorted(unknown))}; see anycore.config.ModelConfig")
        config = ModelConfig(model=model, task=task, **settings)
        if gc.get_freeze_count():  # engines put what is alive beyond the collector: one that was dropped goes now
            gc.unfreeze()
            gc.collect()
        found = plugins.load()
        prepared = prepare(config, found, progress=progress)
        self.task = prepared.task
        self.spec = prepared.spec
        self.engine = open_model(prepared, progress)
        self.engine.grammars = Grammars(lambda: vocabulary_of(prepared.source, prepared.spec))
        longest = self.engine.limits.max_model_len
        self.renderer = Renderer(prepared.source, prepared.spec, longest, config.chat_template)
        self.engine.texts = Texts(lambda: self.renderer.tokenizer)
        tokenizer, templates = self.renderer.tokenizer, self.renderer.templates
        self.formats = Formats(tokenizer, templates, found.formats, config.tool_parser, config.reasoning_parser)
        file = prepared.source.read_object("generation_config.json")
        self._defaults = sampling_defaults(file, config.override_generation_config, config.generation_config)
        self._names = itertools.count()
        self._progress = progress

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for its `encode` and `decode`."""
        return self.renderer.tokenizer

    # --- generate -----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerateOutput]:
        """Complete prompts (texts or token ids), all together; one output each, in order."""
        self._need(Task.GENERATE)
        items = _listed(prompts)
        return self._complete([self.renderer.text(item) for item in items], self._sampling(params, len(items)))

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        width: int,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        n: int | None = None,
        **sampling: Any,
    ) -> list[GenerateOutput]:
        """Complete prompts with a beam search: the best `n` (default: all `width`) sequences of each, best first.

        Args:
            width, length_penalty, early_stopping: see `engine.request.Beams`.
            sampling: further fields of `SamplingParams`, such as `stop` or `logprobs`.
        """
        beams = Beams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
        return self.generate(prompts, SamplingParams(n=n or width, max_tokens=max_tokens, beams=beams, **sampling))

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[ToolLike] = (),
        tool_choice: str | dict[str, Any] | None = None,
        tool_config: ToolConfig = ToolConfig(),  # noqa: B008
        **options: Any,
    ) -> list[GenerateOutput]:
        """Answer one conversation or several. What a text means is in its `reply`.

        Args:
            tools: what the model may call: functions, which are run until it answers without calling any; or entries
                of the OpenAI API's `tools`, whose calls stand in the reply.
            tool_choice: as in the OpenAI API; of functions, for the first turn.
            tool_config: limits on running functions.
            options: `Renderer.chat`'s.
        """
        self._need(Task.GENERATE)
        several: Any = [messages] if messages and isinstance(messages[0], dict) else messages
        chats = Chats(self.renderer, self.formats, self._complete)
        return chats.answer(several, self._sampling(params, len(several)), tools, tool_choice, tool_config, options)

    def stream_chat(
        self, messages: list[Message], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]:
        """Answer one conversation piece by piece. Leaving the iterator early ends the request."""
        self._need(Task.GENERATE)
        rendered = self.renderer.chat(messages, **options)
        sampling = self._sampling(params, 1)[0]
        request = self._request(rendered, sampling=sampling)
        self.engine.add(request)
        text = Detokenizer(self.renderer.tokenizer, sampling, rendered.token_ids)
        try:
            for delta in self._deltas():
                piece = text.feed(delta.token_ids, delta.finish, delta.all_text)
                if piece.text:
                    yield piece.text
                if piece.stop is not None:
                    return
        finally:
            self.engine.abort(request.id)

    def _complete(
        self, rendered: list[Rendered], sampling: list[SamplingParams], kept: Sequence[frozenset[int]] = ()
    ) -> list[GenerateOutput]:
        """Generate, all together. `kept` are special tokens that stay in the text of each."""
        requests = [self._request(item, sampling=params) for item, params in zip(rendered, sampling, strict=True)]
        outputs: dict[str, list[GenerateOutput]] = {}
        texts: dict[str, list[Detokenizer]] = {}
        for i, request in enumerate(requests):
            assert request.sampling is not None
            stays = kept[i] if kept else frozenset()
            count = request.sampling.n
            outputs[request.id] = [GenerateOutput(request.token_ids) for _ in range(count)]
            texts[request.id] = [
                Detokenizer(self.renderer.tokenizer, request.sampling, request.token_ids, stays) for _ in range(count)
            ]
        for delta in self._run(requests, len(requests)):
            output = outputs[delta.id][delta.index]
            if output.finish_reason is None and self._extend(output, texts[delta.id][delta.index], delta):
                self.engine.abort(delta.id, delta.index)
        whole = [outputs[request.id] for request in requests]
        for first, *others in whole:
            first.others = others
        return [sequences[0] for sequences in whole]

    @staticmethod
    def _extend(output: GenerateOutput, text: Detokenizer, delta: Delta) -> bool:
        """Add a delta; return whether a stop string ended the sequence before the engine did."""
        piece = text.feed(delta.token_ids, delta.finish, delta.all_text)
        output.text += piece.text
        output.token_ids += delta.token_ids[: piece.tokens]
        output.cached_tokens = max(output.cached_tokens, delta.cached_tokens)
        output.prompt_logprobs = delta.prompt_logprobs or output.prompt_logprobs
        output.score = delta.score
        if delta.logprobs is not None:
            output.logprobs = (output.logprobs or []) + delta.logprobs[: piece.tokens]
        if piece.stop is not None:
            output.finish_reason, output.stop_reason = FinishReason.STOP.value, piece.stop
            return delta.finish is None
        if delta.finish is not None:
            output.finish_reason, output.stop_reason = delta.finish.value, delta.stop_reason
        return False

    def _sampling(self, params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        """One for each prompt. Without `params` the model's own defaults count, as in the server."""
        if params is None:
            params = msgspec.structs.replace(SamplingParams(), **self._defaults.values)
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise BadRequest(f"{len(params)} sampling parameters for {count} prompts", param="params")
        return list(params)

    # --- embed and rerank ---------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | bool | None = None,
    ) -> list[list[float]]:
        """Return one vector for each text, in order."""
        self._need(Task.EMBED)
        items = _listed(texts)
        rendered = self.renderer.each(lambda item: self.renderer.embedding_draft(item, prompt_name, truncate), items)
        params = PoolingParams(dimensions=dimensions, normalize=normalize)
        return [vector.tolist() for vector in self._vectors(rendered, len(items), params)]

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        truncate: int | bool | None = None,
        raw_scores: bool = False,
    ) -> list[tuple[int, float]]:
        """Return (index, score) of the documents, the most relevant first; equal scores keep their order."""
        self._need(Task.RERANK)
        scores = self.score(query, documents, instruction=instruction, truncate=truncate, raw_scores=raw_scores)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return [(i, scores[i]) for i in order[:top_n]]

    def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        instruction: str | None = None,
        truncate: int | bool | None = None,
        raw_scores: bool = False,
    ) -> list[float]:
        """Return the relevance of each document to the query, in order; of several queries each has its document."""
        self._need(Task.RERANK)
        queries = [query] * len(documents) if isinstance(query, str) else list(query)
        if len(queries) != len(documents):
            raise BadRequest(f"{len(queries)} queries for {len(documents)} documents", param="query")
        if self.spec.score is not None and self.spec.score.kind == "cosine":
            return self._cosines(queries, documents, instruction, truncate)
        if self.spec.score is not None and self.spec.score.labels > 2:
            raise TaskNotSupported(
                f"the model has {self.spec.score.labels} labels: a score is that of one, or the second of two",
                param="model",
            )
        pairs = list(zip(queries, documents, strict=True))
        rendered = self.renderer.each(lambda pair: self.renderer.pair_draft(*pair, instruction, truncate), pairs)
        deltas = self._pooled(rendered, len(pairs), PoolingParams(raw_scores=raw_scores))
        return [delta.scores[-1] for delta in deltas if delta.scores is not None]  # of two labels, "relevant"

    def _cosines(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str | None, truncate: int | bool | None
    ) -> list[float]:
        """Score pairs with a bi-encoder; a query that comes often is computed once."""
        different = list(dict.fromkeys(queries))
        asked = self.renderer.each(lambda text: self.renderer.query_draft(text, instruction, truncate), different)
        answers = self.renderer.each(lambda text: self.renderer.document_draft(text, truncate), documents)
        count = len(different) + len(documents)
        vectors = self._vectors(itertools.chain(asked, answers), count, comparable(self.spec))
        of_query = dict(zip(different, vectors, strict=False))
        pairs = zip(queries, vectors[len(different) :], strict=True)
        return [similarity(of_query[query], vector, self.spec) for query, vector in pairs]

    def _vectors(self, rendered: Iterable[Rendered], count: int, params: PoolingParams) -> list[Vector]:
        deltas = self._pooled(rendered, count, params)
        return [np.frombuffer(delta.vector, dtype="<f4") for delta in deltas if delta.vector is not None]

    def _pooled(self, rendered: Iterable[Rendered], count: int, params: PoolingParams) -> list[Delta]:
        names: list[str] = []

        def requests() -> Iterator[NewRequest]:
            for item in rendered:
                request = self._request(item, pooling=params)
                names.append(request.id)
                yield request

        found = {delta.id: delta for delta in self._run(requests(), count)}
        return [found[name] for name in names]

    # --- running ------------------------------------------------------------------------------------------------

    def _request(
        self, rendered: Rendered, *, sampling: SamplingParams | None = None, pooling: PoolingParams | None = None
    ) -> NewRequest:
        return NewRequest(
            id=f"llm-{next(self._names)}",
            task=self.task,
            token_ids=rendered.token_ids,
            token_types=rendered.token_types,
            sampling=sampling,
            pooling=pooling,
        )

    def _run(self, requests: Iterable[NewRequest], count: int) -> Iterator[Delta]:
        """Run requests together, admitting them as the queue allows; whatever happens, none stays behind.

        They may still be in the making: the device works on those that are there.
        """
        queue = iter(requests)
        upcoming = next(queue, None)
        added: list[str] = []
        finished = 0
        try:
            while upcoming is not None or self.engine.has_work():
                rows = STEPS_AHEAD * self.engine.limits.max_num_batched_tokens
                while upcoming is not None and rows > 0 and self.engine.has_room(upcoming):
                    self.engine.add(upcoming)
                    added.append(upcoming.id)
                    rows -= len(upcoming.token_ids)
                    upcoming = next(queue, None)
                for delta in self.engine.step():
                    _raise_for(delta)
                    finished += delta.finish is not None and delta.index == 0
                    yield delta
                if self._progress is not None:
                    self._progress("requests", finished / count)
        finally:
            for name in added:
                self.engine.abort(name)

    def _deltas(self) -> Iterator[Delta]:
        while self.engine.has_work():
            for delta in self.engine.step():
                _raise_for(delta)
                yield delta

    def _need(self, task: Task) -> None:
        if self.task is not task:
            raise TaskNotSupported(
                f"this model was opened to {self.task.value}, not to {task.value}: LLM(..., task={task.value!r})"
            )


def _raise_for(delta: Delta) -> None:
    if delta.finish is FinishReason.ERROR:
        raise AnycoreError(delta.error or "the request failed", code=delta.error_code)


def _listed(items: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list. A list of ints is one prompt of token ids."""
    if isinstance(items, str):
        return [items]
    if items and isinstance(items[0], int):
        return [list(items)]  # type: ignore[arg-type]
    return list(items)  # type: ignore[arg-type]
