"""The memory plan: what a model will take, from its numbers and the settings alone.

The same function predicts before anything is loaded and sizes the pool of the running engine. All sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from anycore.contract.costs import StepShape, activation_bytes, logits_bytes, reference_workspace
from anycore.contract.declare import DTYPES
from anycore.contract.sizes import KVSpec, Limits
from anycore.engine.tasks import check_length
from anycore.errors import ConfigError, DoesNotFit
from anycore.models.quantization import Quantization
from anycore.models.spec import ModelSpec

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
MARGIN = 64 * 2**20
"""Kept free for what no formula counts: allocator rounding, small tensors, the runtime's own."""

FREE_SHARE = 0.9
"""Part of the free memory that a default share may take where less is free than the share."""


@dataclass(frozen=True, slots=True)
class Room:
    """The device's memory. `free` is None before the device is open."""

    device: str  # what messages call it, such as "cpu"
    total: int
    free: int | None = None


@dataclass(frozen=True, slots=True)
class Wish:
    """The settings that trade memory; None leaves the choice to the plan."""

    dtype: str
    block_size: int
    utilization: float
    paged: bool  # False: no KV cache, requests are never split
    utilization_asked: bool = False  # by the user; a default gives way to what is free
    quantization: Quantization | None = None  # None: dense weights
    head_copied: bool = False  # a tied head is packed beside the embedding table
    own_length: int | None = None  # what the model's files limit it to, below its positions
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    batched_tokens: int | None = None  # the backend's default for it
    kv_cache_memory: int | None = None
    kv_cache: str | None = None  # a name from KV_CACHES; None: of the weights' own type
    reference: bool = False  # served by a reference row of the table
    runtime: int = 0  # the backend's terms: see BackendSpec
    workspace: Callable[[StepShape], int] = reference_workspace
    graphs: Callable[[StepShape], int] | None = None


@dataclass(frozen=True, slots=True)
class Working:
    """What is not weights and not cache, in the order of the report."""

    activations: int  # the widest moment of one step of max_num_batched_tokens rows
    logits: int  # of max_num_seqs rows, and sampling
    workspace: int  # what operations keep beside their results
    graphs: int  # captured steps
    runtime: int  # the open device itself
    margin: int = MARGIN

    @property
    def total(self) -> int:
        return self.activations + self.logits + self.workspace + self.graphs + self.runtime + self.margin


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets how much of `budget`, and the limits that follow from it."""

    budget: int  # this process's share of the device
    weights: int
    working: Working
    kv: int  # all blocks, the scratch block included
    block_bytes: int
    kv_token_bytes: int
    limits: Limits

    @property
    def used(self) -> int:
        return self.weights + self.working.total + self.kv

    @property
    def terms(self) -> dict[str, int]:
        """What `used` is the sum of."""
        return {"weights": self.weights, "kv_cache": self.kv, **asdict(self.working)}

    def as_dict(self) -> dict[str, int]:
        """The terms for tables and JSON."""
        return {
            "budget": self.budget,
            **self.terms,
            "used": self.used,
            "kv_bytes_per_token": self.kv_token_bytes,
            "kv_blocks": self.limits.blocks,
        }


def plan(spec: ModelSpec, wish: Wish, room: Room, block_bytes: int | None = None) -> MemoryPlan:
    """Divide the room; `block_bytes` is the live backend's answer, None takes the plain layout's.

    Raises:
        DoesNotFit: with need, have and the feasible maximum.
        ConfigError: settings that contradict one another, whatever the memory.
    """
    longest = wish.max_model_len or wish.own_length or spec.max_positions
    check_length(longest, spec)
    rows = _batched_tokens(wish, longest)
    seqs = _seqs(wish, rows)
    weights = weight_bytes(spec, wish)
    if not wish.paged:
        budget = _budget(wish, room)
        working = working_bytes(spec, wish, Limits(seqs, rows, longest, 0, 0))
        _check_fixed(weights, working, budget, room, "without a cache", "--max-model-len")
        return MemoryPlan(budget, weights, working, 0, 0, 0, Limits(seqs, rows, longest, 0, 0))

    kv = kv_of(spec, wish)
    block = block_bytes or kv.bytes_per_token * wish.block_size
    limits = Limits(seqs, max(rows, seqs), longest, wish.block_size, 0)
    pool = _Pool(spec, wish, weights, block, wish.kv_cache_memory or _budget(wish, room), limits)
    if wish.kv_cache_memory is None:
        _check_fixed(
            weights, pool.working(wish.block_size, 1), pool.have, room, "before any KV cache", "--max-num-seqs"
        )
    fits = pool.longest()
    if fits < longest and (wish.max_model_len is not None or fits < wish.block_size):
        raise _too_long(pool, kv, longest, fits, room)
    longest = min(longest, fits)
    blocks = pool.blocks(longest)
    result = pool.plan(longest, blocks)
    if wish.kv_cache_memory is not None:
        _check_given(pool, result, wish, room)
    return result


def kv_of(spec: ModelSpec, wish: Wish) -> KVSpec:
    """The cache, where requests keep one."""
    return spec.kv(wish.block_size, wish.dtype, wish.kv_cache)


def weight_bytes(spec: ModelSpec, wish: Wish) -> int:
    """Bytes of the weights; a head that is tied to a dense embedding table and packed exists twice."""
    quantised = wish.quantization is not None and "embed_tokens.weight" in wish.quantization.formats
    twice = wish.head_copied and spec.tied and spec.head == "lm" and not quantised
    copy = spec.vocab_rows * spec.hidden_size * DTYPES[wish.dtype] if twice else 0
    return spec.weight_bytes(wish.dtype, wish.quantization) + copy


def working_bytes(spec: ModelSpec, wish: Wish, limits: Limits) -> Working:
    """What an engine of these limits needs beside weights and cache."""
    shape = step_shape(spec, wish, limits)
    graphs = wish.graphs(shape) if wish.graphs is not None else 0
    return Working(activation_bytes(shape), logits_bytes(shape), wish.workspace(shape), graphs, wish.runtime)


def step_shape(spec: ModelSpec, wish: Wish, limits: Limits) -> StepShape:
    return StepShape(
        rows=limits.max_num_batched_tokens,
        seqs=limits.max_num_seqs,
        longest=limits.max_model_len,
        kept=limits.blocks * limits.block_size,
        block_size=limits.block_size,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        hidden=spec.hidden_size,
        intermediate=spec.intermediate_size,
        vocab=spec.vocab_size if spec.head == "lm" else 0,
        element=DTYPES[wish.dtype],
        gated=spec.family == "decoder",
        window=max((window or 0 for window in spec.windows), default=0),
        softcap=spec.softcap is not None,
        reference=wish.reference,
        quantised=wish.quantization is not None,
        rounded=wish.kv_cache is not None,
        ranks=spec.shard.ranks if spec.shard is not None else 1,
    )


@dataclass(frozen=True, slots=True)
class _Pool:
    """The search for a cache: a longer sequence and more blocks both need working memory of their own."""

    spec: ModelSpec
    wish: Wish
    weights: int
    block: int  # bytes
    have: int  # bytes: the budget, or the cache alone where --kv-cache-memory gives it
    limits: Limits  # without blocks, and with the longest sequence that is wished for

    def working(self, longest: int, blocks: int) -> Working:
        limits = replace(self.limits, max_model_len=longest, blocks=blocks)
        return working_bytes(self.spec, self.wish, limits)

    def room(self, longest: int) -> int:
        """Most blocks, the scratch block not counted, that there is memory for beside sequences so long."""
        if self.wish.kv_cache_memory is not None:
            return self.have // self.block
        most = max(0, self.have - self.weights) // self.block

        def fits(blocks: int) -> bool:
            need = self.weights + self.working(longest, blocks + 1).total + (blocks + 1) * self.block
            return need <= self.have

        return largest(most, fits)

    def longest(self) -> int:
        """The longest sequence that the blocks hold which are left beside it."""
        size, wished = self.wish.block_size, self.limits.max_model_len
        if self.room(wished) * size >= wished:
            return wished
        return size * largest(wished // size, lambda blocks: self.room(blocks * size) >= blocks)

    def blocks(self, longest: int) -> int:
        """Of these more could never be used."""
        useful = self.limits.max_num_seqs * -(-longest // self.wish.block_size)
        room = self.room(longest)
        return room if self.wish.kv_cache_memory is not None else min(room, useful)

    def given(self, cache: int) -> MemoryPlan:
        """The plan of a cache of another size, and of the longest sequence that it holds, 0 if it holds none."""
        other = replace(self, have=cache)
        longest = other.longest()
        return other.plan(longest, other.blocks(longest))

    def plan(self, longest: int, blocks: int) -> MemoryPlan:
        limits = replace(self.limits, max_model_len=longest, blocks=blocks + 1)
        token = kv_of(self.spec, self.wish).bytes_per_token
        kv = (blocks + 1) * self.block
        working = self.working(longest, blocks + 1)
        budget = self.have if self.wish.kv_cache_memory is None else self.weights + working.total + kv
        return MemoryPlan(budget, self.weights, working, kv, self.block, token, limits)


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, 0 if none does; what fits is smaller than what does not."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def size(count: int) -> str:
    """Bytes in words: "4.375 GiB", "64 MiB"."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= unit:
            return f"{round(count / unit, 3):g} {name}"
    return f"{count} B"


def _batched_tokens(wish: Wish, longest: int) -> int:
    """Rows of a step. Where prompts cannot be split, the longest one has to fit."""
    if wish.max_num_batched_tokens is None:
        rows = wish.batched_tokens or MAX_NUM_BATCHED_TOKENS
        return rows if wish.paged else max(rows, longest)
    if not wish.paged and wish.max_num_batched_tokens < longest:
        raise ConfigError(
            f"--max-num-batched-tokens {wish.max_num_batched_tokens} is less than --max-model-len {longest}: this "
            f"model's inputs cannot be split over steps. Raise the first to {longest} or lower the second",
            param="max_num_batched_tokens",
        )
    return wish.max_num_batched_tokens


def _seqs(wish: Wish, rows: int) -> int:
    if wish.max_num_seqs is None:
        return min(MAX_NUM_SEQS, rows)
    if wish.max_num_seqs > rows:
        raise ConfigError(
            f"--max-num-seqs {wish.max_num_seqs} is more than --max-num-batched-tokens {rows}: "
            "every running sequence needs a token of the budget. Raise the second or lower the first",
            param="max_num_seqs",
        )
    return wish.max_num_seqs


def _budget(wish: Wish, room: Room) -> int:
    """This process's share. What others hold is not taken off it, so the order of starting does not matter.

    A share that nobody asked for gives way to what is free.
    """
    budget = int(room.total * wish.utilization)
    if room.free is None or budget <= room.free + wish.runtime:  # what the open device takes is ours already
        return budget
    if not wish.utilization_asked:
        return int(room.free * FREE_SHARE) + wish.runtime
    raise DoesNotFit(
        f"--memory-utilization {wish.utilization:g} of {size(room.total)} is {size(budget)}, "
        f"but only {size(room.free)} of {room.device} memory are free: "
        f"lower it to at most {int(100 * (room.free + wish.runtime) / room.total) / 100:.2f}, free memory, or set "
        "--kv-cache-memory",
        param="memory_utilization",
    )


def _check_fixed(weights: int, working: Working, budget: int, room: Room, when: str, other: str) -> None:
    need = weights + working.total
    if need > budget:
        raise DoesNotFit(
            f"{size(need)} are needed {when} ({size(weights)} weights, "
            f"{size(working.total - working.margin)} working memory, {size(working.margin)} margin), {size(budget)} of "
            f"{room.device} memory are allowed: raise --memory-utilization, or lower --max-num-batched-tokens or "
            f"{other}",
            param="memory_utilization",
        )


def _check_given(pool: _Pool, made: MemoryPlan, wish: Wish, room: Room) -> None:
    """A cache whose size the user gave is held against the device, not against a share of it."""
    have = room.total if room.free is None else room.free + wish.runtime
    if made.used > have:
        most = largest(pool.have >> 20, lambda mib: pool.given(mib << 20).used <= have)
        held = pool.given(most << 20).limits.max_model_len
        change = f"lower --kv-cache-memory to at most {most}MiB"
        if held < (wish.max_model_len or wish.block_size):
            change = "no --kv-cache-memory fits: lower --max-num-batched-tokens or --max-num-seqs"
        raise DoesNotFit(
            f"{size(made.used)} are needed ({size(made.weights)} weights, {size(made.kv)} KV cache, "
            f"{size(made.working.total)} working memory), {room.device} has {size(have)} "
            f"{'in all' if room.free is None else 'free'}: {change}",
            param="kv_cache_memory",
        )


def _too_long(pool: _Pool, kv: KVSpec, longest: int, fits: int, room: Room) -> DoesNotFit:
    blocks = f"{fits // kv.block_size} blocks of {kv.block_size}"
    best = f"the feasible maximum is --max-model-len {fits} ({blocks}); or" if fits else "no length fits:"
    return DoesNotFit(
        f"one sequence of {longest} tokens needs {size(longest * kv.bytes_per_token)} of KV cache "
        f"({kv.bytes_per_token} bytes a token), {size(_left(pool, longest))} are there on {room.device}: "
        f"{best} raise {'--memory-utilization' if pool.wish.kv_cache_memory is None else '--kv-cache-memory'}",
        param="max_model_len",
    )


def _left(pool: _Pool, longest: int) -> int:
    """Bytes for a cache beside sequences of this length."""
    if pool.wish.kv_cache_memory is not None:
        return pool.have
    return max(0, pool.have - pool.weights - pool.working(longest, 1).total - pool.block)
