"""What a step's results add to the answers, and which of these they end."""

from __future__ import annotations

from anycore.contract.declare import Task
from anycore.engine.beams import Branch
from anycore.engine.grammar import GrammarState
from anycore.engine.launched import Results, Vector
from anycore.engine.live import Live, failed
from anycore.engine.pooling import finish_scores, finish_vector
from anycore.engine.request import Delta, FinishReason, PoolingParams
from anycore.engine.searches import Search
from anycore.engine.sequence import Request, Status
from anycore.errors import AnycoreError, BadRequest, InvalidGrammar, NonFiniteOutput
from anycore.models.spec import ModelSpec


class Committer:
    """Turns results into deltas, for one engine."""

    def __init__(self, live: Live, spec: ModelSpec, task: Task) -> None:
        self.live = live
        self.spec = spec
        self.task = task

    def take(self, results: Results) -> list[Delta]:
        """Take a step's results; return what they add. Rows of requests that ended while it was under way are cut."""
        for request, start, scores in results.prompt:
            del request.prompt_scores[start:]
            request.prompt_scores += scores
        deltas = self._generated(results)
        for request, vector, finite in results.pooled:
            if request.status is not Status.FINISHED:
                ending = self._pooled(request, vector) if finite else self.live.fail(request, _not_finite(request))
                deltas.append(ending)
        return deltas

    def _generated(self, results: Results) -> list[Delta]:
        """Append the sampled tokens and say which were the last. This loop runs for every token: it stays short."""
        deltas: list[Delta] = []
        finished = Status.FINISHED
        generated = 0
        rows = zip(results.sampled, results.tokens, results.finite, results.logprobs, strict=True)
        for request, token, finite, logprob in rows:
            if request.status is finished:
                continue
            if not finite:
                deltas.append(self.live.fail(request, _not_finite(request)))
                continue
            if request.search is not None:
                deltas += self._branched(request, request.search, results.branches[request])
                generated += 1
                continue
            tokens = request.tokens
            delta = Delta(id=request.id, index=request.index, token_ids=[token])
            deltas.append(delta)
            if len(tokens) == request.num_prompt and self._is_all(request, delta):
                continue
            tokens.append(token)
            generated += 1
            if logprob is not None:
                delta.logprobs = [logprob]
            if request.grammar is not None:
                end = self._leaves_grammar(request, request.grammar, token)
                if end is not None:
                    deltas.append(end)
                    continue
            if token in request.stop_ids and self._stops(request, delta, token):
                continue
            if len(tokens) >= request.max_total:
                self.live.finish(request, delta, FinishReason.LENGTH)
        self.live.stats.output_tokens += generated
        return deltas

    def _branched(self, request: Request, search: Search, branches: list[Branch]) -> list[Delta]:
        """Take what one beam's step brought. After the last one begin the next step, or return the answer."""
        if len(request.tokens) == request.num_prompt:
            self._is_all(request, search.told)
        self.live.leave(request)
        if not search.take(request, branches):
            return []
        if not search.done:
            self.live.requests[request.id] = search.requests()
            self.live.enqueue(self.live.requests[request.id])
            return []
        try:
            deltas = search.answer()
        except BadRequest as error:
            deltas = [failed(request.id, error)]
            self.live.stats.failed += 1
        self.live.searches.discard(request.id)
        self.live.stats.finished += len(deltas)
        return deltas

    def _is_all(self, request: Request, delta: Delta) -> bool:
        """Say what is known once a prompt is computed; return whether the request ends with it, wanting no token."""
        params = request.sampling
        delta.cached_tokens = request.cached
        delta.queue_seconds = request.timing.started - request.timing.arrived
        if request.index == 0:
            self.live.stats.prompt_tokens += request.num_prompt
            self.live.stats.cached_tokens += request.cached
            if params.prompt_logprobs is not None:
                delta.prompt_logprobs = [None, *request.prompt_scores]
        if params.max_tokens != 0:
            return False
        delta.token_ids = []
        self.live.finish(request, delta, FinishReason.LENGTH)
        return True

    def _stops(self, request: Request, delta: Delta, token: int) -> bool:
        """End a request at a stop id, unless it must go on."""
        params = request.sampling
        if len(request.tokens) - request.num_prompt <= params.min_tokens:
            return False
        is_eos = token in request.eos_ids and not params.ignore_eos
        delta.stop_reason = None if is_eos else token
        self.live.finish(request, delta, FinishReason.STOP)
        return True

    def _leaves_grammar(self, request: Request, state: GrammarState, token: int) -> Delta | None:
        """Return the end of a request whose output is whole, or that has no way on, now that its grammar has moved."""
        if not state.allowed:
            why = state.error or "bans, biases and filters leave no token that it allows"
            return self.live.fail(request, InvalidGrammar(f"the output cannot keep to its grammar: {why}"))
        if state.ended and token not in request.stop_ids:
            return self.live.finish(
                request, Delta(id=request.id, index=request.index, all_text=True), FinishReason.STOP
            )
        return None

    def _pooled(self, request: Request, vector: Vector) -> Delta:
        params = request.new.pooling or PoolingParams()
        queued = request.timing.started - request.timing.arrived
        delta = Delta(id=request.id, cached_tokens=request.cached, queue_seconds=queued)
        if self.task is Task.RERANK and self.spec.score is not None and self.spec.score.kind != "cosine":
            delta.scores = finish_scores(vector, self.spec, params)
        else:
            delta.vector = finish_vector(vector, self.spec, params).tobytes()
        self.live.stats.prompt_tokens += request.num_prompt
        self.live.stats.cached_tokens += request.cached
        return self.live.finish(request, delta, FinishReason.STOP)


def _not_finite(request: Request) -> AnycoreError:
    """What to tell of a row without a number; where a grammar meets bans of the caller's, these leave nothing."""
    sampling = request.new.sampling
    if request.grammar is not None and sampling is not None:
        bans = {
            "allowed_token_ids": sampling.allowed_token_ids is not None,
            "bad_words": bool(sampling.bad_words_ids),
            "min_tokens": request.num_output <= sampling.min_tokens,
        }
        for name, given in bans.items():
            if given:
                return InvalidGrammar(f"the grammar and {name} together leave no token", param=name)
    return NonFiniteOutput("the model's output holds NaN or infinity")
