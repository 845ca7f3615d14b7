"""What is asked of an engine, and what comes out: `NewRequest` in, `Delta` out, between processes or within one.

What an engine makes of a request while it runs is in `sequence.py`.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Literal

import msgspec

from anycore.contract.declare import Task
from anycore.engine.checks import all_are, whole, within
from anycore.errors import BadRequest

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP = 4
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_WIDTH = 20  # beams, and sequences that the best are chosen from
MAX_LENGTH_PENALTY = 10.0


class Beams(msgspec.Struct, frozen=True, kw_only=True):
    """A beam search in place of drawing, as Hugging Face transformers has it.

    A sequence's score is the sum of its tokens' log-probabilities divided by its length to the power of
    `length_penalty`: above 0 favours long sequences.

    Raises:
        BadRequest: a value is outside its range; `param` names the field.
    """

    width: int  # sequences that are followed at a time, 1..20; the best `n` of them are returned
    length_penalty: float = 1.0  # -10..10
    # With `width` sequences ended: False goes on while the best that has not ended would score higher than the worst of
    # them if it ended now, "never" while it could at any length, True does not go on.
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        whole("best_of", self.width, 1, MAX_WIDTH)
        within("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to generate. Field names, ranges and defaults follow the OpenAI API and vLLM.

    Raises:
        BadRequest: a value is outside its range; `param` names the field.
    """

    n: int = 1  # sequences to generate from one prompt, 1..128
    max_tokens: int | None = None  # None: up to the model's length
    min_tokens: int = 0  # no stop of any kind before this many tokens
    temperature: float = 1.0  # 0..2; 0 is greedy
    top_p: float = 1.0  # 0..1; 0 keeps the most likely id alone
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0  # 0..1
    repetition_penalty: float = 1.0  # 0.01 to 100; prompt and output
    presence_penalty: float = 0.0  # -2..2; output only
    frequency_penalty: float = 0.0  # -2..2; output only
    seed: int | None = None  # 64 bits, signed
    stop: tuple[str, ...] = ()  # at most 4 strings; a string alone is one
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logit_bias: dict[int, float] = msgspec.field(default_factory=dict)  # id -> -100..100
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    logprobs: int | None = None  # alternatives per generated token, 0..20
    prompt_logprobs: int | None = None  # alternatives per prompt token, 0..20
    logprob_token_ids: tuple[int, ...] = ()  # at most 128: reported instead of the most likely ones, in this order
    grammar: str | None = None  # what the output keeps to, as `text.grammar` makes it: see `engine.grammar`
    beams: Beams | None = None  # temperature and what filters draws do not count then, penalties and bans do

    def __post_init__(self) -> None:
        whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            whole("max_tokens", self.max_tokens, 0, 2**31)
        whole("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", param="min_tokens"
            )
        within("temperature", self.temperature, 0, 2)
        within("top_p", self.top_p, 0, 1)
        whole("top_k", self.top_k, -1, 2**31)
        within("min_p", self.min_p, 0, 1)
        within("presence_penalty", self.presence_penalty, -2, 2)
        within("frequency_penalty", self.frequency_penalty, -2, 2)
        within("repetition_penalty", self.repetition_penalty, 0.01, 100)  # logits are divided by it
        if self.seed is not None:
            whole("seed", self.seed, -(2**63), 2**63 - 1)
        stop: Any = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        if self.stop != ():
            all_are("stop", self.stop, str)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name):
                all_are(name, getattr(self, name), int)
        for word in self.bad_words_ids:
            all_are("bad_words_ids", word, int)
        if len(self.stop) > MAX_STOP:
            raise BadRequest(f"stop takes at most {MAX_STOP} strings, {len(self.stop)} given", param="stop")
        if any(not s for s in self.stop):
            raise BadRequest("stop strings must not be empty", param="stop")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise BadRequest(f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise BadRequest(
                f"logit_bias takes at most {MAX_LOGIT_BIAS} ids, {len(self.logit_bias)} given", param="logit_bias"
            )
        for value in self.logit_bias.values():
            within("logit_bias", value, -100, 100)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                whole(name, getattr(self, name), 0, MAX_LOGPROBS)
        if self.logprob_token_ids:
            self._check_named()
        if self.beams is not None:
            if type(self.beams) is not Beams:
                raise BadRequest(f"beams must be Beams, not {self.beams!r}", param="beams")
            self._check_beams(self.beams)

    def _check_named(self) -> None:
        count = len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise BadRequest(
                f"logprob_token_ids takes at most {MAX_LOGPROB_TOKEN_IDS} ids, {count} given", param="logprob_token_ids"
            )
        if self.logprobs is None:
            raise BadRequest("logprob_token_ids needs logprobs", param="logprob_token_ids")

    def _check_beams(self, beams: Beams) -> None:
        if self.n > beams.width:
            raise BadRequest(f"n {self.n} is more than the {beams.width} beams of the search", param="n")
        if self.max_tokens == 0:
            raise BadRequest("a beam search generates at least one token: max_tokens is 0", param="max_tokens")
        for name in ("grammar", "logprob_token_ids"):
            if getattr(self, name):
                field = "structured_outputs" if name == "grammar" else name
                raise BadRequest(f"a beam search cannot be had together with {field}", param=field)

    def check_vocabulary(self, size: int) -> None:
        """Refuse ids outside 0 … size - 1.

        Raises:
            BadRequest: naming the field and the id.
        """
        lists = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": [i for word in self.bad_words_ids for i in word],
            "logprob_token_ids": self.logprob_token_ids,
        }
        for name, ids in lists.items():
            for i in ids:
                if not 0 <= i < size:
                    raise BadRequest(f"{name}: token id {i} is outside the vocabulary (0 to {size - 1})", param=name)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise BadRequest("allowed_token_ids must not be empty", param="allowed_token_ids")


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How an embedding or a score is taken from the hidden states."""

    dimensions: int | None = None  # Matryoshka: keep the first so many, before normalising
    normalize: bool | None = None  # None: as the model's files say
    raw_scores: bool = False  # rerank: logits instead of the activated score

    def __post_init__(self) -> None:
        if self.dimensions is not None and type(self.dimensions) is not int:
            whole("dimensions", self.dimensions, 1, 2**31)


class NewRequest(msgspec.Struct, kw_only=True):
    """One request on its way into an engine: tokens already rendered, limits already checked at the door."""

    id: str
    task: Task
    token_ids: list[int]
    sampling: SamplingParams | None = None  # generate
    pooling: PoolingParams | None = None  # embed, rerank
    token_types: list[int] | None = None  # segment ids, one a token
    priority: int = 0  # lower runs first, under the priority policy
    cache_salt: str | None = None  # requests share prefixes only with equal salt
    deadline: float | None = None  # seconds from arrival in the engine until it is given up
    tenant: str = ""  # at whose expense it runs: tenants that wait at the same time share the engine
    weight: float = 1.0  # the tenant's share, against the weights of the others


class FinishReason(str, Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token and of the most likely ones at its place."""

    token_id: int
    logprob: float
    rank: int
    # (id, logprob), most likely first; or the token itself and then the ids that were asked for
    top: list[tuple[int, float]] = []


class Delta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one sequence of a request. The last one carries `finish`."""

    id: str  # of the request
    index: int = 0  # of the sequence, 0 … n - 1
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None  # one a token in `token_ids`
    prompt_logprobs: list[TokenLogprob | None] | None = None  # once, when the prompt is computed; None for token 0
    cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queue_seconds: float = 0.0  # on a sequence's first delta: how long it waited before its first step
    vector: bytes | None = None  # embed: float32, little-endian
    scores: list[float] | None = None  # rerank: one a label
    finish: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop id or string that ended it
    all_text: bool = False  # with FinishReason.STOP: no stop id ended it, the last token is text like the others
    error: str | None = None  # with FinishReason.ERROR: what went wrong
    error_code: str | None = None  # with FinishReason.ERROR: the code of the error envelope
    preemptions: int = 0  # with `finish`: how often the sequence lost its KV blocks
    score: float | None = None  # of a beam search, with all of a sequence's tokens: see `Beams`


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the `request_finished` hook sees. No text, no tokens."""

    id: str
    model: str
    task: Task
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    sequences: int
    finish: str
    queue_seconds: float
    first_token_seconds: float | None
    total_seconds: float
    last_token_seconds: float | None = None
    longest_output: int = 0  # tokens of the longest sequence
    preemptions: int = 0  # of all sequences
