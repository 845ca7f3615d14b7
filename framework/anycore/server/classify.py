"""How likely each label of a classifier is for a text: POST /classify and /v1/classify in vLLM's shape, /predict in
TEI's."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.engine.pooling import activated
from anycore.engine.request import Delta, PoolingParams
from anycore.errors import NonFiniteOutput, TaskNotSupported
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, offload, reply_id
from anycore.server.embeddings import names_of, rendered_of
from anycore.server.pooled import pooled, usage_of
from anycore.server.protocol import responses
from anycore.server.protocol_embed import Classification, Classified, ClassifyBody, PredictBody, Prediction
from anycore.server.scopes import INFER
from anycore.server.sse import json_response, unless_gone
from anycore.text.draft import Draft, Rendered

if TYPE_CHECKING:
    from anycore.server.state import ServedModel

LOGITS = PoolingParams(raw_scores=True)

router = APIRouter(tags=["classify"], route_class=JsonRoute, dependencies=[INFER])


@router.post("/classify", response_model=None, responses=responses(Classification))
@router.post("/v1/classify", response_model=None, responses=responses(Classification))
async def classify(request: Request, body: ClassifyBody, state: State, caller: Caller) -> Response:
    """Return what a classifier makes of each text on its own: a number a label, and the likeliest label."""
    model = admit(state, body, body.model, Task.RERANK)
    labels = labels_of(model)
    names = names_of(body.input, "input")
    rendered = await rendered_of(model, body.input, names, None, *body.cut())
    work = pooled(model, rendered, names, LOGITS, body, caller, state.config.log_prompts)
    answers = await unless_gone(request.receive, work)
    reply: Classification = {
        "id": f"classify-{reply_id(request, body.request_id)}",
        "object": "list",
        "created": int(time.time()),
        "model": body.model or model.names[0],
        "data": [
            _entry(i, numbers_of(model, answer, names[i], not body.use_activation), labels)
            for i, answer in enumerate(answers)
        ],
        "usage": usage_of(rendered, answers),
    }
    return json_response(reply)


@router.post("/predict", response_model=None, responses=responses(list[Prediction] | list[list[Prediction]]))
async def predict(request: Request, body: PredictBody, state: State, caller: Caller) -> Response:
    """Return the labels of a text or a pair of texts, the likeliest first, as text-embeddings-inference does; of a list
    of lists, a list for each."""
    model = admit(state, body, body.model, Task.RERANK)
    labels = labels_of(model)
    sequences = body.sequences
    names = [f"inputs[{i}]" if body.is_batch else "inputs" for i in range(len(sequences))]
    truncate, side = body.cut()

    def draft(item: tuple[list[str], str]) -> Draft | Rendered:
        texts, name = item
        if len(texts) == 1:
            return model.renderer.pooled.embedding(texts[0], None, truncate, side, param=name)
        return model.renderer.pooled.pair(texts[0], texts[1], None, truncate, side, param=name, query_param=name)

    items = list(zip(sequences, names, strict=True))
    size = sum(len(text) for texts in sequences for text in texts)
    rendered = await offload(size, lambda: list(model.renderer.each(draft, items)))
    work = pooled(model, rendered, names, LOGITS, body, caller, state.config.log_prompts)
    found: list[list[Prediction]] = []
    for answer, name in zip(await unless_gone(request.receive, work), names, strict=True):
        scores = zip(numbers_of(model, answer, name, body.raw_scores), labels, strict=True)
        found.append([{"score": score, "label": label} for score, label in sorted(scores, key=lambda pair: -pair[0])])
    return json_response(found if body.is_batch else found[0])


def labels_of(model: ServedModel) -> list[str]:
    """The names of a classifier's labels, from its files, in the order of their ids.

    Raises:
        TaskNotSupported: the model has none.
    """
    score = model.spec.score
    if score is None or score.kind != "classifier":
        raise TaskNotSupported(
            f"model {model.names[0]!r} has no labels: this route needs a sequence classifier", param="model"
        )
    names = (model.source.read_json("config.json") or {}).get("id2label") or {}
    return [str(names.get(str(i), f"LABEL_{i}")) for i in range(score.labels)]


def _entry(index: int, numbers: list[float], labels: list[str]) -> Classified:
    likeliest = max(range(len(labels)), key=lambda i: numbers[i])
    return {"index": index, "label": labels[likeliest], "probs": numbers, "num_classes": len(labels)}


def numbers_of(model: ServedModel, answer: Delta, name: str, raw: bool) -> list[float]:
    """A number a label, out of the logits that were asked for.

    Raises:
        NonFiniteOutput: one is NaN or infinity.
    """
    logits = answer.scores or []
    if not all(map(math.isfinite, logits)):
        raise NonFiniteOutput(f"{name}: the score is NaN or infinity", param=name)
    assert model.spec.score is not None
    return activated(np.array(logits), "identity" if raw else model.spec.score.of_labels)
