"""Choosing ids on the device, without sorting and without the host waiting.

All multiprocessors cut the rows into spans and leave each span's largest logit and mass; then one program a row chooses
by inverting the cumulative distribution in the order of ids, reading again only the spans it needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from anycore.contract.sampling import GREEDY_BELOW
from anycore_cuda.kernels.early import launch_options, let_next_start, wait
from anycore_cuda.kernels.filters import CAPACITY, draw_filtered, mass_of
from anycore_cuda.kernels.launch import launch

SPAN = 128
"""Logits a span holds."""
SPANS = 32
"""Spans of one program: 4,096 logits."""
WARPS = 16


@triton.jit
def _spans(
    logits_ptr, temperature_ptr, best_ptr, mass_ptr, places_ptr, words_ptr, stride, words_stride, vocab, spans,
    greedy_below, MASKED: tl.constexpr, SPAN: tl.constexpr, SPANS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    # Largest logit of each span, and the span's mass relative to it. NaN counts as infinity.
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    at = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    x = tl.load(logits_ptr + row * stride + at, mask=at < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    if MASKED:
        # What a row's mask forbids is struck out, unless it is infinite: that has to be heard of.
        place = tl.load(places_ptr + row).to(tl.int64)
        word = tl.load(words_ptr + place * words_stride + at // 32, mask=(at < vocab) & (place >= 0), other=-1)
        struck = (((word >> (at % 32)) & 1) == 0) & (x < float("inf"))
        x = tl.where(struck, float("-inf"), x)
        tl.store(logits_ptr + row * stride + at, x, mask=struck & (at < vocab))
    best = tl.max(x, axis=1)
    temperature = tl.load(temperature_ptr + row)
    temperature = tl.where(temperature < greedy_below, 1.0, temperature)
    dead = best == float("-inf")
    mass = tl.sum(mass_of(x, tl.where(dead, 0.0, best)[:, None], temperature), axis=1)
    tl.store(best_ptr + row * spans + span, best, mask=span < spans)
    tl.store(mass_ptr + row * spans + span, tl.where(dead, 0.0, mass), mask=span < spans)


@triton.jit
def _draw(row_ptr, bests, masses, best, temperature, uniform, fallback, vocab, SPAN: tl.constexpr, WIDTH: tl.constexpr):
    """The id drawn from all."""
    span = tl.arange(0, WIDTH)
    target = (uniform * tl.sum(masses).to(tl.float64)).to(tl.float32)
    # The span that the draw falls into: the first whose edge lies beyond it; rounding may put it past the last edge.
    here = tl.min(tl.where((tl.cumsum(masses, 0) > target) & (masses > 0), span, WIDTH))
    here = tl.where(here < WIDTH, here, tl.max(tl.where(masses > 0, span, 0)))
    target -= tl.sum(tl.where(span < here, masses, 0.0))
    at = here * SPAN + tl.arange(0, SPAN)
    part = mass_of(tl.load(row_ptr + at, mask=at < vocab, other=float("-inf")), best, temperature)
    found = tl.min(tl.where((tl.cumsum(part, 0) > target) & (part > 0), at, vocab))
    last = tl.max(tl.where(part > 0, at, -1))
    found = tl.where(found < vocab, found, last)
    return tl.where(found >= 0, found, fallback)


@triton.jit(do_not_specialize=["filters", "both_stride"])
def _choose(
    logits_ptr, temperature_ptr, uniform_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, mass_ptr, live_ptr, kept_ptr,
    ids_ptr, finite_ptr, both_stride, stride, vocab, spans, greedy_below, filters,
    FILTERED: tl.constexpr, SPAN: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    span = tl.arange(0, WIDTH)
    bests = tl.load(best_ptr + row * spans + span, mask=span < spans, other=float("-inf"))
    best = tl.max(bests)
    inner = tl.arange(0, SPAN)
    first = tl.min(tl.where(bests == best, span, WIDTH)) * SPAN + inner
    x = tl.load(row_ptr + first, mask=first < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))
    chosen = tl.min(tl.where((x == best) & (first < vocab), first, vocab))
    finite = (best < float("inf")) & (best > float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    if finite & (temperature >= greedy_below):
        masses = tl.load(mass_ptr + row * spans + span, mask=span < spans, other=0.0)
        masses = tl.where(bests == float("-inf"), 0.0, masses * mass_of(bests, best, temperature))
        uniform = tl.load(uniform_ptr + row)
        if FILTERED:
            k = vocab
            p = tl.full([], 1.0, tl.float32)
            floor = tl.full([], 0.0, tl.float32)
            if filters & 1 != 0:
                k = tl.minimum(tl.maximum(tl.load(top_k_ptr + row), 1), vocab).to(tl.int32)
            if filters & 2 != 0:
                p = tl.load(top_p_ptr + row)
            if filters & 4 != 0:
                floor = tl.load(min_p_ptr + row)
            if (k < vocab) | (p < 1.0) | (floor > 0.0):
                chosen = draw_filtered(
                    row_ptr, live_ptr + row * spans, kept_ptr + row * CAPACITY, bests, masses, best, temperature,
                    uniform, k, p, floor, chosen, vocab, SPAN, WIDTH, CAPACITY,
                )  # fmt: skip
            else:
                chosen = _draw(row_ptr, bests, masses, best, temperature, uniform, chosen, vocab, SPAN, WIDTH)
        else:
            chosen = _draw(row_ptr, bests, masses, best, temperature, uniform, chosen, vocab, SPAN, WIDTH)
    tl.store(ids_ptr + row, chosen.to(tl.int64))
    tl.store(ids_ptr + both_stride + row, finite.to(tl.int64))
    tl.store(finite_ptr + row, finite)


def normaliser(logits: Tensor) -> Tensor:
    """[R, V] → [R]: the logarithm of each row's sum of exponents."""
    ones = logits.new_ones(len(logits))
    best, mass = _spans_of(logits, ones, None, early=False)
    top = best.amax(1, keepdim=True)
    return top[:, 0] + (mass * torch.exp(best - top)).sum(1).log()


def _spans_of(
    logits: Tensor, temperature: Tensor, masked: tuple[Tensor, Tensor] | None, early: bool
) -> tuple[Tensor, Tensor]:
    """Largest logit and relative mass of each span, both [R, spans]."""
    rows, vocab = logits.shape
    spans = triton.cdiv(vocab, SPAN)
    best, mass = logits.new_empty(2, rows, spans, dtype=torch.float32).unbind(0)
    places, words = masked if masked is not None else (best, best)
    launch(
        _spans, (rows, triton.cdiv(spans, SPANS)),
        logits, temperature, best, mass, places, words, logits.stride(0), words.stride(0), vocab, spans, GREEDY_BELOW,
        MASKED=masked is not None, SPAN=SPAN, SPANS=SPANS, EARLY=early, num_warps=8, **launch_options(early),
    )  # fmt: skip
    return best, mass


def choose(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    early: bool = False,
    masked: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy where the temperature is 0, else a draw from what top-k, then top-p, then min-p leave; equal logits are
    kept in the order of ids. Returns both in one, [2, R] int64, and `finite` [R] as it is.

    `masked`: places [R] int32 in words [K, ceil(V / 32)] int32, below 0 for rows without one; what a row's words do not
    allow is struck out of its logits first. A row that is allowed nothing is not finite.
    """
    rows, vocab = logits.shape
    best, mass = _spans_of(logits, temperature, masked, early)
    spans = best.shape[1]
    both = logits.new_empty(2, rows, dtype=torch.int64)
    ids = both[0]
    finite = logits.new_empty(rows, dtype=torch.bool)
    filters = (top_k is not None) + 2 * (top_p is not None) + 4 * (min_p is not None)
    live = kept = ids
    if filters:
        live = logits.new_empty(rows, spans, dtype=torch.int32)
        kept = logits.new_empty(rows, CAPACITY, dtype=torch.int32)
    # What is off has a stand-in of its type: one kernel serves all combinations, and none is compiled for a request.
    launch(
        _choose, (rows,),
        logits, temperature, uniforms, ids if top_k is None else top_k,
        temperature if top_p is None else top_p, temperature if min_p is None else min_p,
        best, mass, live, kept, both, finite, rows, logits.stride(0), vocab, spans, GREEDY_BELOW, filters,
        FILTERED=filters > 0, SPAN=SPAN, WIDTH=max(16, triton.next_power_of_2(spans)), CAPACITY=CAPACITY,
        EARLY=early, num_warps=WARPS, **launch_options(early),
    )  # fmt: skip
    return both, finite
