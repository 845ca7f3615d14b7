"""Choosing ids on the device, without sorting and without the host waiting.

Plain draws cut each row into chunks, so that one row fills many multiprocessors; top-k, top-p and min-p look for the
smallest logit that stays, by bisection on its bits. Both invert the cumulative distribution in the order of ids.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.sampling import GREEDY_BELOW
from anycore_cuda.kernels.launch import launch

CHUNK = 4096
WIDE = 8192


@triton.jit
def _exp(x, best, temperature):
    return tl.exp((x - best) / temperature)


@triton.jit
def _chunks(
    logits_ptr, temperature_ptr, best_ptr, sum_ptr, place_ptr, stride, vocab, greedy_below, CHUNK: tl.constexpr
):
    # Largest logit of a chunk, where it is, and the chunk's sum of exponents relative to it. NaN counts as infinity.
    row = tl.program_id(0)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    best = tl.max(x)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature < greedy_below, 1.0, temperature)
    dead = best == float("-inf")
    total = tl.sum(_exp(x, tl.where(dead, 0.0, best), temperature))
    to = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_ptr + to, best)
    tl.store(sum_ptr + to, tl.where(dead, 0.0, total))
    tl.store(place_ptr + to, tl.min(tl.where(x == best, at, vocab)))


@triton.jit
def _choose(
    logits_ptr, temperature_ptr, uniform_ptr, best_ptr, sum_ptr, place_ptr, ids_ptr, finite_ptr,
    stride, vocab, chunks, greedy_below, CHUNK: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    bests = tl.load(best_ptr + row * chunks + chunk, mask=there, other=float("-inf"))
    best = tl.max(bests)
    first = tl.min(tl.where(bests == best, chunk, CHUNKS))
    chosen = tl.load(place_ptr + row * chunks + first)
    finite = (best < float("inf")) & (best > float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if finite & (temperature >= greedy_below):
        sums = tl.load(sum_ptr + row * chunks + chunk, mask=there, other=0.0)
        mass = tl.where(bests == float("-inf"), 0.0, sums * _exp(bests, best, temperature))
        edges = tl.cumsum(mass, 0)
        target = (tl.load(uniform_ptr + row) * tl.sum(mass).to(tl.float64)).to(tl.float32)
        # The chunk that the draw falls into: the first whose edge lies beyond it.
        here = tl.min(tl.where((edges > target) & (mass > 0), chunk, CHUNKS))
        if here < CHUNKS:
            target -= tl.sum(tl.where(chunk < here, mass, 0.0))
            at = here * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits_ptr + row.to(tl.int64) * stride + at, mask=at < vocab, other=float("-inf"))
            part = _exp(x.to(tl.float32), best, temperature)
            found = tl.min(tl.where((tl.cumsum(part, 0) > target) & (part > 0), at, vocab))
            # Rounding may put the draw past the last edge: then the chunk's last living id.
            last = tl.max(tl.where(part > 0, at, -1))
            found = tl.where(found < vocab, found, last)
            chosen = tl.where(found >= 0, found, chosen)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(finite_ptr + row, finite)


@triton.jit
def _order(x):
    # Integers that sort as the floats do.
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _above(row_ptr, key, best, temperature, vocab, BLOCK: tl.constexpr):
    # How many ids have at least this key, and their mass.
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        inside = (_order(x) >= key) & (at < vocab)
        count += inside.to(tl.int32)
        mass += tl.where(inside, _exp(x, best, temperature), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _filtered(
    logits_ptr, temperature_ptr, uniform_ptr, top_k_ptr, top_p_ptr, min_p_ptr, ids_ptr, finite_ptr,
    stride, vocab, greedy_below, TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    bests = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        bests = tl.maximum(bests, tl.where(x == x, x, float("inf")))
    best = tl.max(bests)
    finite = (best < float("inf")) & (best > float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature < greedy_below
    temperature = tl.where(greedy, 1.0, temperature)
    limit = _order(best)  # greedy: the maximum alone, its first place
    ties = 1
    if finite & (temperature == temperature) & (not greedy):
        lowest = _order(tl.full([], float("-inf"), tl.float32))
        limit = lowest
        ties = vocab
        if TOP_K:
            k = tl.load(top_k_ptr + row).to(tl.int32)
            if k < vocab:
                low = lowest.to(tl.int64)
                high = _order(best).to(tl.int64)
                while low < high:  # the largest key that at least k ids reach
                    middle = (low + high + 1) >> 1
                    count, _ = _above(row_ptr, middle.to(tl.int32), best, temperature, vocab, BLOCK)
                    low = tl.where(count >= k, middle, low)
                    high = tl.where(count >= k, high, middle - 1)
                limit = low.to(tl.int32)
                count, _ = _above(row_ptr, limit + 1, best, temperature, vocab, BLOCK)
                ties = k - count
        if TOP_P:
            p = tl.load(top_p_ptr + row)
            if p < 1.0:
                _, mass = _above(row_ptr, limit + 1, best, temperature, vocab, BLOCK)
                count_at, mass_at = _above(row_ptr, limit, best, temperature, vocab, BLOCK)
                one = _exp(_value(limit), best, temperature)
                wanted = p * tl.where(ties < count_at, tl.minimum(mass + ties * one, mass_at), mass_at)
                low = limit.to(tl.int64)
                high = _order(best).to(tl.int64)
                while low < high:  # the largest key whose ids and better ones reach the wanted mass
                    middle = (low + high + 1) >> 1
                    _, reached = _above(row_ptr, middle.to(tl.int32), best, temperature, vocab, BLOCK)
                    low = tl.where(reached >= wanted, middle, low)
                    high = tl.where(reached >= wanted, high, middle - 1)
                _, mass = _above(row_ptr, low.to(tl.int32) + 1, best, temperature, vocab, BLOCK)
                one = _exp(_value(low.to(tl.int32)), best, temperature)
                fit = tl.ceil(tl.minimum((wanted - mass) / one, vocab * 1.0)).to(tl.int32)
                fit = tl.maximum(fit, 1)
                ties = tl.where(low == limit, tl.minimum(ties, fit), fit)
                limit = low.to(tl.int32)
        floor = tl.load(min_p_ptr + row) if MIN_P else 0.0
    else:
        floor = 0.0

    total = tl.zeros([], tl.float32)
    used = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        key = _order(x)
        tie = (key == limit) & (at < vocab)
        kept = ((key > limit) & (at < vocab)) | (tie & (used + tl.cumsum(tie.to(tl.int32), 0) <= ties))
        part = _exp(x, best, temperature)
        total += tl.sum(tl.where(kept & (part >= floor), part, 0.0))
        used += tl.sum(tie.to(tl.int32))
    target = (tl.load(uniform_ptr + row) * total.to(tl.float64)).to(tl.float32)
    passed = 0.0
    used = 0
    chosen = vocab
    last = 0
    for start in range(0, vocab, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_ptr + at, mask=at < vocab, other=float("-inf"))
        key = _order(x)
        tie = (key == limit) & (at < vocab)
        kept = ((key > limit) & (at < vocab)) | (tie & (used + tl.cumsum(tie.to(tl.int32), 0) <= ties))
        part = _exp(x, best, temperature)
        part = tl.where(kept & (part >= floor), part, 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where((passed + tl.cumsum(part, 0) > target) & (part > 0), at, vocab)))
        last = tl.maximum(last, tl.max(tl.where(part > 0, at, 0)))
        passed += tl.sum(part)
        used += tl.sum(tie.to(tl.int32))
    tl.store(ids_ptr + row, tl.where(chosen < vocab, chosen, last).to(tl.int64))
    tl.store(finite_ptr + row, finite)


def choose(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Greedy where the temperature is 0, else a draw from the whole distribution: ids and `finite`, both [R]."""
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, CHUNK)
    best, total = logits.new_empty(2, rows, chunks, dtype=torch.float32).unbind(0)
    place = logits.new_empty(rows, chunks, dtype=torch.int32)
    ids, finite = _outputs(logits)
    stride = logits.stride(0)
    launch(
        _chunks, (rows, chunks),
        logits, temperature, best, total, place, stride, vocab, GREEDY_BELOW, CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    launch(
        _choose, (rows,),
        logits, temperature, uniforms, best, total, place, ids, finite, stride, vocab, chunks, GREEDY_BELOW,
        CHUNK=CHUNK, CHUNKS=triton.next_power_of_2(chunks), num_warps=8,
    )  # fmt: skip
    return ids, finite


def choose_filtered(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """As `choose`, from what top-k, then top-p, then min-p leave; equal logits are kept in the order of ids."""
    rows, vocab = logits.shape
    ids, finite = _outputs(logits)
    off = temperature
    launch(
        _filtered, (rows,),
        logits, temperature, uniforms,
        off if top_k is None else top_k, off if top_p is None else top_p, off if min_p is None else min_p,
        ids, finite, logits.stride(0), vocab, GREEDY_BELOW,
        TOP_K=top_k is not None, TOP_P=top_p is not None, MIN_P=min_p is not None, BLOCK=WIDE, num_warps=16,
    )  # fmt: skip
    return ids, finite


def _outputs(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = logits.new_empty(len(logits), dtype=torch.int64)
    return ids, logits.new_empty(len(logits), dtype=torch.bool)
