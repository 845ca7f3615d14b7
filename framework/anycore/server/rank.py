"""Scores of query and document pairs, whatever kind of model gives them; rerank and score both use it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from anycore.engine.pooling import comparable, similarity
from anycore.engine.request import Delta, PoolingParams
from anycore.errors import BadRequest, NonFiniteOutput, TaskNotSupported
from anycore.server.door import Call, offload
from anycore.server.pooled import pooled, usage_of, vector_of
from anycore.server.protocol_pool import PoolUsage, RankBody
from anycore.text.draft import Draft, Rendered

if TYPE_CHECKING:
    from anycore.models.spec import ModelSpec
    from anycore.server.state import ServedModel

Pairs = list[tuple[int, int]]  # positions of a query and of a document
Names = tuple[list[str], list[str]]  # what errors call each query and each document


async def scores_of(
    model: ServedModel,
    queries: list[str],
    documents: list[str],
    pairs: Pairs,
    names: Names,
    body: RankBody,
    caller: Call,
    loud: bool,
) -> tuple[list[float], PoolUsage]:
    """Score each pair: one forward pass a pair, or for a bi-encoder one a text and then cosines.

    Raises:
        TaskNotSupported: the model has more labels than one that means relevant, and one that does not.
        NonFiniteOutput: naming the document.
    """
    size = sum(map(len, queries)) + sum(map(len, documents))
    spec = model.spec.score
    if spec is not None and spec.kind == "cosine":
        if not body.apply_template:
            raise BadRequest("this model has no template: leave apply_template out", param="apply_template")
        rendered = await offload(size, _render_apart, model, queries, documents, names, body)
        params = comparable(model.spec)
        answers = await pooled(model, rendered, names[0] + names[1], params, body, caller, loud)
        scores = _similarities(model.spec, answers, pairs, names)
    else:
        if spec is not None and spec.kind == "classifier" and spec.labels > 2:
            raise TaskNotSupported(
                f"model {model.names[0]!r} has {spec.labels} labels: a score is that of one, or the second of two; "
                "/classify and /predict answer with all",
                param="model",
            )
        rendered = await offload(size, _render_pairs, model, queries, documents, pairs, names, body)
        params = PoolingParams(raw_scores=body.raw_scores)
        answers = await pooled(model, rendered, [names[1][d] for _, d in pairs], params, body, caller, loud)
        scores = [_relevance(answer, names[1][d]) for answer, (_, d) in zip(answers, pairs, strict=True)]
    return scores, usage_of(rendered, answers)


def _render_pairs(
    model: ServedModel, queries: list[str], documents: list[str], pairs: Pairs, names: Names, body: RankBody
) -> list[Rendered]:
    truncate, side = body.cut()
    shortened = [_shorten(model, text, side, body) for text in documents]

    def draft(place: tuple[int, int]) -> Draft:
        q, d = place
        return model.renderer.pooled.pair(
            queries[q],
            shortened[d][0],
            body.instruction,
            truncate,
            side,
            body.apply_template,
            param=names[1][d],
            query_param=names[0][q],
        )

    rendered = model.renderer.each(draft, pairs)
    return [_cut_before(one, shortened[d][1]) for one, (_, d) in zip(rendered, pairs, strict=True)]


def _render_apart(
    model: ServedModel, queries: list[str], documents: list[str], names: Names, body: RankBody
) -> list[Rendered]:
    """Render queries and documents on their own, each with its prompt."""
    truncate, side = body.cut()
    renderer = model.renderer
    asked = renderer.each(lambda text: renderer.pooled.query(text, body.instruction, truncate, side), queries)
    shortened = [_shorten(model, text, side, body) for text in documents]
    named = [(text, name) for (text, _), name in zip(shortened, names[1], strict=True)]
    answers = renderer.each(lambda item: renderer.pooled.document(item[0], truncate, side, param=item[1]), named)
    return [*asked, *(_cut_before(one, cut) for one, (_, cut) in zip(answers, shortened, strict=True))]


def _cut_before(rendered: Rendered, was_cut: bool) -> Rendered:
    """The same, told as cut where a document had been shortened."""
    return replace(rendered, truncated=True) if was_cut else rendered


def _shorten(model: ServedModel, text: str, side: str, body: RankBody) -> tuple[str, bool]:
    """Cut a document to max_tokens_per_doc tokens of its own; return it and whether it was cut."""
    limit = body.max_tokens_per_doc
    if limit is None or len(text) <= limit:
        return text, False
    offsets = model.renderer.tokenizer.located(text, add_special_tokens=False).offsets
    if len(offsets) <= limit:
        return text, False
    return (text[offsets[-limit][0] :] if side == "left" else text[: offsets[limit - 1][1]]), True


def _similarities(spec: ModelSpec, answers: list[Delta], pairs: Pairs, names: Names) -> list[float]:
    labels = names[0] + names[1]
    vectors = [vector_of(answer, name) for answer, name in zip(answers, labels, strict=True)]
    count = len(names[0])
    return [similarity(vectors[q], vectors[count + d], spec) for q, d in pairs]


def _relevance(answer: Delta, name: str) -> float:
    """Return the score of a pair; of two labels it is the second one's, "relevant"."""
    assert answer.scores
    if not math.isfinite(answer.scores[-1]):
        raise NonFiniteOutput(f"{name}: the score is NaN or infinity", param=name)
    return answer.scores[-1]
