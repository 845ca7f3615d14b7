"""Bodies and replies of embeddings, rerank, score, tokenize and detokenize."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field
from pydantic.json_schema import WithJsonSchema
from typing_extensions import NotRequired, TypedDict

from anycore.errors import BadRequest
from anycore.server.protocol import MAX_INPUTS, MAX_TOKEN_ID, Body, RequestId, Usage, input_schema, inputs
from anycore.server.protocol_messages import Messages

MAX_IDS = 2**20  # tokens that are turned into text at a time

TRUNCATIONS: dict[Any, str | None] = {False: None, True: "", "NONE": None, "START": "left", "END": "right"}
"""Values of `truncate` (Cohere's in any case) and the side that is cut; "": the one `truncation_side` names."""


def _truncate(value: Any) -> Any:
    value = value.upper() if isinstance(value, str) else value
    if not isinstance(value, (bool, str)) or value not in TRUNCATIONS:
        raise BadRequest("truncate must be true, false, NONE, START or END", param="truncate")
    return value


class PoolBody(Body):
    """What every pooled task shares: the model, and what to do with an input that is too long."""

    model: str | None = None
    truncate: Annotated[
        bool | str,
        BeforeValidator(_truncate),
        WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["NONE", "START", "END"]}]}),
    ] = Field(False, description="cut inputs that are too long; START and END name the side that is cut")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKEN_ID, description="cut inputs to so many tokens; -1: to the model's limit"
    )
    truncation_side: Literal["left", "right"] = Field("right", description="the side that is cut")
    priority: int = Field(
        0, ge=-(2**31), le=2**31 - 1, description="lower runs first, under --scheduling-policy priority"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    request_id: RequestId | None = None

    def cut(self) -> tuple[int | None, str]:
        """What to cut inputs to (None: refuse long ones, -1: the model's limit, else tokens) and the side that goes."""
        side = TRUNCATIONS[self.truncate]
        tokens = self.truncate_prompt_tokens
        if tokens is None and side is not None:
            tokens = -1
        return tokens, side or self.truncation_side


class TeiBody(PoolBody):
    """What the routes share that are as text-embeddings-inference has them."""

    truncation_direction: Annotated[
        Literal["left", "right"] | None,
        BeforeValidator(lambda value: value.lower() if isinstance(value, str) else value),
        WithJsonSchema({"type": "string", "enum": ["Left", "Right", "left", "right"]}),
    ] = Field(None, description="the side that is cut; another spelling of truncation_side")

    def cut(self) -> tuple[int | None, str]:
        tokens, side = super().cut()
        direction = self.truncation_direction
        if direction is not None and TRUNCATIONS[self.truncate] not in (None, "", direction):
            raise BadRequest(
                f"truncate {self.truncate} cuts the {side}, truncation_direction says {direction}: send one",
                param="truncation_direction",
            )
        return tokens, direction or side


class EmbeddingBody(PoolBody):
    """Either `input`, or `messages`, of which the model's chat template makes one text."""

    input: (
        Annotated[list[str | list[int]], BeforeValidator(lambda value: inputs(value, "input")), input_schema("input")]
        | None
    ) = None
    messages: Messages | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    add_special_tokens: bool = Field(False, description="beside those that the chat template writes")
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, le=2**16)
    prompt_name: str | None = Field(None, description="a prompt of the model's files, put before each text")
    input_type: str | None = Field(None, description="another spelling of prompt_name, such as query or document")
    normalize: bool | None = Field(None, description="default: as the model's files say")


class Embedding(TypedDict):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # str: base64 of little-endian float32


class PoolUsage(Usage):
    truncated: NotRequired[int]  # inputs that were cut


class Embeddings(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Embedding]
    usage: PoolUsage


def texts(value: Any, name: str) -> list[str]:
    """Return texts given as a string, a list of strings, or a list of objects that hold `text`.

    Raises:
        BadRequest: naming the entry.
    """
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRequest(f"{name} must be a list of at least one text", param=name)
    if len(value) > MAX_INPUTS:
        raise BadRequest(f"{name} takes at most {MAX_INPUTS} entries, {len(value)} given", param=name)
    found: list[str] = []
    for i, item in enumerate(value):
        text = item.get("text") if isinstance(item, dict) else item
        if not isinstance(text, str):
            raise BadRequest(f'{name}[{i}] must be a string or an object {{"text": "…"}}', param=f"{name}[{i}]")
        found.append(text)
    return found


def _texts_field(name: str) -> Any:
    item: dict[str, Any] = {
        "anyOf": [
            {"type": "string"},
            {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        ]
    }
    listed = {"type": "array", "items": item, "minItems": 1, "maxItems": MAX_INPUTS}
    schema = WithJsonSchema({"title": name, "anyOf": [{"type": "string"}, listed]})
    return Annotated[list[str], BeforeValidator(lambda value: texts(value, name)), schema]


class RankBody(PoolBody):
    """What rerank and score share."""

    instruction: str | None = Field(None, description="what relevance means, for rerankers that are told")
    raw_scores: bool = Field(False, description="logits, before the activation")
    apply_template: bool = Field(
        True, description="false: a reranker with a template gets query and document as they are"
    )
    max_tokens_per_doc: int | None = Field(
        None, ge=1, le=MAX_TOKEN_ID, description="documents are cut to so many tokens"
    )


class QueryBody(RankBody):
    query: Annotated[str, Field(min_length=1)]
    top_n: int | None = Field(None, ge=1, description="results to return; more than there are documents: all")
    return_documents: bool = False


class RerankBody(QueryBody):
    documents: _texts_field("documents")  # type: ignore[valid-type]


class RerankEitherBody(QueryBody, TeiBody):
    """With `texts` and `return_text` the answer is as text-embeddings-inference gives it, with `documents` as Jina."""

    documents: _texts_field("documents") | None = None  # type: ignore[valid-type]
    texts: _texts_field("texts") | None = None  # type: ignore[valid-type]
    return_text: bool = False


class Document(TypedDict):
    text: str


class RerankResult(TypedDict):
    index: int
    relevance_score: float
    document: NotRequired[Document]


class Rerank(TypedDict):
    id: str
    model: str
    results: list[RerankResult]
    usage: PoolUsage
    meta: NotRequired[dict[str, Any]]  # /v2: as Cohere bills, one search unit a request


class TextScore(TypedDict):
    index: int
    score: float
    text: NotRequired[str]


class ScoreBody(RankBody):
    text_1: _texts_field("text_1") | None = None  # type: ignore[valid-type]
    text_2: _texts_field("text_2") | None = None  # type: ignore[valid-type]
    queries: _texts_field("queries") | None = None  # type: ignore[valid-type]
    documents: _texts_field("documents") | None = None  # type: ignore[valid-type]


class Score(TypedDict):
    object: Literal["score"]
    index: int
    score: float


class Scores(TypedDict):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: PoolUsage


class TokenizeBody(Body):
    """Either `prompt` or `messages`, with what shapes the prompt of a chat."""

    only_counts: ClassVar[bool] = True

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for prompt, false for messages")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = Field({})
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_INPUTS)
    reasoning_effort: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    return_token_strs: bool = False


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: NotRequired[list[str]]


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]] = Field(max_length=MAX_IDS)


class Text(TypedDict):
    prompt: str
