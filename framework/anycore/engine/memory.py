"""The memory plan: what a model will take, from its numbers and the settings alone.

The same function predicts before anything is loaded and sizes the pool of the running engine. All sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from anycore.contract.declare import DTYPES
from anycore.contract.sizes import KVSpec, Limits
from anycore.errors import ConfigError, DoesNotFit
from anycore.models.spec import ModelSpec

MAX_NUM_SEQS = 256
MAX_NUM_BATCHED_TOKENS = 2048
MARGIN = 64 * 2**20
"""Kept free for what no formula counts: allocator rounding, small tensors, the runtime's own."""

FREE_SHARE = 0.9
"""Part of the free memory that a default share may take where less is free than the share."""

SAMPLED_ROWS = 64
"""Rows that `contract.sampling` filters at a time; its [rows, V] temporaries are counted for so many."""

SAMPLING_BYTES = 48
"""Bytes per logit while a row is filtered and drawn: float32 and int64 copies, a sort, float64 probabilities."""


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
    head_copied: bool = False  # a tied head is packed beside the embedding table
    own_length: int | None = None  # what the model's files limit it to, below its positions
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    batched_tokens: int | None = None  # the backend's default for it
    kv_cache_memory: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Who gets how much of `budget`, and the limits that follow from it."""

    budget: int  # this process's share of the device
    weights: int
    activations: int  # the widest moment of one step of max_num_batched_tokens rows
    logits: int
    kv: int  # all blocks, the scratch block included
    block_bytes: int
    kv_token_bytes: int
    limits: Limits

    @property
    def used(self) -> int:
        return self.weights + self.activations + self.logits + self.kv + MARGIN

    def as_dict(self) -> dict[str, int]:
        """The terms for tables and JSON."""
        return {
            "budget": self.budget,
            "weights": self.weights,
            "activations": self.activations,
            "logits": self.logits,
            "kv_cache": self.kv,
            "margin": MARGIN,
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
    if longest > spec.max_positions:
        raise ConfigError(
            f"--max-model-len {longest} is more than the {spec.max_positions} positions this model was made for",
            param="max_model_len",
        )
    rows = _batched_tokens(wish, longest)
    seqs = _seqs(wish, rows)
    budget = _budget(wish, room)
    weights = spec.weight_bytes(wish.dtype) + (_head_bytes(spec, wish.dtype) if wish.head_copied else 0)
    working = activation_bytes(spec, wish.dtype, rows), logits_bytes(spec, seqs)
    if not wish.paged:
        _check_fixed(weights, working, budget, room)
        limits = Limits(seqs, rows, longest, 0, 0)
        return MemoryPlan(budget, weights, *working, kv=0, block_bytes=0, kv_token_bytes=0, limits=limits)

    kv = spec.kv(wish.block_size, wish.dtype)
    block = block_bytes or kv.bytes_per_token * wish.block_size
    if wish.kv_cache_memory is not None:
        blocks = wish.kv_cache_memory // block
        have = wish.kv_cache_memory
    else:
        _check_fixed(weights, working, budget, room)
        have = budget - weights - sum(working) - MARGIN - block  # one block of scratch
        blocks = max(0, have) // block
    longest = _length(wish, kv, longest, blocks, have, room)
    if wish.kv_cache_memory is None:
        blocks = min(blocks, seqs * -(-longest // wish.block_size))  # more could never be used
    limits = Limits(seqs, max(rows, seqs), longest, wish.block_size, blocks + 1)
    result = MemoryPlan(budget, weights, *working, (blocks + 1) * block, block, kv.bytes_per_token, limits)
    if wish.kv_cache_memory is not None and room.free is not None and result.used > room.free:
        raise DoesNotFit(
            f"{size(result.used)} are needed ({size(weights)} weights, {size(result.kv)} KV cache, "
            f"{size(sum(working) + MARGIN)} working memory), {room.device} has {size(room.free)} free: "
            f"lower --kv-cache-memory to at most {size(max(0, wish.kv_cache_memory + room.free - result.used))}",
            param="kv_cache_memory",
        )
    return result


def activation_bytes(spec: ModelSpec, dtype: str, rows: int) -> int:
    """The widest moment of a step of `rows` rows: residual and normed input beside either q, k, v and the attention
    output or the MLP's halves and their product, and two float32 copies of a row inside a norm.
    """
    element = DTYPES[dtype]
    attention = (spec.heads + 2 * spec.kv_heads + spec.heads) * spec.head_dim
    mlp = 3 * spec.intermediate_size
    return rows * (element * (2 * spec.hidden_size + max(attention, mlp)) + 8 * spec.hidden_size)


def logits_bytes(spec: ModelSpec, seqs: int) -> int:
    """Logits of one row a sequence in float32, what penalties count of each, and the temporaries of sampling; nothing
    where no head is loaded.
    """
    if spec.head != "lm":
        return 0
    return spec.vocab_size * (8 * seqs + SAMPLING_BYTES * min(seqs, SAMPLED_ROWS))


def _head_bytes(spec: ModelSpec, dtype: str) -> int:
    """A second copy of the embedding table, where the head is tied to it."""
    return spec.vocab_size * spec.hidden_size * DTYPES[dtype] if spec.tied and spec.head == "lm" else 0


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
    if wish.kv_cache_memory is not None or room.free is None or budget <= room.free:
        return budget
    if not wish.utilization_asked:
        return int(room.free * FREE_SHARE)
    raise DoesNotFit(
        f"--memory-utilization {wish.utilization:g} of {size(room.total)} is {size(budget)}, "
        f"but only {size(room.free)} of {room.device} memory are free: "
        f"lower it to at most {room.free / room.total:.2f}, free memory, or set --kv-cache-memory",
        param="memory_utilization",
    )


def _check_fixed(weights: int, working: tuple[int, int], budget: int, room: Room) -> None:
    need = weights + sum(working) + MARGIN
    if need > budget:
        raise DoesNotFit(
            f"{size(need)} are needed before any KV cache ({size(weights)} weights, {size(sum(working))} working "
            f"memory, {size(MARGIN)} margin), {size(budget)} of {room.device} memory are allowed: raise "
            "--memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs",
            param="memory_utilization",
        )


def _length(wish: Wish, kv: KVSpec, longest: int, blocks: int, have: int, room: Room) -> int:
    """The longest sequence that the blocks hold; refused if the user asked for more."""
    fits = blocks * kv.block_size
    if longest <= fits:
        return longest
    if wish.max_model_len is None and fits >= kv.block_size:
        return fits
    need = longest * kv.bytes_per_token
    raise DoesNotFit(
        f"one sequence of {longest} tokens needs {size(need)} of KV cache ({kv.bytes_per_token} bytes a token), "
        f"{size(max(0, have))} are there on {room.device}: the feasible maximum is --max-model-len {fits} "
        f"({blocks} blocks of {kv.block_size}); or raise --memory-utilization or --kv-cache-memory",
        param="max_model_len",
    )
