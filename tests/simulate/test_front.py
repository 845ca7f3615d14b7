"""Fronts under the virtual clock: what they add to what engines do, how they fall behind, and how many a load takes."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest

from anycore.contract.sizes import Limits
from anycore.engine.scheduler import Step
from anycore.simulate.arrivals import Conversation, Drawn, Turn
from anycore.simulate.engine import Settings
from anycore.simulate.fleet import Fleet
from anycore.simulate.front import BEFORE, BETWEEN, ENTERING, Connections
from anycore.simulate.measured import FrontTimes
from anycore.simulate.report import lines, summarize
from anycore.simulate.search import Point
from anycore.simulate.steptime import StepTime

SETTINGS = Settings(Limits(16, 256, 512, 8, 401))
TIMES = FrontTimes(request=2e-3, prompt=1e-6, wake=1e-4, chunk=8e-5, token=1e-5)
NOTHING = FrontTimes()


def seconds(step: Step) -> float:
    return 0.01 + 0.0001 * step.rows


def quick(step: Step) -> float:
    return 0.0008 + 0.00001 * step.rows


def of(step_time: StepTime) -> Any:
    return lambda number: step_time


def drawn(rate: float, count: int = 150, **more: Any) -> Drawn:
    return Drawn(count, rate, input_len=(8, 64), output_len=(4, 32), prefix_len=16, num_prefixes=3, **more)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("load", [drawn(40.0), drawn(math.inf), drawn(8.0, turns=(1, 3))], ids=["rate", "all", "talks"])
@pytest.mark.parametrize("places", [None, 5])
def test_fronts_that_take_no_time_change_nothing(load: Drawn, overlap: bool, places: int | None) -> None:
    settings = Settings(SETTINGS.limits, overlap)
    plain = summarize(Fleet(settings, [seconds], most_open=places).run(load), {"itl": 18.0}, 100)
    for fronts in (1, 3):
        shown = summarize(Fleet(settings, [seconds], NOTHING, fronts, most_open=places).run(load), {"itl": 18.0}, 100)
        for name, value in plain.items():
            assert shown[name] == pytest.approx(value, rel=1e-9, abs=2e-3 if "itl" in name else 1e-9), name


def test_the_same_load_gives_the_same_figures() -> None:
    def run() -> dict[str, Any]:
        return Point(drawn(60.0), SETTINGS, of(seconds), {"request_rate": 60.0}, {}, front=TIMES, fronts=3).run()

    assert run() == run()


def test_a_request_alone_takes_what_it_takes() -> None:
    """Its stages, the steps, what the front takes for each token, and its end."""
    talk = Conversation(0.0, [Turn(range(1000, 1010), 3)])
    found = Fleet(SETTINGS, [seconds], TIMES, delay=0.5).run([talk])
    whole = TIMES.request + 10 * TIMES.prompt
    piece = TIMES.wake + TIMES.token + TIMES.chunk
    entered = BEFORE * whole + 0.5
    assert found.first[0] == pytest.approx(entered + 0.011 + piece + BETWEEN * whole)
    assert found.end[0] == pytest.approx(entered + 0.011 + 2 * 0.0101 + piece + (1 - BEFORE - BETWEEN) * whole)
    assert found.fronts[0].busy == pytest.approx(whole + 3 * piece)
    assert found.longest[0] == pytest.approx(0.0101)


def test_what_comes_before_the_first_piece_is_sent_right_after_it() -> None:
    """Steps are faster than an answer's opening: its first piece is one token, its second all that came meanwhile."""
    talk = Conversation(0.0, [Turn(range(1000, 1010), 9)])
    found = Fleet(SETTINGS, [lambda step: 1e-4], FrontTimes(request=0.1, chunk=1e-3)).run([talk])
    front = found.fronts[0]
    assert (front.tokens, front.chunks) == (9, 2)
    assert found.longest[0] == pytest.approx(1e-3)
    assert found.end[0] == pytest.approx(0.1 + 1e-4 + 2e-3)


def test_requests_that_come_together_are_ready_together() -> None:
    """Each stage of each comes in turn, so that the first is ready little before the last."""
    talks = [Conversation(0.0, [Turn(range(1000 * n, 1000 * n + 10), 1)]) for n in range(1, 9)]
    fleet = Fleet(SETTINGS, [seconds], FrontTimes(request=1.0))
    entered: list[float] = []
    send = fleet.engines[0].send
    fleet.engines[0].send = lambda sequence, now: (entered.append(now), send(sequence, now))[1]  # type: ignore
    fleet.run(talks)
    assert entered[-1] == pytest.approx(8 * BEFORE)
    assert entered[-1] - entered[0] == pytest.approx(7 * BEFORE / ENTERING)


def test_a_front_that_is_late_sends_fewer_longer_pieces() -> None:
    """Steps come faster than their tokens can be sent: every token arrives, several at a time, and gaps grow."""
    load = drawn(math.inf, 64)
    free = summarize(Fleet(SETTINGS, [quick]).run(load), {}, 100)
    found = Fleet(SETTINGS, [quick], TIMES).run(load)
    late = summarize(found, {}, 100)
    front = found.fronts[0]
    assert front.tokens == late["total_output_tokens"] == free["total_output_tokens"]
    assert front.chunks < 0.7 * front.tokens
    assert sum(front.gaps.values()) == front.chunks - 64
    assert late["median_itl_ms"] > 1.5 * free["median_itl_ms"]
    assert late["output_throughput"] < free["output_throughput"]


def test_more_fronts_and_faster_ones_answer_no_fewer() -> None:
    """Metamorphic: doubling the processes, or halving what they take, never lowers throughput."""
    for places in (None, 12):
        load = drawn(math.inf, 200)
        free = summarize(Fleet(SETTINGS, [quick], most_open=places).run(load), {}, 100)["output_throughput"]
        for change in ("fronts", "speed"):
            rates = []
            for factor in (1, 2, 4, 8):
                times = FrontTimes(*(getattr(TIMES, name) / factor for name in TIMES.__struct_fields__))
                fronts, times = (factor, TIMES) if change == "fronts" else (1, times)
                found = Fleet(SETTINGS, [quick], times, fronts, most_open=places).run(load)
                rates.append(summarize(found, {}, 100)["output_throughput"])
            assert all(later >= 0.995 * earlier for earlier, later in pairwise(rates)), rates
            assert rates[-1] > 1.3 * rates[0]
            assert max(rates) <= 1.001 * free


def test_a_clock_that_runs_slower_changes_no_figure_but_its_unit() -> None:
    """Metamorphic: arrivals, steps and fronts all ten times as long."""
    slow = FrontTimes(*(10 * getattr(TIMES, name) for name in TIMES.__struct_fields__))
    one = summarize(Fleet(SETTINGS, [seconds], TIMES, 2).run(drawn(50.0)), {}, 100)
    ten = summarize(Fleet(SETTINGS, [lambda step: 10 * seconds(step)], slow, 2).run(drawn(5.0)), {}, 100)
    for name in ("duration", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms", "p99_e2el_ms"):
        assert ten[name] == pytest.approx(10 * one[name], rel=1e-3), name
    assert ten["max_concurrent_requests"] == one["max_concurrent_requests"]


def test_it_is_said_that_the_front_is_the_limit_and_how_many_would_do() -> None:
    point = Point(drawn(math.inf, 300), SETTINGS, of(quick), {"request_rate": None}, {}, front=TIMES)
    row = point.run()
    assert row["front_limits"]
    assert row["front_busy"] > 0.9
    needed = row["fronts_needed"]
    assert needed > 1
    text = "\n".join(lines(row))
    assert f"take {needed} processes (--api-servers)" in text
    many = Point(drawn(math.inf, 300), SETTINGS, of(quick), {"request_rate": None}, {}, front=TIMES, fronts=2 * needed)
    better = many.run()
    assert better["output_throughput"] > 1.2 * row["output_throughput"]
    assert better["fronts_needed"] == pytest.approx(needed, abs=1)
    calm = Point(drawn(10.0, 100), SETTINGS, of(seconds), {"request_rate": 10.0}, {}, front=TIMES).run()
    assert not calm["front_limits"]
    assert calm["fronts_needed"] == 1
    assert "the front is the limit" not in "\n".join(lines(calm))


def test_clients_keep_their_connections() -> None:
    connections = Connections(4)
    taken = [connections.take() for _ in range(40)]
    assert set(taken) == {0, 1, 2, 3}
    for front in taken[:5]:
        connections.give_back(front)
    assert [connections.take() for _ in range(5)] == taken[:5]
