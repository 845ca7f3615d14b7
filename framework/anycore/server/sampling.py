"""From the fields of a chat or completions body to SamplingParams, and what every generate body is checked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anycore.engine.request import SamplingParams
from anycore.errors import BadRequest
from anycore.server.protocol_generate import GenerateBody

if TYPE_CHECKING:
    from anycore.text.tokenizer import Tokenizer

LEFT_OUT = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
)
"""Fields that the model's defaults fill in when the request leaves them out; null counts as left out."""


def sampling_of(
    body: GenerateBody,
    defaults: dict[str, Any],
    tokenizer: Tokenizer,
    vocab_size: int,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: str | None = None,
) -> SamplingParams:
    """Build the sampling parameters: request, then `defaults` (flag and model's file), then the OpenAI API's.

    Raises:
        BadRequest: a value is out of range or an id is outside the vocabulary; `param` names the field.
    """
    given = {name: getattr(body, name) for name in LEFT_OUT if getattr(body, name) is not None}
    chosen = {name: value for name, value in defaults.items() if name in LEFT_OUT} | given
    params = SamplingParams(
        **chosen,
        n=body.n,
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop),
        stop_token_ids=tuple(body.stop_token_ids),
        include_stop_str_in_output=body.include_stop_str_in_output,
        ignore_eos=body.ignore_eos,
        skip_special_tokens=body.skip_special_tokens,
        spaces_between_special_tokens=body.spaces_between_special_tokens,
        logit_bias={int(key): value for key, value in body.logit_bias.items()},
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words_ids=_bad_words(body.bad_words, tokenizer),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
    )
    params.check_vocabulary(vocab_size)
    return params


def check_priority(priority: int, policy: str) -> None:
    """Refuse a priority that would change nothing."""
    if priority and policy != "priority":
        raise BadRequest(
            f"priority {priority} means nothing under --scheduling-policy {policy}: leave it out, or start the "
            "server with --scheduling-policy priority",
            param="priority",
        )


def check_body(body: GenerateBody, policy: str) -> None:
    """Refuse fields that contradict each other, or the server's scheduling policy."""
    check_priority(body.priority, policy)
    if body.stream_options is not None and not body.stream:
        raise BadRequest("stream_options needs stream: true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise BadRequest("prompt_logprobs is not available in a stream; send stream: false", param="prompt_logprobs")
    if len({body.max_tokens, body.max_completion_tokens} - {None}) > 1:
        raise BadRequest(
            f"max_tokens is {body.max_tokens}, max_completion_tokens {body.max_completion_tokens}: send one of them",
            param="max_completion_tokens",
        )


def check_sequences(body: GenerateBody, most: int, prompts: int = 1) -> None:
    """Refuse more sequences than one request may ask for, before anything is rendered.

    Raises:
        BadRequest: naming what there is too much of.
    """
    name = "best_of" if body.best_of is not None and body.best_of > body.n else "n"
    each: int = getattr(body, name)
    count = prompts * each
    if count > most:
        raise BadRequest(
            f"{name} {each} for each of {prompts} prompts makes {count} sequences, a request may ask for {most}: send "
            f"fewer prompts or a lower {name}, or raise --max-request-sequences",
            param="prompt" if each == 1 else name,
        )


def asked_tokens(body: GenerateBody) -> int | None:
    """The limit on the output that the request sets, under either name."""
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of each word, as it stands and after a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)
