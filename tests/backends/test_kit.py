"""The conformance kit must catch what kernel authors get wrong. A mutant is the contract's default with one mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor

from anycore.contract import checks, reference, sampling
from anycore.contract.backend import Backend, KVSpec, Limits, Memory, StepFn, StepOutput, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.check_graphs import check_optimized
from anycore.contract.check_masks import check_masked
from anycore.contract.checks import AttentionCase
from anycore.contract.ops import Ops
from anycore_cpu.backend import CpuBackend
from anycore_cpu.memory import CpuMemory

PAGED = AttentionCase("float32", 16, causal=True, block_size=4, seed=1)
PACKED = AttentionCase("float32", 16, causal=True, seed=1)
FULL = replace(PACKED, causal=False)
WINDOW = replace(PAGED, window=5)
SOFTCAP = replace(PAGED, softcap=3.0)


def backend_of(ops: Ops, memory: Memory | None = None) -> Backend:
    return Backend(torch.device("cpu"), memory or CpuMemory(), ops)


class DefaultOps(Ops):
    """The default, with the attention of one request as a method that mutants replace."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None
    ) -> Tensor:
        return reference.attend(q, k, v, scale, causal, window, softcap)

    def places(self, batch: Batch, i: int) -> Tensor:
        """Slots of a request's tokens."""
        assert batch.block_tables is not None
        positions = torch.arange(batch.seq_lens[i])
        return batch.block_tables[i, positions // batch.block_size].long() * batch.block_size + (
            positions % batch.block_size
        )

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: Any,
        batch: Batch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        if cache is not None:
            reference.store(k, v, cache, batch)
        out = torch.empty_like(q)
        for i, (start, rows) in enumerate(zip(batch.query_starts, batch.query_lens, strict=False)):
            own = slice(start, start + rows)
            keys, values = k[own], v[own]
            if cache is not None:
                keys, values = (side.flatten(0, 1)[self.places(batch, i)] for side in cache)
            out[own] = self.attend(q[own], keys, values, scale, batch.causal, window, softcap)
        return out


class WrongCausalOffset(DefaultOps):
    """Row t of a chunk sees t + 1 keys, whatever came before the chunk."""

    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        rows = len(q)
        parts = [
            super(WrongCausalOffset, self).attend(q[t : t + 1], k[: t + 1], v[: t + 1], scale, causal, window, softcap)
            for t in range(rows)
        ]
        return torch.cat(parts)


class WindowOffByOne(DefaultOps):
    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        return super().attend(q, k, v, scale, causal, window and window + 1, softcap)


class SwappedHeads(DefaultOps):
    """Query head h reads KV head h modulo Hkv instead of h divided by the group."""

    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        group = q.shape[1] // k.shape[1]
        return super().attend(q, k.repeat(1, group, 1), v.repeat(1, group, 1), scale, causal, window, softcap)


class IgnoredScale(DefaultOps):
    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        return super().attend(q, k, v, q.shape[-1] ** -0.5, causal, window, softcap)


class IgnoredSoftcap(DefaultOps):
    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        return super().attend(q, k, v, scale, causal, window, None)


class AlwaysCausal(DefaultOps):
    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        return super().attend(q, k, v, scale, True, window, softcap)


class IgnoredBlockTable(DefaultOps):
    """Takes a request's blocks for neighbours in memory."""

    def places(self, batch: Batch, i: int) -> Tensor:
        assert batch.block_tables is not None
        return int(batch.block_tables[i, 0]) * batch.block_size + torch.arange(batch.seq_lens[i])


class StaleTail(DefaultOps):
    """Reads whole blocks and masks the scores only: a weight of 0 meets what an earlier owner left in the values."""

    def attention(self, q, k, v, cache, batch, *others):  # type: ignore[no-untyped-def]
        out = super().attention(q, k, v, cache, batch, *others)
        for i, (start, rows) in enumerate(zip(batch.query_starts, batch.query_lens, strict=False)):
            last = self.places(batch, i)[-1] // batch.block_size
            filled = (batch.seq_lens[i] - 1) % batch.block_size + 1
            out[start : start + rows] += 0.0 * cache[1][last, filled:].sum()
        return out


class DroppedLastBlock(DefaultOps):
    """The loop over blocks ends one early: what stands in a request's last block is not seen."""

    def attention(self, q, k, v, cache, batch, scale, window=None, softcap=None):  # type: ignore[no-untyped-def]
        out = super().attention(q, k, v, cache, batch, scale, window, softcap)
        case = replace(PAGED, window=window, softcap=softcap)
        for i, (start, rows) in enumerate(zip(batch.query_starts, batch.query_lens, strict=False)):
            seen = (batch.seq_lens[i] - 1) // batch.block_size * batch.block_size
            keys, values = (side.flatten(0, 1)[self.places(batch, i)][:seen] for side in cache)
            positions = range(batch.seq_lens[i] - rows, batch.seq_lens[i])
            if seen:
                exact = checks.exact_attention(q[start : start + rows], keys, values, positions, case)
                out[start : start + rows] = exact.float()
        return out


class StaleBlockTable(DefaultOps):
    """Reads by the block table of an earlier step with as many requests, as a buffer that nobody refreshed."""

    def __init__(self) -> None:
        self.kept: dict[int, Tensor] = {}

    def places(self, batch: Batch, i: int) -> Tensor:
        assert batch.block_tables is not None
        kept = self.kept.setdefault(len(batch.block_tables), batch.block_tables)
        if kept.shape == batch.block_tables.shape:
            batch = replace(batch, block_tables=kept)
        return super().places(batch, i)


class RoughSoftmax(DefaultOps):
    """Weights of a float32 model are rounded to bfloat16."""

    def attend(self, q, k, v, scale, causal, window, softcap):  # type: ignore[no-untyped-def]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("rhd,lhd->hrl", q, keys) * scale
        if causal:
            scores = scores.masked_fill(~reference.visible(len(q), len(k), True, window, q.device), float("-inf"))
        return torch.einsum("hrl,lhd->rhd", scores.softmax(-1).bfloat16().float(), values)


class OverwritesQuery(DefaultOps):
    def attention(self, q, *others):  # type: ignore[no-untyped-def]
        out = super().attention(q, *others)
        q.copy_(out)
        return out


class DependsOnMates(DefaultOps):
    """A little of the batch's mean leaks into every row, as a wrong shared scale would do."""

    def attention(self, q, *others):  # type: ignore[no-untyped-def]
        out = super().attention(q, *others)
        return out + 1e-5 * out.mean()


ATTENTION = [
    (WrongCausalOffset, PAGED),
    (WindowOffByOne, WINDOW),
    (WindowOffByOne, replace(WINDOW, block_size=16)),
    (SwappedHeads, PAGED),
    (SwappedHeads, PACKED),
    (IgnoredScale, PAGED),
    (IgnoredScale, FULL),
    (IgnoredSoftcap, SOFTCAP),
    (AlwaysCausal, FULL),
    (IgnoredBlockTable, PAGED),
    (StaleTail, PAGED),
    (DroppedLastBlock, PAGED),
    (StaleBlockTable, PAGED),
    (RoughSoftmax, PAGED),
    (RoughSoftmax, FULL),
    (OverwritesQuery, PACKED),
]


@pytest.mark.parametrize(("mutant", "case"), ATTENTION, ids=lambda x: getattr(x, "__name__", ""))
def test_kit_catches_wrong_attention(mutant: type[Ops], case: AttentionCase) -> None:
    check = checks.check_paged_attention if case.block_size else checks.check_packed_attention
    check(backend_of(DefaultOps()), case)
    with pytest.raises(AssertionError):
        check(backend_of(mutant()), case)


def same_attention(ops: Any, **changed: Callable[..., Any]) -> None:
    """Let the processor's own attention be called with something changed: scale, window, q or batch."""
    right = ops.attention
    names = ("q", "k", "v", "cache", "batch", "scale", "window", "softcap")

    def attention(*given: Any, **named: Any) -> Any:
        arguments = {**dict(zip(names, given, strict=False)), **named}
        return right(**{**arguments, **{name: change(arguments[name]) for name, change in changed.items()}})

    ops.attention = attention


WRONG_CALLS: dict[str, tuple[AttentionCase, dict[str, Callable[..., Any]]]] = {
    "ignored scale": (PAGED, {"scale": lambda scale: 16**-0.5}),
    "window off by one": (WINDOW, {"window": lambda window: window + 1}),
    "ignored soft cap": (SOFTCAP, {"softcap": lambda softcap: None}),
    "swapped heads": (PAGED, {"q": lambda q: q.flip(1)}),
    "rough queries": (PAGED, {"q": lambda q: q.bfloat16().float()}),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_kit_catches_mistakes_around_the_cpu_backend(name: str) -> None:
    case, changed = WRONG_CALLS[name]
    with torch.inference_mode():
        backend = CpuBackend(0)
        checks.check_paged_attention(backend, case)
        same_attention(backend.ops, **changed)
        with pytest.raises(AssertionError):
            checks.check_paged_attention(backend, case)


def test_kit_catches_results_that_depend_on_batch_mates() -> None:
    checks.check_company(backend_of(DefaultOps()), PACKED)
    with pytest.raises(AssertionError, match="batch mates"):
        checks.check_company(backend_of(DependsOnMates()), PACKED)


def mutated(**methods: Callable[..., Any]) -> Ops:
    """The default operations with some methods replaced; each takes the default Ops first."""
    ops = Ops()
    for name, method in methods.items():
        setattr(ops, name, MethodType(method, Ops()))
    return ops


def leaves_last_row(ops: Ops, x: Tensor, handle: Tensor, bias: Tensor | None = None) -> Tensor:
    """The last row of an odd number is never written. Fresh memory often holds zeros, or an equal result of before."""
    right = ops.linear(x, handle, bias)
    out = torch.empty_like(right)
    count = len(right) // 2 * 2
    out[:count] = right[:count]
    return out


def test_kit_catches_results_that_are_not_written() -> None:
    with checks.poisoned_memory():
        checks.check_linear(backend_of(Ops()), "float32", 7, (50, 33), True)
        with pytest.raises(AssertionError, match="NaN"):
            checks.check_linear(backend_of(mutated(linear=leaves_last_row)), "float32", 7, (50, 33), True)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mutant", [WrongCausalOffset, IgnoredBlockTable, StaleTail, DroppedLastBlock])
def test_kit_catches_wrong_attention_by_chance(mutant: type[Ops]) -> None:
    checks.check_random_lengths(backend_of(DefaultOps()), PAGED)
    with pytest.raises(AssertionError):
        checks.check_random_lengths(backend_of(mutant()), PAGED)


def no_bias(ops: Ops, x: Tensor, handle: Tensor, bias: Tensor | None = None) -> Tensor:
    return ops.linear(x, handle)


def shared_mean(ops: Ops, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    total = x if residual is None else x + residual
    return total / (total.pow(2).mean() + eps).sqrt() * weight, total


def forgets_residual(ops: Ops, x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Any:
    return ops.rms_norm(x, weight, eps, residual)[0], x


def normed_in_place(ops: Ops, x: Tensor, weight: Tensor, bias: Tensor, eps: float, residual: Any = None) -> Any:
    normed, total = ops.layer_norm(x, weight, bias, eps, residual)
    x.zero_()
    return normed, total.clone()


def forgets_residual_before_norm(ops: Ops, x: Tensor, residual: Any, weight: Tensor, eps: float, *matrix: Any) -> Any:
    return ops.norm_linear(x, None, weight, eps, *matrix)[0], x if residual is None else x + residual


def keeps_no_sum(ops: Ops, x: Tensor, residual: Any, *others: Any) -> Any:
    return ops.norm_linear(x, residual, *others)[0], x


def biases_one_half(
    ops: Ops, x: Tensor, residual: Any, weight: Tensor, eps: float, handle: Any, bias: Any, gate: Any
) -> Any:
    half = torch.cat((bias[: len(bias) // 2], torch.zeros_like(bias[len(bias) // 2 :])))
    return ops.norm_linear(x, residual, weight, eps, handle, half, gate)


def neighbour_pairs(ops: Ops, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    def turn(x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        c, s = cos[:, None], sin[:, None]
        return torch.stack((even * c - odd * s, odd * c + even * s), dim=-1).flatten(-2)

    return turn(q), turn(k)


def halves_swapped(ops: Ops, x: Tensor, kind: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return gate * ops.activation(up, kind)


def rough_gelu(ops: Ops, x: Tensor, kind: str) -> Tensor:
    return ops.activation(x, "gelu_tanh" if kind == "gelu" else kind)


def means_of_all(ops: Ops, rows: Tensor, batch: Batch, kind: str) -> Tensor:
    return reference.pool(rows, batch.query_lens, kind).mean(0, keepdim=True).expand(len(batch.query_lens), -1)


def norm_linear(backend: Backend, gate: str | None) -> None:
    checks.check_norm_linear(backend, "float32", 3, (8, 16), gate, with_residual=True, biased=True)


OPERATIONS: list[tuple[Ops, Callable[[Backend], None]]] = [
    (mutated(linear=no_bias), lambda backend: checks.check_linear(backend, "float32", 3, (8, 16), True)),
    (mutated(rms_norm=shared_mean), lambda backend: checks.check_norms(backend, "float32", 5, 48, False)),
    (mutated(rms_norm=forgets_residual), lambda backend: checks.check_norms(backend, "float32", 5, 48, True)),
    (mutated(layer_norm=normed_in_place), lambda backend: checks.check_norms(backend, "float32", 5, 48, False)),
    (mutated(norm_linear=forgets_residual_before_norm), lambda backend: norm_linear(backend, None)),
    (mutated(norm_linear=keeps_no_sum), lambda backend: norm_linear(backend, None)),
    (mutated(norm_linear=biases_one_half), lambda backend: norm_linear(backend, "silu")),
    (mutated(rotary=neighbour_pairs), lambda backend: checks.check_rotary(backend, "float32", 5, 4, 2, 16)),
    (mutated(gated=halves_swapped), lambda backend: checks.check_gated(backend, "float32", "silu", 3, 8)),
    (mutated(pool=means_of_all), lambda backend: checks.check_pool(backend, "float32", [3, 1, 4], 8)),
    (mutated(activation=rough_gelu), lambda backend: checks.check_gated(backend, "float32", "gelu", 3, 8)),
]


@pytest.mark.parametrize(("ops", "check"), OPERATIONS)
def test_kit_catches_wrong_operations(ops: Ops, check: Callable[[Backend], None]) -> None:
    check(backend_of(Ops()))
    with pytest.raises(AssertionError):
        check(backend_of(ops))


def top_k_of(change: int) -> Callable[..., Samples]:
    def sample(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
        top_k = params.top_k
        return sampling.sample(logits, params if top_k is None else replace(params, top_k=top_k + change))

    return sample


def never_broken(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    samples = sampling.sample(logits, params)
    return replace(samples, finite=torch.ones_like(samples.finite))


def forgets_bans(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    return sampling.sample(logits, replace(params, banned=None))


def forgets_penalties(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    return sampling.sample(logits, replace(params, penalties=None))


def first_places(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    """Takes the first rows of the table of counts."""
    p = params.penalties
    assert p is not None
    penalties = replace(p, places=torch.arange(len(p.places)) % len(p.counts))
    return sampling.sample(logits, replace(params, penalties=penalties))


def edited_logprobs(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    sampling.adjust(logits, params)
    return sampling.sample(logits, replace(params, penalties=None, bias=None, banned=None))


@pytest.mark.parametrize("sample", [forgets_penalties, first_places, forgets_bans, edited_logprobs])
def test_kit_catches_wrong_edits(sample: Callable[..., Samples]) -> None:
    checks.check_edits(backend_of(Ops()))
    with pytest.raises(AssertionError):
        checks.check_edits(backend_of(mutated(sample=sample)))


def forgets_masks(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    return sampling.sample(logits, replace(params, masked=None))


def masks_the_wrong_rows(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    assert params.masked is not None
    rows, words = params.masked
    return sampling.sample(logits, replace(params, masked=(rows.flip(0), words)))


def forgets_the_highest_bit(ops: Ops, logits: Tensor, params: Sampling) -> Samples:
    assert params.masked is not None
    rows, words = params.masked
    return sampling.sample(logits, replace(params, masked=(rows, words & 0x7FFFFFFF)))


@pytest.mark.parametrize("sample", [forgets_masks, masks_the_wrong_rows, forgets_the_highest_bit])
def test_kit_catches_wrong_masks(sample: Callable[..., Samples]) -> None:
    check_masked(backend_of(Ops()))
    with pytest.raises(AssertionError):
        check_masked(backend_of(mutated(sample=sample)))


@pytest.mark.parametrize("sample", [top_k_of(1), never_broken, forgets_bans])
def test_kit_catches_wrong_sampling(sample: Callable[..., Samples]) -> None:
    checks.check_sampling(backend_of(Ops()))
    with pytest.raises(AssertionError):
        checks.check_sampling(backend_of(mutated(sample=sample)))


class ForgetsWhatIsAsked(Backend):
    """Its graphs were captured with the first sampling of a size, and are replayed with others."""

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        first: dict[int, Sampling] = {}

        def replayed(batch: Batch, given: Sampling | None) -> StepOutput:
            return step(batch, given and first.setdefault(len(batch.query_lens), given))

        return replayed


class LeavesRowsBehind(Backend):
    """Its buffers have room for more requests than there are, and the others' tokens stay in them."""

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        kept: list[Tensor] = []

        def replayed(batch: Batch, given: Sampling | None) -> StepOutput:
            if given is not None:
                kept.append(batch.input_ids)
                batch = replace(batch, input_ids=kept[0][: len(batch.query_lens)])
            return step(batch, given)

        return replayed


@pytest.mark.parametrize("mutant", [ForgetsWhatIsAsked, LeavesRowsBehind])
def test_kit_catches_wrong_replays(mutant: type[Backend]) -> None:
    case = AttentionCase("float32", 16, causal=True, block_size=16)
    check_optimized(backend_of(Ops()), case)
    with pytest.raises(AssertionError):
        check_optimized(mutant(torch.device("cpu"), CpuMemory(), Ops()), case)


class TooFewHandles(CpuMemory):
    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        return super().allocate_kv(kv, blocks)[1:]


class BlocksTooSmall(CpuMemory):
    def block_bytes(self, kv: KVSpec) -> int:
        return super().block_bytes(kv) // 2


class MoreFreeThanThereIs(CpuMemory):
    def free(self) -> int:
        return self.total() + 1


@pytest.mark.parametrize("memory", [TooFewHandles, BlocksTooSmall, MoreFreeThanThereIs])
def test_kit_catches_wrong_memory(memory: type[CpuMemory]) -> None:
    kv = KVSpec(3, 2, 16, 4, "float32")
    checks.check_memory(backend_of(Ops()), kv, blocks=5)
    with pytest.raises(AssertionError):
        checks.check_memory(backend_of(Ops(), memory()), kv, blocks=5)
