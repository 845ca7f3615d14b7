"""Figures of simulated runs: those of `anycore bench serve` for the same requests, and what only a simulation knows."""

from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest

from anycore.bench.client import Outcome
from anycore.bench.report import summarize as measured
from anycore.contract.sizes import Limits
from anycore.engine.scheduler import Step
from anycore.simulate.arrivals import Drawn
from anycore.simulate.engine import Sequence, Settings, VirtualEngine
from anycore.simulate.fleet import Fleet
from anycore.simulate.report import lines, summarize, table, weighted
from anycore.simulate.search import Point, fewest
from anycore.simulate.steptime import StepTime

LIMITS = Limits(8, 64, 256, 8, 101)
SLO = {"ttft": 900.0, "itl": 250.0, "tpot": 120.0}


def seconds(step: Step) -> float:
    return 0.05 + 0.002 * step.rows + 1e-5 * int(step.positions.sum())


def same(number: int) -> StepTime:
    return seconds


def test_figures_are_those_of_bench_serve() -> None:
    """The moments of every token, written down and given to the real report."""
    moments: dict[str, list[float]] = {}

    class Watched(VirtualEngine):
        def _commit(self, step: Step, now: float) -> list[Sequence]:
            for entry in step.entries:
                if entry.last:
                    moments.setdefault(entry.request.id, []).append(now)
            return super()._commit(step, now)

    fleet = Fleet(Settings(LIMITS), [seconds])
    fleet.engines = [Watched(fleet.settings, seconds)]
    kept: list[Sequence] = []
    finish = fleet._finish
    fleet._finish = lambda sequence, now: (kept.append(sequence), finish(sequence, now))[1]  # type: ignore
    found = fleet.run(Drawn(300, rate=1.2, input_len=(5, 120), output_len=(1, 60), prefix_len=16, num_prefixes=2))
    outcomes = []
    for sequence in kept:
        times = moments[sequence.id]
        gaps = [b - a for a, b in pairwise(times)]
        outcomes.append(Outcome(sequence.sent, times[0] - sequence.sent, times[-1] - sequence.sent, gaps,
                                sequence.num_prompt, len(times), 200))  # fmt: skip
    theirs, ours = measured(outcomes, SLO), summarize(found, SLO, 800)
    assert 0.02 < ours["attained"] < 0.98
    assert found.preemptions > 0
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-9), name
    assert ours["attained"] * 300 / ours["duration"] == pytest.approx(ours["request_goodput"])
    assert 0 < ours["mean_kv_use"] <= ours["max_kv_use"] <= 1
    assert 0 < ours["prefix_hit_share"] < 1
    assert 0 < ours["mean_running"] <= 8
    assert 0.5 < ours["busy"] <= 1


def test_weighted_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    values = np.array(sorted(rng.random() for _ in range(50)))
    counts = np.array([rng.randrange(0, 5) for _ in range(50)])
    every = np.repeat(values, counts)
    for share in (0, 1, 37.5, 50, 90, 99, 100):
        assert weighted(values, counts, share) == pytest.approx(np.percentile(every, share))


def test_a_price_is_paid_for_every_device_and_second() -> None:
    about = {"request_rate": 3.0}
    point = Point(Drawn(60, 3.0, input_len=(8, 32), output_len=(8, 16)), Settings(LIMITS), same, about, {}, replicas=2,
                  price=36.0, ranks=4)  # fmt: skip
    row = point.run()
    assert row["devices"] == 8
    assert row["price_per_hour"] == 8 * 36.0
    paid = 8 * 36.0 / 3600 * row["duration"]
    assert row["cost_per_million_output_tokens"] == pytest.approx(1e6 * paid / row["total_output_tokens"], rel=1e-3)
    every = row["total_output_tokens"] + row["total_input_tokens"]
    assert row["cost_per_million_tokens"] == pytest.approx(1e6 * paid / every, rel=1e-3)
    text = "\n".join([*lines(row), *table([row])])
    assert "8 devices" in text
    assert "nan" not in text


def test_the_fewest_engines_are_found() -> None:
    load = Drawn(400, 12.0, input_len=(8, 64), output_len=(8, 32))
    point = Point(load, Settings(LIMITS), same, {"request_rate": 12.0}, {"ttft": 400.0})
    row, tried = fewest(point, 0.95)
    assert row is not None
    count = row["replicas"]
    assert count > 1
    assert row["attained"] >= 0.95 > point.run(count - 1)["attained"]
    assert len({one["replicas"] for one in tried}) == len(tried) < 8
    hopeless, tried = fewest(Point(load, Settings(LIMITS), same, {"request_rate": 12.0}, {"ttft": 1.0}), 0.95)
    assert hopeless is None
    assert tried[-1]["replicas"] <= 64


def test_nothing_but_requests_that_are_too_long_is_told() -> None:
    row = Point(Drawn(5, 1.0, input_len=(300, 300)), Settings(LIMITS), same, {"request_rate": 1.0}, SLO).run()
    assert (row["completed"], row["failed"], row["too_long"]) == (0, 5, 5)
    assert "longer than the model takes" in "\n".join(lines(row))
