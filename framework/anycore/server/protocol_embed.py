"""Bodies and replies of embedding and classification as other servers have them: Cohere's, TEI's and vLLM's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.json_schema import WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from anycore.errors import BadRequest
from anycore.server.protocol import MAX_INPUTS, MAX_TOKEN_ID, Body, input_schema, inputs
from anycore.server.protocol_pool import PoolBody, PoolUsage, TeiBody

VectorType = Literal["float", "base64", "binary", "ubinary"]
Inputs = list[str | list[int]]
Vectors = list[list[float]]


class TextPart(Body):
    type: Literal["text"]
    text: Annotated[str, Field(min_length=1)]


class EmbedInput(Body):
    content: list[TextPart] = Field(min_length=1, max_length=1)


class CohereEmbedBody(PoolBody):
    """Texts are in `texts`, or each as the one text part of one of `inputs`."""

    texts: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_INPUTS)
    inputs: list[EmbedInput] | None = Field(None, min_length=1, max_length=MAX_INPUTS)
    input_type: str | None = Field(
        None,
        description="search_query and search_document put the model's prompt for it before each text, classification, "
        "clustering and the names of the model's own prompts the prompt of that name",
    )
    embedding_types: list[VectorType] = Field(["float"], min_length=1)
    output_dimension: int | None = Field(None, ge=1, le=2**16)
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description="texts are cut to so many tokens")
    truncate: Annotated[str, BeforeValidator(lambda value: value.upper() if isinstance(value, str) else value)] = Field(
        "END", pattern="^(NONE|START|END)$", description="the side that is cut of texts that are too long; NONE: none"
    )

    def cut(self) -> tuple[int | None, str]:
        tokens, side = super().cut()
        if self.max_tokens is None:
            return tokens, side
        if self.truncate == "NONE" or self.truncate_prompt_tokens is not None:
            other = "truncate NONE" if self.truncate == "NONE" else "truncate_prompt_tokens"
            raise BadRequest(f"max_tokens says what texts are cut to, as {other} does: send one", param="max_tokens")
        return self.max_tokens, side


class VectorsByType(TypedDict):
    """base64: of little-endian float32; binary: a bit a number, 1 where it is above 0, eight in one of -128 to 127."""

    float: NotRequired[Vectors]
    base64: NotRequired[list[str]]
    binary: NotRequired[list[list[int]]]
    ubinary: NotRequired[list[list[int]]]


class CohereEmbeddings(TypedDict):
    id: str
    response_type: Literal["embeddings_by_type", "embeddings_floats"]
    embeddings: VectorsByType | Vectors  # vectors alone: from /v1/embed, if no types are asked for
    texts: list[str]
    meta: dict[str, Any]


class TeiEmbedBody(TeiBody):
    inputs: Annotated[Inputs, BeforeValidator(lambda value: inputs(value, "inputs")), input_schema("inputs")]
    prompt_name: str | None = Field(None, description="a prompt of the model's files, put before each text")
    normalize: bool = True
    dimensions: int | None = Field(None, ge=1, le=2**16)


class Compared(Body):
    source_sentence: Annotated[str, Field(min_length=1)]
    sentences: list[Annotated[str, Field(min_length=1)]] = Field(min_length=1, max_length=MAX_INPUTS)


class SimilarityBody(TeiBody):
    inputs: Compared


def sequences_of(value: Any) -> list[list[str]]:
    """Sequences of one text or a pair: a string or a list of strings is one, a list of lists is several.

    Raises:
        BadRequest: naming the one that is neither.
    """
    if isinstance(value, str):
        value = [value]
    several = isinstance(value, list) and bool(value) and isinstance(value[0], list)
    found: list[Any] = value if several else [value]
    if len(found) > MAX_INPUTS:
        raise BadRequest(f"inputs takes at most {MAX_INPUTS} entries, {len(found)} given", param="inputs")
    for i, item in enumerate(found):
        texts = isinstance(item, list) and len(item) in (1, 2) and all(isinstance(each, str) and each for each in item)
        if not texts:
            name = f"inputs[{i}]" if several else "inputs"
            raise BadRequest(f"{name} must be a text or a pair of texts, none of them empty", param=name)
    return found


def _checked(value: Any) -> Any:
    sequences_of(value)
    return value


_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_SEQUENCE: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}
_PREDICTED = {"type": "array", "items": _SEQUENCE, "minItems": 1, "maxItems": MAX_INPUTS}


class PredictBody(TeiBody):
    inputs: Annotated[
        str | list[str] | list[list[str]],
        BeforeValidator(_checked),
        WithJsonSchema({"title": "inputs", "anyOf": [_TEXT, _SEQUENCE, _PREDICTED]}),
    ] = Field(description="a text, a pair of texts, or a list of lists of one or two")
    raw_scores: bool = Field(False, description="logits, before the activation")

    @property
    def is_batch(self) -> bool:
        """Whether a list of lists was sent, be it of one."""
        return isinstance(self.inputs, list) and isinstance(self.inputs[0], list)

    @property
    def sequences(self) -> list[list[str]]:
        return sequences_of(self.inputs)


class Prediction(TypedDict):
    score: float
    label: str


class ClassifyBody(PoolBody):
    input: Annotated[Inputs, BeforeValidator(lambda value: inputs(value, "input")), input_schema("input")]
    use_activation: bool = Field(True, description="false: logits instead of probabilities")


class Classified(TypedDict):
    index: int
    label: str  # the likeliest one
    probs: list[float]  # one a label, in the order of the model's ids
    num_classes: int


class Classification(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PoolUsage
