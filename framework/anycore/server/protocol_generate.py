"""Bodies of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic.json_schema import WithJsonSchema

from anycore.engine.request import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP,
    MAX_STOP_TOKEN_IDS,
)
from anycore.errors import BadRequest
from anycore.server.failures import validation_error
from anycore.server.protocol import (
    MAX_INPUTS,
    MAX_TOKEN_ID,
    Body,
    RequestId,
)
from anycore.server.protocol_messages import Messages
from anycore.server.protocol_search import SearchBody

MAX_SEED = 2**63
MAX_BAD_WORDS = 256
MAX_TEXT = 4096  # characters of a stop string or a bad word

HARMLESS = """
user name metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention session_id
"""
IGNORED = frozenset(HARMLESS.split())
"""Fields that clients send and that change nothing here: accepted without a word."""

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_config": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "functions": (),
    "function_call": ("none",),
    "suffix": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "mm_processor_kwargs": (),
    "prompt_embeds": (),
    "images": (),
    "repetition_detection": (),
    "stop_regex": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "logits_processors": (),
    "lora_path": (),
    "extra_body": (),
}
"""Fields that mean something here and are not built, or not for the route that they are sent to, with the values that
ask for nothing (so do null, "", [], {})."""

OF_OTHERS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": (),
    "stream": (False,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "embedding_types": (["float"],),
    "output_dtype": ("float",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "instruction": (),
    "use_activation": (True,),
    "activation": (True,),
    "max_tokens_per_query": (0,),
    "late_chunking": (False,),
    "rank_fields": (["text"],),
}
"""The same, of fields that change an answer on other routes: where tokens are only counted, they may be there."""


def _logit_bias(value: Any) -> Any:
    """Check the keys and values of a logit_bias here, so that the error names the field and not one of its keys."""
    if not isinstance(value, dict):
        raise BadRequest("logit_bias must be an object of token id -> number", param="logit_bias")
    if len(value) > MAX_LOGIT_BIAS:
        raise BadRequest(f"logit_bias takes at most {MAX_LOGIT_BIAS} ids, {len(value)} given", param="logit_bias")
    for key, bias in value.items():
        if not re.fullmatch("0|[1-9][0-9]{0,9}", key):
            raise BadRequest(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)) or not -100 <= bias <= 100:
            raise BadRequest(f"logit_bias of token {key} must be a number between -100 and 100", param="logit_bias")
    return value


LogitBias = Annotated[
    dict[str, float],
    BeforeValidator(_logit_bias),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_LOGIT_BIAS,
            "propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


TokenId = Annotated[int, Field(ge=0, le=MAX_TOKEN_ID)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1, "maxLength": MAX_TEXT}
Stop = Annotated[
    list[Text],
    Field(max_length=MAX_STOP),
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    WithJsonSchema({"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "maxItems": MAX_STOP}]}),
]


class GenerateBody(SearchBody):
    """What chat and completions share. Sampling fields left out are filled in by the model's defaults."""

    model: str | None = None
    n: int = Field(1, ge=1, le=MAX_N)
    max_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID)
    max_completion_tokens: int | None = Field(None, ge=0, le=MAX_TOKEN_ID, description="the same as max_tokens")
    min_tokens: int = Field(0, ge=0, le=MAX_TOKEN_ID)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_TOKEN_ID)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-MAX_SEED, le=MAX_SEED - 1)
    stop: Stop = Field([])
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKEN_IDS)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: LogitBias = Field({}, description="token id -> -100 to 100")
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[Text] = Field([], max_length=MAX_BAD_WORDS)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    stream: bool = False
    stream_options: StreamOptions | None = None
    stream_interval: int = Field(1, ge=1, le=1024, description="tokens gathered before a chunk is sent")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=MAX_TOKEN_ID, description="keep so many prompt tokens; -1: as many as leave room for the output"
    )
    truncation_side: Literal["left", "right"] = Field("left", description="the side that is cut")
    response_format: dict[str, Any] | None = Field(
        None, description="text, json_object, or json_schema with the schema that the output keeps to"
    )
    structured_outputs: dict[str, Any] | None = Field(
        None, description="one of json, json_object, regex, choice, grammar (Lark or GBNF), as in vLLM"
    )
    guided_json: dict[str, Any] | str | None = Field(None, description="as structured_outputs.json")
    guided_regex: str | None = Field(None, description="as structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="as structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="as structured_outputs.grammar")
    json_schema: dict[str, Any] | str | None = Field(None, description="as structured_outputs.json; llama.cpp's name")
    grammar: str | None = Field(None, description="as structured_outputs.grammar; llama.cpp's name")
    regex: str | None = Field(None, description="as structured_outputs.regex; SGLang's name")
    ebnf: str | None = Field(None, description="as structured_outputs.grammar; SGLang's name")
    priority: int = Field(
        0, ge=-(2**31), le=2**31 - 1, description="lower runs first, under --scheduling-policy priority"
    )
    cache_salt: str | None = Field(None, min_length=1, max_length=128)
    request_id: RequestId | None = None
    return_token_ids: bool = False
    return_prompt_text: bool = False
    return_tokens_as_token_ids: bool = False


class ToolConfigBody(Body):
    tools: list[str] | None = Field(None, description="which of the server's tools (default: all)")
    max_tool_calls: int = Field(16, ge=0, le=1024)
    tool_timeout: float = Field(30.0, gt=0, le=3600, description="seconds for one call")


class ChatBody(GenerateBody):
    messages: Messages
    max_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_TOKEN_ID, description="the same as max_tokens")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(False, description="put the last assistant message before the answer")
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = Field(False, description="the template usually writes them")
    chat_template: str | None = Field(None, description="refused unless the server was started to allow it")
    chat_template_kwargs: dict[str, Any] = Field({})
    documents: list[dict[str, Any]] | None = Field(None, max_length=MAX_INPUTS)
    reasoning_effort: str | None = Field(
        None, description="handed to the chat template; none also sets its enable_thinking to false"
    )
    include_reasoning: bool = Field(True, description="whether the reply shows the model's reasoning")
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_TOKEN_ID, description="tokens of reasoning at most")
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = Field(
        None, description="none, auto (default with tools), required, or an object that names a function"
    )
    parallel_tool_calls: bool = Field(True, description="whether a reply may have several calls")
    tool_config: ToolConfigBody | None = Field(
        None, description="let the server run its own tools (--run-tools) until the model answers without calling any"
    )


def chat_body(fields: dict[str, Any]) -> ChatBody:
    """Return the chat that a body of another API is the same as.

    Raises:
        BadRequest: naming the field.
    """
    try:
        return ChatBody.model_validate(fields)
    except ValidationError as error:
        raise validation_error([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from None
