"""How long a step takes: fitted to steps that were measured on a device, or a bound from the device's figures.

Steps that only decode and steps with prompt chunks have a fit each, since devices compute them differently (captured
or not, bound by memory or by arithmetic). A fit is linear in its coefficients, and in rows it is a line with knots.
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from anycore.engine.scheduler import Step
from anycore.errors import ConfigError
from anycore.simulate.measured import Measured, StepTimes

Vector = NDArray[np.float64]
StepTime = Callable[[Step], float]
"""Seconds of a step. It may have a method `launching`, of the same kind: how many the host takes to launch the step."""


def launching_of(step_time: StepTime) -> StepTime | None:
    """The host's share, where it is known."""
    found: StepTime | None = getattr(step_time, "launching", None)
    return found


LAUNCH_BOUND = 0.8
"""Share of a step's seconds that launching it takes, from which on these are the host's rather than the device's."""


# --- fitting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Line:
    """A non-decreasing function of rows, linear between knots, constant below the first, going on above the last."""

    knots: tuple[int, ...]
    values: tuple[float, ...]

    def table(self, most: int) -> list[float]:
        """Its values at 0 … `most` rows."""
        found = np.interp(np.arange(most + 1), self.knots, self.values)
        if len(self.knots) > 1 and most > self.knots[-1]:
            slope = (self.values[-1] - self.values[-2]) / (self.knots[-1] - self.knots[-2])
            further = np.arange(self.knots[-1] + 1, most + 1)
            found[further] = self.values[-1] + slope * (further - self.knots[-1])
        return [float(value) for value in found]


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of the steps of one kind: the line at their rows, and so much for each unit of the other terms."""

    line: Line
    terms: dict[str, float]
    errors: tuple[float, ...]  # relative, of each kind of step that was measured: predicted / median - 1


TERMS: dict[str, Callable[[Measured], float]] = {
    "context": lambda step: float(step.context),
    "requests": lambda step: float(step.decodes + len(step.chunks)),
    "pairs": lambda step: float(sum(pairs(start, rows) for start, rows in step.chunks)),
    "reads": lambda step: float(sum(start + rows for start, rows in step.chunks)),
}
"""Beside rows: tokens that decodes look back on; requests; pairs of a chunk's rows with the tokens they look back on;
tokens of the cache that chunks read."""
DECODES = ("context",)  # rows and requests are the same number there
MIXED = ("requests", "pairs", "reads")


def pairs(start: int, rows: int) -> int:
    return rows * start + rows * (rows + 1) // 2


def fit(steps: Sequence[Measured], terms: Sequence[str], context: float = 0.0) -> Fit:
    """Least squares of relative errors of the medians, no coefficient below 0.

    `context` is what decodes are known to take for each token that they look back on.
    """
    rows = np.array([step.rows for step in steps], dtype=float)
    took = np.array([float(np.median(step.seconds)) for step in steps])
    knots = knots_of(rows)
    edges = list(pairwise(knots))
    ramps = [np.clip((rows - low) / (high - low), 0, 1) for low, high in edges]
    others = [np.array([TERMS[name](step) for step in steps]) for name in terms]
    columns = np.stack([np.ones_like(rows), *ramps, *others], axis=1)
    known = context * np.array([step.context for step in steps], dtype=float)
    found = positive(columns / took[:, None], (took - known) / took)
    values = tuple(float(value) for value in np.cumsum(found[: len(knots)]))
    off = (columns @ found + known) / took - 1
    coefficients = {name: float(value) for name, value in zip(terms, found[len(knots) :], strict=True)}
    return Fit(Line(knots, values), coefficients, tuple(float(value) for value in off))


def waits(step: Measured) -> bool:
    """Whether prompts that came to an idle engine took as long as the host did to launch them.

    That says nothing of what they take behind another step, and `launching` accounts for it.
    """
    if step.decodes or not step.launch:
        return False
    return float(np.median(step.launch)) > LAUNCH_BOUND * float(np.median(step.seconds))


def stairs(steps: Sequence[Measured], most: int) -> list[float]:
    """What launching takes at 0 … `most` rows: that of the next number of rows that was measured.

    There is no line between them: what is replayed up to a size is launched kernel by kernel above it.
    """
    found: dict[int, list[float]] = {}
    for step in steps:
        if step.launch:
            found.setdefault(step.rows, []).append(float(np.median(step.launch)))
    rows = sorted(found)
    if not rows:
        return []
    medians = [float(np.median(found[row])) for row in rows]
    return [medians[min(int(np.searchsorted(rows, row)), len(rows) - 1)] for row in range(most + 1)]


def knots_of(rows: Vector) -> tuple[int, ...]:
    """The least and the most rows, and powers of two between them next to which something was measured."""
    present = sorted({int(row) for row in rows})
    powers = [1 << n for n in range(present[0].bit_length(), present[-1].bit_length())]
    near = [power for power in powers if bisect_right(present, power * 1.4) > bisect_right(present, power / 1.4)]
    return tuple(sorted({present[0], *(p for p in near if present[0] < p < present[-1]), present[-1]}))


def positive(columns: Vector, wanted: Vector) -> Vector:
    """Least squares with no negative coefficient, by Lawson and Hanson's active sets."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1
    a = columns / scale
    count = a.shape[1]
    x = np.zeros(count)
    active = np.zeros(count, dtype=bool)
    for _ in range(10 * count):
        gradient = a.T @ (wanted - a @ x)
        gradient[active] = -np.inf
        best = int(gradient.argmax())
        if gradient[best] <= 1e-10:
            break
        active[best] = True
        while True:
            trial = np.zeros(count)
            trial[active] = np.linalg.lstsq(a[:, active], wanted, rcond=None)[0]
            negative = active & (trial <= 0)
            if not negative.any():
                break
            share = float(np.min(x[negative] / (x[negative] - trial[negative])))
            x = x + share * (trial - x)
            active &= x > 1e-15
        x = trial
    found: Vector = x / scale
    return found


# --- step times ---------------------------------------------------------------------------------------------------


class Fitted:
    """Predicts seconds from two fits. With `noise`, each step is drawn from how far repeated steps lay apart."""

    def __init__(self, times: StepTimes, most_rows: int, noise: bool = True, seed: int = 0) -> None:
        plain = [step for step in times.steps if not step.chunks]
        mixed = [step for step in times.steps if step.chunks]
        if len(plain) < 2 or len(mixed) < 2:
            raise ConfigError(
                f"the step times of {times.model} hold {len(plain)} steps that decode and {len(mixed)} with prompts: "
                "at least two of each are needed",
                param="step_times",
            )
        self.decode = fit(plain, DECODES)
        self._context = self.decode.terms["context"]
        computed = [step for step in mixed if not times.overlap or not waits(step)]
        self.mixed = fit(computed if len(computed) > 1 else mixed, MIXED, self._context)
        self._decode_rows, self._mixed_rows = self.decode.line.table(most_rows), self.mixed.line.table(most_rows)
        self._terms = tuple(self.mixed.terms[name] for name in MIXED)
        self._launches = [stairs(kind, most_rows) if times.overlap else [] for kind in (plain, mixed)]
        spread = [s / float(np.median(step.seconds)) for step in times.steps for s in step.seconds]
        self._noise = spread if noise else []
        self._draw = random.Random(f"{seed} 0").random
        self._seed = seed

    def seeded(self, number: int) -> Fitted:
        """The same for another engine, whose noise is its own."""
        other = copy.copy(self)
        other._draw = random.Random(f"{self._seed} {number}").random
        return other

    def __call__(self, step: Step) -> float:
        decodes = len(step.decodes)
        context = int(step.positions.sum()) + decodes
        if step.chunks:
            per_request, per_pair, per_read = self._terms
            seconds = self._context * context + per_request * (decodes + len(step.chunks))
            rows = decodes
            for chunk in step.chunks:
                rows += chunk.rows
                seconds += per_pair * pairs(chunk.start, chunk.rows) + per_read * (chunk.start + chunk.rows)
            seconds += self._mixed_rows[rows]
        else:
            seconds = self._decode_rows[decodes] + self._context * context
        if self._noise:
            seconds *= self._noise[int(self._draw() * len(self._noise))]
        return seconds

    def launching(self, step: Step) -> float:
        """Seconds of the host; 0 where none were measured, and on devices that compute while they are told to."""
        table = self._launches[1 if step.chunks else 0]
        return table[min(step.rows, len(table) - 1)] if table else 0.0

    def quality(self) -> dict[str, Any]:
        """How well the fits meet what was measured: median and greatest relative error of the medians."""
        found = {}
        for name, one in (("decode", self.decode), ("mixed", self.mixed)):
            errors = np.abs(one.errors)
            found[name] = {"steps": len(errors), "median_error": round(float(np.median(errors)), 4),
                           "max_error": round(float(errors.max()), 4)}  # fmt: skip
        return found


def same(step_time: StepTime, number: int) -> StepTime:
    """One step time for every engine, by its number."""
    return step_time


@dataclass(frozen=True, slots=True)
class Estimated:
    """The least that a step can take on a device of these figures: what it moves, or what it computes."""

    bandwidth: float  # bytes a second
    flops: float  # operations a second
    weight_bytes: float  # read once a step
    token_bytes: float  # of the KV cache
    row_flops: float  # of the matrices, a row
    pair_flops: float  # of attention, for a row and a token that it looks back on

    def __call__(self, step: Step) -> float:
        read = pair = int(step.positions.sum()) + len(step.decodes)
        rows = len(step.decodes)
        for chunk in step.chunks:
            rows += chunk.rows
            read += chunk.start + chunk.rows
            pair += pairs(chunk.start, chunk.rows)
        moved = self.weight_bytes + self.token_bytes * read
        return max(moved / self.bandwidth, (self.row_flops * rows + self.pair_flops * pair) / self.flops)
