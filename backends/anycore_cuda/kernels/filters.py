"""Top-k, top-p and min-p of one row by one program, without sorting: the smallest logit that stays is searched for.

The search runs over integers that sort as the logits do. What the row's spans tell bounds it from below, so that only
spans with a logit above that bound are read again; a few marks at a time narrow it until the logits between two of them
fit into registers, where bisection ends it. Every sum has a fixed order: equal rows give equal ids in any company.
"""

from __future__ import annotations

import triton
import triton.language as tl

CAPACITY = 2048
"""Logits that are searched in registers."""
GROUP = tl.constexpr(4096)
"""Logits that are read at a time."""
MARKS = tl.constexpr(8)
"""Places that a pass over the row weighs."""
NEAR = tl.constexpr(1 << 16)
"""The bound need not be closer than this, in units in the last place: passes over the row narrow faster."""
FADED = tl.constexpr(-87.0)
"""Powers of smaller exponents are 0 beside 1, whatever their number: such logits are neither drawn nor summed."""
LEAST = tl.constexpr(1e-37)
"""Smaller shares are taken for this one, which keeps the best id alone (top-p) or keeps all (min-p)."""


@triton.jit
def mass_of(x, best, temperature):
    return tl.exp((x - best) / temperature)


@triton.jit
def _key(x):
    # Integers that sort as the floats do, both zeros being one.
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _value(key):
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@triton.jit
def _bound(bests, masses, best, temperature, k, p, floor, vocab, SPAN: tl.constexpr):
    """A key that no kept id lies below, as far as spans alone can tell.

    Top-k: if k spans reach a key, so do k ids. Where it is off, the mass that top-p divides is known, and that mass
    less what lies below a key must be enough: below it are at most the spans below it and, of each other span, all ids
    but the best one, each weighing less than the key does.
    """
    keys = _key(bests)
    top = mass_of(bests, best, temperature)
    rest = tl.maximum(masses - top, 0.0)
    spare = (1.0 - p) * tl.sum(masses)
    lowest = best + temperature * FADED
    if k >= vocab:
        lowest = tl.maximum(lowest, best + temperature * tl.log(tl.maximum(floor, LEAST)))
    low = _key(lowest).to(tl.int64)
    high = _key(best).to(tl.int64)
    while high - low > NEAR:
        middle = (low + high) >> 1
        reach = keys >= middle.to(tl.int32)
        if k < vocab:
            enough = tl.sum(reach.to(tl.int32)) >= k
        else:
            each = (SPAN - 1) * mass_of(_value(middle.to(tl.int32)), best, temperature)
            enough = tl.sum(tl.where(reach, tl.minimum(rest, each), masses)) <= spare
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _group(row_ptr, live_ptr, first, live, vocab, SPAN: tl.constexpr):
    """The ids and logits of a group of live spans; -inf where there are none."""
    lane = tl.arange(0, GROUP)
    place = first + lane // SPAN
    span = tl.load(live_ptr + place, mask=place < live, other=0)
    at = span * SPAN + lane % SPAN
    there = (place < live) & (at < vocab)
    return at, there, tl.load(row_ptr + at, mask=there, other=float("-inf"))


@triton.jit
def _weigh(row_ptr, live_ptr, live, marks, best, temperature, vocab, SPAN: tl.constexpr, COUNT: tl.constexpr):
    """How many ids reach each of the marks [COUNT], and their mass."""
    number = tl.zeros([COUNT], tl.int32)
    mass = tl.zeros([COUNT], tl.float32)
    for first in range(0, live, GROUP // SPAN):
        _, there, x = _group(row_ptr, live_ptr, first, live, vocab, SPAN)
        reach = (_key(x)[None, :] >= marks[:, None]) & there[None, :]
        number += tl.sum(reach.to(tl.int32), axis=1)
        mass += tl.sum(tl.where(reach, mass_of(x, best, temperature)[None, :], 0.0), axis=1)
    return number, mass


@triton.jit
def _collect(row_ptr, live_ptr, kept_ptr, live, low, high, vocab, SPAN: tl.constexpr, CAPACITY: tl.constexpr):
    """The keys from `low` up to `high`, in registers; the least integer fills the rest."""
    tl.debug_barrier()  # whatever was here before has been read
    found = 0
    for first in range(0, live, GROUP // SPAN):
        _, there, x = _group(row_ptr, live_ptr, first, live, vocab, SPAN)
        key = _key(x)
        inside = ((key >= low) & (key < high) & there).to(tl.int32)
        place = found + tl.cumsum(inside, 0) - 1
        tl.store(kept_ptr + place, key, mask=(inside > 0) & (place < CAPACITY))
        found += tl.sum(inside)
    tl.debug_barrier()
    slot = tl.arange(0, CAPACITY)
    return tl.load(kept_ptr + slot, mask=slot < found, other=-2147483648)


@triton.jit
def _search(
    row_ptr, live_ptr, kept_ptr, live, low, wanted, by_mass, best, temperature, vocab,
    SPAN: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The largest key, from `low` on, whose ids and better ones reach `wanted` in mass or number; else `low`."""
    high = _key(best).to(tl.int64) + 1
    beyond = 0.0  # weight of what reaches `high`
    above = 0  # and its number
    reached = live * SPAN  # at most so many reach `low`
    index = tl.arange(0, MARKS)
    again = high - low > 1
    while again:
        step = tl.maximum((high - low) // MARKS, 1)
        marks = tl.minimum(low + step * (index + 1), high)
        number, mass = _weigh(row_ptr, live_ptr, live, marks.to(tl.int32), best, temperature, vocab, SPAN, MARKS)
        weight = tl.where(by_mass, mass, number.to(tl.float32))
        passed = tl.sum((weight >= wanted).to(tl.int32))
        if passed < MARKS:
            high = tl.sum(tl.where(index == passed, marks, 0))
            beyond = tl.sum(tl.where(index == passed, weight, 0.0))
            above = tl.sum(tl.where(index == passed, number, 0))
        if passed > 0:
            low = tl.sum(tl.where(index == passed - 1, marks, 0))
            reached = tl.sum(tl.where(index == passed - 1, number, 0))
        again = (reached - above > CAPACITY) & (high - low > 1)
    keys = _collect(row_ptr, live_ptr, kept_ptr, live, low, high, vocab, SPAN, CAPACITY)
    each = tl.where(by_mass, mass_of(_value(keys), best, temperature), 1.0)
    while high - low > 1:
        middle = (low + high) >> 1
        weight = beyond + tl.sum(tl.where(keys >= middle, each, 0.0))
        low = tl.where(weight >= wanted, middle, low)
        high = tl.where(weight >= wanted, high, middle)
    return low


@triton.jit
def _around(row_ptr, live_ptr, live, limit, best, temperature, vocab, SPAN: tl.constexpr):
    """How many ids lie above a key and at it, and the mass above."""
    pair = tl.arange(0, 2)
    number, mass = _weigh(row_ptr, live_ptr, live, (limit + pair).to(tl.int32), best, temperature, vocab, SPAN, 2)
    above = tl.sum(tl.where(pair == 1, number, 0))
    return above, tl.sum(number) - 2 * above, tl.sum(tl.where(pair == 1, mass, 0.0))


@triton.jit
def draw_filtered(
    row_ptr, live_ptr, kept_ptr, bests, masses, best, temperature, uniform, k, p, floor, fallback, vocab,
    SPAN: tl.constexpr, WIDTH: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    """The id drawn from what stays; `vocab` and 1 and 0 switch top-k, top-p and min-p off."""
    low = _bound(bests, masses, best, temperature, k, p, floor, vocab, SPAN)
    alive = (_key(bests) >= low).to(tl.int32)
    tl.store(live_ptr + tl.cumsum(alive, 0) - 1, tl.arange(0, WIDTH), mask=alive > 0)
    live = tl.sum(alive)
    tl.debug_barrier()
    limit = low  # what lies above stays, and of what equals it the first `ties`
    ties = vocab
    total = tl.sum(masses)
    for stage in range(2):
        by_mass = stage == 1  # top-p, of what top-k has left
        if (by_mass & (p < 1.0)) | ((stage == 0) & (k < vocab)):
            wanted = tl.where(by_mass, tl.maximum(p * total, LEAST), k.to(tl.float32))
            found = _search(
                row_ptr, live_ptr, kept_ptr, live, limit, wanted, by_mass, best, temperature, vocab, SPAN, CAPACITY
            )
            above, equal, mass = _around(row_ptr, live_ptr, live, found, best, temperature, vocab, SPAN)
            one = mass_of(_value(found.to(tl.int32)), best, temperature)
            fit = tl.where(by_mass, tl.ceil((wanted - mass) / one), (k - above).to(tl.float32))
            fit = tl.maximum(tl.minimum(fit, equal.to(tl.float32)).to(tl.int32), 1)
            ties = tl.where(found == limit, tl.minimum(ties, fit), fit)
            limit = found
            total = mass + ties * one
    least = _key(best + temperature * tl.log(tl.maximum(floor, LEAST))).to(tl.int64)
    ties = tl.where(least > limit, vocab, ties)
    limit = tl.maximum(limit, least)
    above, equal, mass = _around(row_ptr, live_ptr, live, limit, best, temperature, vocab, SPAN)
    total = mass + tl.minimum(ties, equal) * mass_of(_value(limit.to(tl.int32)), best, temperature)
    target = (uniform * total.to(tl.float64)).to(tl.float32)
    passed = 0.0
    used = 0
    chosen = vocab
    last = fallback
    for first in range(0, live, GROUP // SPAN):
        at, there, x = _group(row_ptr, live_ptr, first, live, vocab, SPAN)
        key = _key(x)
        tie = ((key == limit) & there).to(tl.int32)
        kept = ((key > limit) & there) | ((tie > 0) & (used + tl.cumsum(tie, 0) <= ties))
        part = tl.where(kept, mass_of(x, best, temperature), 0.0)
        chosen = tl.minimum(chosen, tl.min(tl.where((passed + tl.cumsum(part, 0) > target) & (part > 0), at, vocab)))
        highest = tl.max(tl.where(part > 0, at, -1))
        last = tl.where(highest >= 0, highest, last)  # rounding may put the draw past the last edge
        passed += tl.sum(part)
        used += tl.sum(tie)
    return tl.where(chosen < vocab, chosen, last)
