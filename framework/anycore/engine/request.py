"""The nouns of the engine: what is asked, what is running, and what comes out.

`NewRequest` goes in and `Delta` comes out, between processes or within one; `Request` never leaves the engine.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from enum import Enum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from anycore.contract.declare import Task
from anycore.engine.chains import Chain
from anycore.errors import BadRequest

if TYPE_CHECKING:
    from anycore.engine.decodes import Decodes
    from anycore.engine.grammar import GrammarState
    from anycore.engine.searches import Search

MAX_LOGPROBS = 20
MAX_N = 128
MAX_STOP = 4
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 300
MAX_LOGPROB_TOKEN_IDS = 128  # as in vLLM
MAX_WIDTH = 20  # beams, and sequences that the best are chosen from
MAX_LENGTH_PENALTY = 10.0
NUMBERS = (int, float)  # what values are in nearly all cases: others are looked at more closely


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
        _whole("best_of", self.width, 1, MAX_WIDTH)
        _within("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)


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
        _whole("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 0, 2**31)
        _whole("min_tokens", self.min_tokens, 0, 2**31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}", param="min_tokens"
            )
        _within("temperature", self.temperature, 0, 2)
        _within("top_p", self.top_p, 0, 1)
        _whole("top_k", self.top_k, -1, 2**31)
        _within("min_p", self.min_p, 0, 1)
        _within("presence_penalty", self.presence_penalty, -2, 2)
        _within("frequency_penalty", self.frequency_penalty, -2, 2)
        _within("repetition_penalty", self.repetition_penalty, 0.01, 100)  # logits are divided by it
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63 - 1)
        stop: Any = self.stop
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        if self.stop != ():
            _all_are("stop", self.stop, str)
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
            if getattr(self, name):
                _all_are(name, getattr(self, name), int)
        for word in self.bad_words_ids:
            _all_are("bad_words_ids", word, int)
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
            _within("logit_bias", value, -100, 100)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 0, MAX_LOGPROBS)
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
            _whole("dimensions", self.dimensions, 1, 2**31)


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


class Timing(msgspec.Struct):
    """Moments of a sequence in seconds of the engine's monotonic clock; 0 means not reached."""

    arrived: float = 0.0
    started: float = 0.0  # first scheduled


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


STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Bounds by which the engine counts its steps."""


class Distribution(msgspec.Struct):
    """How often a value lay up to each of some bounds and above the one before; the last count is beyond all."""

    counts: list[int]
    total: int = 0  # of the values

    def add(self, value: int, bounds: Sequence[int]) -> None:
        self.counts[bisect_left(bounds, value)] += 1
        self.total += value

    def __add__(self, other: Distribution) -> Distribution:
        """Both together; they must be over the same bounds."""
        return Distribution([a + b for a, b in zip(self.counts, other.counts, strict=True)], self.total + other.total)


def by_bounds(bounds: Sequence[int]) -> Any:
    """Declare a field that holds an empty distribution over `bounds`."""
    return msgspec.field(default_factory=lambda: Distribution([0] * (len(bounds) + 1)))


class Stats(msgspec.Struct, kw_only=True):
    """Gauges and counters of an engine since it started. Counters never fall."""

    running: int = 0
    waiting: int = 0
    deferred: int = 0  # of those that wait: for a prefix that another request is computing
    blocks: int = 0  # usable blocks in the pool
    blocks_free: int = 0
    steps: int = 0
    step_tokens: Distribution = by_bounds(STEP_TOKENS)  # computed in one step
    step_sequences: Distribution = by_bounds(STEP_SEQUENCES)  # of which one step computes something
    padding_tokens: int = 0  # computed beside them for nothing, as far as the backend says
    prompt_tokens: int = 0  # prompt tokens of admitted requests that were computed or cached
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    aborted: int = 0
    finished: int = 0
    failed: int = 0
    op_fallbacks: dict[str, int] = {}

    def after(self, before: Stats) -> Stats:
        """These gauges, and counters that begin where those of an engine before ended."""
        gauges = ("running", "waiting", "deferred", "blocks", "blocks_free")
        counters = (name for name in self.__struct_fields__ if name not in (*gauges, "op_fallbacks"))
        sums = {name: getattr(self, name) + getattr(before, name) for name in counters}
        ops = Counter(before.op_fallbacks)
        ops.update(self.op_fallbacks)
        return msgspec.structs.replace(self, **sums, op_fallbacks=dict(ops))


class Request:
    """One sequence inside the engine: a list of tokens and a count of how many are computed. Mutable."""

    __slots__ = (
        "_num_computed",
        "_num_tokens",
        "arrival",
        "blocks",
        "cached",
        "chain",
        "deadline",
        "decodes",
        "eos_ids",
        "expected",
        "grammar",
        "id",
        "index",
        "is_pooled",
        "key",
        "leader",
        "max_total",
        "may_share",
        "needs_host",
        "new",
        "num_prompt",
        "preemptions",
        "prefilled",
        "prompt_scores",
        "published",
        "sampler",
        "search",
        "seat",
        "seed",
        "status",
        "stop_ids",
        "timing",
        "tokens",
    )

    def __init__(
        self, new: NewRequest, index: int, arrival: int, max_total: int, ids: array[int] | None = None
    ) -> None:
        """`ids`: those of the prompt, if they are at hand."""
        self.new = new
        self.id = new.id
        self.index = index  # of the sequence within the request
        self.arrival = arrival  # a counter: the order of admission
        self.max_total = max_total  # tokens at most, prompt included
        # Tokens, and how far they are computed.
        self.is_pooled = new.task is not Task.GENERATE
        # The prompt, then the output that the host has seen.
        self.tokens = array("q", new.token_ids) if ids is None else ids[:]
        self.num_prompt = len(new.token_ids)
        self._num_computed = 0
        self._num_tokens = self.num_prompt
        self.prefilled = False  # the whole prompt has been handed to the device once
        # Its place in the queues.
        self.key: tuple[float, ...] = ()  # rank under the policy; smaller runs first
        self.status = Status.WAITING
        self.seat = -1  # while it runs: its row in tables of `max_num_seqs` rows
        self.decodes: Decodes | None = None  # while it goes on with one token a step: they count for it
        self.leader: Request | None = None  # sequence 0, while this one waits to share its prompt's blocks
        self.preemptions = 0
        self.deadline = math.inf
        # Its KV blocks.
        self.blocks: list[int] = []  # block table
        self.chain = Chain(new.cache_salt)  # the full blocks of known tokens
        self.expected: list[bytes] = []  # blocks it told the pool it is about to compute
        self.published = 0  # leading blocks that others can find
        self.cached = 0  # prompt tokens found in the prefix cache at first admission
        # What is done with its last hidden state.
        self.eos_ids: frozenset[int] = frozenset()
        self.stop_ids: frozenset[int] = frozenset()  # tokens that end it, once it has min_tokens
        self.seed = 0
        self.needs_host = False  # its next token can only be chosen once the host has seen the last one
        self.may_share = not (new.sampling is not None and new.sampling.prompt_logprobs is not None)
        self.prompt_scores: list[TokenLogprob | None] = []
        self.sampler: Any = None  # engine/sampler.py's own
        self.grammar: GrammarState | None = None  # where its output is within its grammar
        self.search: Search | None = None  # the beam search that it makes one step for
        self.timing = Timing()

    @property
    def num_computed(self) -> int:
        """Rows handed to the device so far."""
        return self._num_computed if self.decodes is None else self.decodes.computed[self.seat]

    @num_computed.setter
    def num_computed(self, number: int) -> None:
        assert self.decodes is None, "counted by those that decode"
        self._num_computed = number

    @property
    def num_tokens(self) -> int:
        """Tokens the sequence has, those that only the device has seen included."""
        return self._num_tokens if self.decodes is None else self.decodes.computed[self.seat] + 1

    @num_tokens.setter
    def num_tokens(self, number: int) -> None:
        assert self.decodes is None, "counted by those that decode"
        self._num_tokens = number

    @property
    def num_pending(self) -> int:
        """Tokens sampled on the device that the host has not seen: 0 or 1, one more until a step's are taken."""
        return self.num_tokens - len(self.tokens)

    @property
    def num_output(self) -> int:
        """Generated tokens, those that only the device has seen included."""
        return self.num_tokens - self.num_prompt

    @property
    def remaining(self) -> int:
        """Rows still to compute before the next token can be sampled, or the pooled output taken."""
        return self.num_tokens - self.num_computed


class Status(str, Enum):
    COMPILING = "compiling"  # its grammar is not ready: the scheduler does not know it yet
    WAITING = "waiting"  # also after preemption
    RUNNING = "running"
    FINISHED = "finished"


def _within(name: str, value: Any, low: float, high: float) -> None:
    """Raise BadRequest unless value is a number and low ≤ value ≤ high; NaN fails."""
    if type(value) not in NUMBERS and (type(value) is bool or not isinstance(value, Real)):
        raise BadRequest(f"{name} must be a number, not {value!r}", param=name)
    if not low <= value <= high:
        raise BadRequest(f"{name} must be between {low} and {high}, not {value}", param=name)


def _whole(name: str, value: Any, low: int, high: int) -> None:
    """Raise BadRequest unless value is a whole number and low ≤ value ≤ high."""
    if type(value) is not int and isinstance(value, Real) and not isinstance(value, Integral):
        raise BadRequest(f"{name} must be a whole number, not {value!r}", param=name)
    _within(name, value, low, high)


def _all_are(name: str, values: Any, kind: type) -> None:
    """Raise BadRequest unless values are several, each of a kind: texts, or token ids."""
    what = "texts" if kind is str else "token ids"
    if not isinstance(values, list | tuple | set | frozenset | dict):
        raise BadRequest(f"{name} must hold {what}, not be {values!r}", param=name)
    for value in values:
        if type(value) is not kind and (
            isinstance(value, bool) or not isinstance(value, str if kind is str else Integral)
        ):
            raise BadRequest(f"{name} must hold {what}, not {value!r}", param=name)
