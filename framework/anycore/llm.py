"""`LLM`: a model in this process, for scripts and notebooks. The same engine that the server runs, without HTTP."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from anycore import plugins
from anycore.chats import Chats, GenerateOutput, ToolLike
from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.callers import Caller, Callers
from anycore.engine.defaults import sampling_defaults
from anycore.engine.grammar import Grammars
from anycore.engine.launch import prepare
from anycore.engine.pooling import comparable, similarity
from anycore.engine.request import Beams, Delta, FinishReason, NewRequest, PoolingParams, SamplingParams
from anycore.engine.searches import Texts
from anycore.errors import AnycoreError, BadRequest, ContextLengthExceeded, TaskNotSupported
from anycore.models.source import Progress
from anycore.ranks.engines import LeadingEngine
from anycore.ranks.leader import open_model
from anycore.text.detokenizer import Detokenizer
from anycore.text.draft import Rendered
from anycore.text.given import Prompt, listed, prompts_of, text_of, texts_of
from anycore.text.grammar import vocabulary_of
from anycore.text.render import Renderer
from anycore.text.replies.form import Formats
from anycore.toolbox import ToolConfig

Message = dict[str, Any]
Vector = NDArray[np.float32]

STEPS_AHEAD = 2
"""Requests for so many full steps are handed to the engine before each, so that it begins before all are tokenised."""


class LLM:
    """A model opened for one task. Several threads may use it: what they ask for is computed together.

    As a context it is closed at the end.

    Args:
        model: folder, GGUF file, hub id, modelscope:ID or pkg:NAME.
        task: "auto", "generate", "embed" or "rerank".
        progress: called with (phase, fraction) while loading and over batches of work.
        settings: fields of `ModelConfig`.

    Raises:
        AnycoreError: the model cannot be served; the message says what to change.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, task: str = "auto", progress: Progress | None = None, **settings: Any
    ) -> None:
        unknown = set(settings) - set(ModelConfig.__slots__)
        if unknown:
            raise TypeError(f"LLM has no settings {', '.join(sorted(unknown))}; see anycore.config.ModelConfig")
        config = ModelConfig(model=os.fspath(model), task=task, **settings)
        if gc.get_freeze_count():  # engines put what is alive beyond the collector: one that was dropped goes now
            gc.unfreeze()
            gc.collect()
        found = plugins.load()
        prepared = prepare(config, found, progress=progress)
        self.task = prepared.task
        self.spec = prepared.spec
        self.engine = open_model(prepared, progress)
        self._callers = Callers(self.engine)
        self._closed = False
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

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the model's memory back now. Nothing can be asked of it any more; to close it again is fine."""
        if self._closed:
            return
        self._closed = True
        if isinstance(self.engine, LeadingEngine):
            self.engine.close()
        del self.engine, self._callers
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        gc.collect()
        if frozen:  # for other models of this process
            gc.freeze()

    @property
    def tokenizer(self) -> Any:
        """The tokenizer, for its `encode` and `decode`."""
        return self.renderer.tokenizer

    # --- generate -----------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Iterable[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerateOutput]:
        """Complete prompts (texts or token ids, also as arrays), all together; one output each, in order.

        Raises:
            BadRequest: one of them is wrong; `param` names it, and nothing was computed.
        """
        self._need(Task.GENERATE)
        items = prompts_of(prompts, "prompts")
        sampling = self._sampling(params, len(items))
        names = _names("prompt", len(items))
        rendered = [self.renderer.text(item, param=name) for item, name in zip(items, names, strict=True)]
        return self._complete(rendered, sampling)

    def beam_search(
        self,
        prompts: Prompt | Iterable[Prompt],
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
        several: Any = listed(messages, "messages")
        several = [several] if several and isinstance(several[0], dict) else several
        chats = Chats(self.renderer, self.formats, self._complete)
        return chats.answer(several, self._sampling(params, len(several)), tools, tool_choice, tool_config, options)

    def stream_chat(
        self, messages: list[Message], params: SamplingParams | None = None, **options: Any
    ) -> Iterator[str]:
        """Answer one conversation piece by piece. Leaving the iterator early ends the request."""
        self._need(Task.GENERATE)
        sampling = self._sampling(params, 1)[0]
        if sampling.n != 1:
            raise BadRequest(f"a stream has one sequence, and n is {sampling.n}: chat returns several", param="n")
        rendered = self.renderer.chat(messages, **options)
        text = Detokenizer(self.renderer.tokenizer, sampling, rendered.token_ids)
        with Caller(self._callers) as caller:
            caller.add(self._request(rendered, sampling=sampling))
            while caller.open:
                for delta in caller.step():
                    _raise_for(delta)
                    piece = text.feed(delta.token_ids, delta.finish, delta.all_text)
                    if piece.text:
                        yield piece.text
                    if piece.stop is not None:
                        return

    def _complete(
        self, rendered: list[Rendered], sampling: list[SamplingParams], kept: Sequence[frozenset[int]] = ()
    ) -> list[GenerateOutput]:
        """Generate, all together. `kept` are special tokens that stay in the text of each."""
        self._check_first(rendered, sampling)
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
        with Caller(self._callers) as caller:
            for delta in self._run(caller, requests, len(requests)):
                output = outputs[delta.id][delta.index]
                if output.finish_reason is None and self._extend(output, texts[delta.id][delta.index], delta):
                    caller.end(delta.id, delta.index)
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
        found = listed(params, "params")
        for i, item in enumerate(found):
            if not isinstance(item, SamplingParams):
                raise BadRequest(f"params[{i}] must be SamplingParams, not {type(item).__name__}", param="params")
        if len(found) != count:
            raise BadRequest(f"{len(found)} sampling parameters for {count} prompts", param="params")
        return found

    def _check_first(self, rendered: list[Rendered], sampling: list[SamplingParams]) -> None:
        """Refuse what the engine would refuse of one prompt before the others have been computed for nothing."""
        if len(rendered) == 1:
            return
        longest = self.engine.limits.max_model_len
        for i, (item, params) in enumerate(zip(rendered, sampling, strict=True)):
            length, asked = len(item.token_ids), params.max_tokens or 0
            if length + asked > longest:
                raise ContextLengthExceeded(
                    f"prompt[{i}] has {length} tokens, and max_tokens is {asked}: this model takes at most {longest} "
                    "together",
                    param=f"prompt[{i}]",
                )
        for different in {id(params): params for params in sampling}.values():
            different.check_vocabulary(self.spec.vocab_size)

    # --- embed and rerank ---------------------------------------------------------------------------------------

    def embed(
        self,
        texts: Prompt | Iterable[Prompt],
        *,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate: int | bool | None = None,
    ) -> list[list[float]]:
        """Return one vector for each text, in order."""
        self._need(Task.EMBED)
        items = prompts_of(texts, "texts")
        named = list(zip(items, _names("input", len(items)), strict=True))
        rendered = self.renderer.each(
            lambda item: self.renderer.pooled.embedding(item[0], prompt_name, truncate, param=item[1]), named
        )
        params = PoolingParams(dimensions=dimensions, normalize=normalize)
        return [vector.tolist() for vector in self._vectors(rendered, len(items), params)]

    def rerank(
        self,
        query: str,
        documents: str | Iterable[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
        truncate: int | bool | None = None,
        raw_scores: bool = False,
    ) -> list[tuple[int, float]]:
        """Return (index, score) of the documents, the `top_n` most relevant first; equal scores keep their order."""
        self._need(Task.RERANK)
        text_of(query, "query")
        if top_n is not None and (not isinstance(top_n, int) or top_n < 1):
            raise BadRequest(f"top_n must be a whole number of at least 1, not {top_n!r}", param="top_n")
        scores = self.score(query, documents, instruction=instruction, truncate=truncate, raw_scores=raw_scores)
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return [(i, scores[i]) for i in order[:top_n]]

    def score(
        self,
        query: str | Iterable[str],
        documents: str | Iterable[str],
        *,
        instruction: str | None = None,
        truncate: int | bool | None = None,
        raw_scores: bool = False,
    ) -> list[float]:
        """Return the relevance of each document to the query, in order; of several queries each has its document."""
        self._need(Task.RERANK)
        texts = texts_of(documents, "documents")
        queries = [query] * len(texts) if isinstance(query, str) else texts_of(query, "query")
        if len(queries) != len(texts):
            raise BadRequest(f"{len(queries)} queries for {len(texts)} documents", param="query")
        if self.spec.score is not None and self.spec.score.kind == "cosine":
            return self._cosines(queries, texts, instruction, truncate)
        if self.spec.score is not None and self.spec.score.labels > 2:
            raise TaskNotSupported(
                f"the model has {self.spec.score.labels} labels: a score is that of one, or the second of two",
                param="model",
            )
        pairs = list(zip(queries, texts, _names("documents", len(texts)), strict=True))
        rendered = self.renderer.each(
            lambda pair: self.renderer.pooled.pair(pair[0], pair[1], instruction, truncate, param=pair[2]), pairs
        )
        deltas = self._pooled(rendered, len(pairs), PoolingParams(raw_scores=raw_scores))
        return [delta.scores[-1] for delta in deltas if delta.scores is not None]  # of two labels, "relevant"

    def _cosines(
        self, queries: Sequence[str], documents: Sequence[str], instruction: str | None, truncate: int | bool | None
    ) -> list[float]:
        """Score pairs with a bi-encoder; a query that comes often is computed once."""
        different = list(dict.fromkeys(queries))
        asked = self.renderer.each(lambda text: self.renderer.pooled.query(text, instruction, truncate), different)
        named = list(zip(documents, _names("documents", len(documents)), strict=True))
        answers = self.renderer.each(
            lambda item: self.renderer.pooled.document(item[0], truncate, param=item[1]), named
        )
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

        with Caller(self._callers) as caller:
            found = {delta.id: delta for delta in self._run(caller, requests(), count)}
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

    def _run(self, caller: Caller, requests: Iterable[NewRequest], count: int) -> Iterator[Delta]:
        """Run requests together, admitting them as the queue allows.

        They may still be in the making: the device works on those that are there.
        """
        queue = iter(requests)
        upcoming = next(queue, None)
        finished = 0
        while upcoming is not None or caller.open:
            rows = STEPS_AHEAD * self.engine.limits.max_num_batched_tokens
            while upcoming is not None and rows > 0 and caller.add(upcoming, wait=True):
                rows -= len(upcoming.token_ids)
                upcoming = next(queue, None)
            for delta in caller.step():
                _raise_for(delta)
                finished += delta.finish is not None and delta.index == 0
                yield delta
            if self._progress is not None:
                self._progress("requests", finished / count)

    def _need(self, task: Task) -> None:
        if self._closed:
            raise BadRequest("this model was closed: open it again")
        if self.task is not task:
            raise TaskNotSupported(
                f"this model was opened to {self.task.value}, not to {task.value}: LLM(..., task={task.value!r})"
            )


def _raise_for(delta: Delta) -> None:
    if delta.finish is FinishReason.ERROR:
        raise AnycoreError(delta.error or "the request failed", code=delta.error_code)


def _names(field: str, count: int) -> list[str]:
    """What each input is called in messages: by its number, if there are several."""
    return [field] if count == 1 else [f"{field}[{i}]" for i in range(count)]
