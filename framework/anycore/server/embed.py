"""POST /v1/embed and /v2/embed, in Cohere's shapes, and /embed and /similarity, in those of
text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response
from numpy.typing import NDArray

from anycore.contract.declare import Task
from anycore.engine.request import PoolingParams
from anycore.errors import BadRequest
from anycore.models.spec import PoolingSpec
from anycore.server.bodies import JsonRoute
from anycore.server.door import Caller, State, admit, reply_id
from anycore.server.embeddings import dimensions_of, in_base64, names_of, rendered_of, vectors_of
from anycore.server.named import named_as
from anycore.server.protocol import responses
from anycore.server.protocol_embed import (
    CohereEmbedBody,
    CohereEmbeddings,
    SimilarityBody,
    TeiEmbedBody,
    VectorsByType,
)
from anycore.server.scopes import INFER
from anycore.server.sse import json_response
from anycore.text.prompts import DOCUMENT_PROMPTS, QUERY_PROMPTS

router = APIRouter(tags=["embed"], route_class=JsonRoute, dependencies=[INFER])

PROMPTS: dict[str | None, tuple[str, ...]] = {
    None: (),
    "search_query": QUERY_PROMPTS,
    "search_document": DOCUMENT_PROMPTS,
    "classification": ("classification",),
    "clustering": ("clustering",),
}
"""Cohere's kinds of input, and the names that models have for the prompt of each. Many models have none."""


@router.post("/v1/embed", response_model=None, responses=responses(CohereEmbeddings))
@router.post("/v2/embed", response_model=None, responses=responses(CohereEmbeddings))
async def cohere_embed(request: Request, body: CohereEmbedBody, state: State, caller: Caller) -> Response:
    """Return one vector a text, in each of `embedding_types`, as Cohere's API does; of /v1 without them, a list."""
    model = admit(state, body, body.model, Task.EMBED)
    field, texts = _texts(body)
    names = names_of(texts, field)
    tokens, side = body.cut()
    if body.max_tokens is not None:
        tokens = min(body.max_tokens, model.max_model_len)
    with named_as({"dimensions": "output_dimension", "prompt_name": "input_type"}):
        params = PoolingParams(dimensions=dimensions_of(model, body.output_dimension))
        prompt = prompt_name(body.input_type, model.spec.pooling)
        rendered = await rendered_of(model, texts, names, prompt, tokens, side)
    vectors, used = await vectors_of(request, state, caller, model, rendered, names, params, body)
    version = request.url.path[2]
    plain = version == "1" and "embedding_types" not in body.model_fields_set
    reply: CohereEmbeddings = {
        "id": f"embd-{reply_id(request, body.request_id)}",
        "response_type": "embeddings_floats" if plain else "embeddings_by_type",
        "embeddings": [each.tolist() for each in vectors] if plain else written(vectors, body.embedding_types),
        "texts": texts,
        "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": used["prompt_tokens"]}},
    }
    return json_response(reply)


@router.post("/embed", response_model=None, responses=responses(list[list[float]]))
async def tei_embed(request: Request, body: TeiEmbedBody, state: State, caller: Caller) -> Response:
    """Return a list of vectors and nothing else, as text-embeddings-inference does."""
    model = admit(state, body, body.model, Task.EMBED)
    names = names_of(body.inputs, "inputs")
    params = PoolingParams(dimensions=dimensions_of(model, body.dimensions), normalize=body.normalize)
    rendered = await rendered_of(model, body.inputs, names, body.prompt_name, *body.cut())
    vectors, _ = await vectors_of(request, state, caller, model, rendered, names, params, body)
    return json_response([vector.tolist() for vector in vectors])


@router.post("/similarity", response_model=None, responses=responses(list[float]))
async def similarity(request: Request, body: SimilarityBody, state: State, caller: Caller) -> Response:
    """Return the cosine of one text with each of others, as text-embeddings-inference does."""
    model = admit(state, body, body.model, Task.EMBED)
    texts = [body.inputs.source_sentence, *body.inputs.sentences]
    others = [f"inputs.sentences[{i}]" for i in range(len(body.inputs.sentences))]
    names = ["inputs.source_sentence", *others]
    rendered = await rendered_of(model, texts, names, None, *body.cut())
    params = PoolingParams(normalize=True)
    (source, *vectors), _ = await vectors_of(request, state, caller, model, rendered, names, params, body)
    wide = source.astype(np.float64)
    return json_response([float(wide @ vector) for vector in vectors])


def prompt_name(kind: str | None, pooling: PoolingSpec | None) -> str | None:
    """The model's prompt for a kind of input; None: its default one, if any. Other kinds are names of its prompts."""
    own = dict(pooling.prompts) if pooling is not None else {}
    if kind in own or kind not in PROMPTS:
        return kind
    return next((name for name in PROMPTS[kind] if name in own), None)


def written(vectors: list[NDArray[np.float32]], kinds: Sequence[str]) -> VectorsByType:
    """Write vectors in each way asked for. Bits are padded with 0 to whole bytes, the first number's bit is the
    highest."""
    found: VectorsByType = {}
    if "float" in kinds:
        found["float"] = [vector.tolist() for vector in vectors]
    if "base64" in kinds:
        found["base64"] = [in_base64(vector) for vector in vectors]
    packed = [np.packbits(vector > 0) for vector in vectors] if {"binary", "ubinary"} & set(kinds) else []
    if "binary" in kinds:
        found["binary"] = [(bits.astype(np.int16) - 128).tolist() for bits in packed]
    if "ubinary" in kinds:
        found["ubinary"] = [bits.tolist() for bits in packed]
    return found


def _texts(body: CohereEmbedBody) -> tuple[str, list[str]]:
    """The texts, under the name of the field that has them.

    Raises:
        BadRequest: both fields have some, or none has.
    """
    if (body.texts is None) == (body.inputs is None):
        raise BadRequest("send either texts or inputs", param="texts", code="missing_required_parameter")
    if body.texts is not None:
        return "texts", body.texts
    return "inputs", [each.content[0].text for each in body.inputs or ()]
