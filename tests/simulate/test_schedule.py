"""A simulated engine schedules what the real one does: the same rows of the same requests at the same moments.

The real engine runs a tiny model under the same virtual clock: launching a step sets the moment at which its results
are there, and collecting them moves the clock to it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import engine as real_engine
from engines import request
from simulate.virtual import Paced

from anycore.config import ModelConfig
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.engine import Engine
from anycore.engine.scheduler import Scheduler, Step
from anycore.errors import Overloaded
from anycore.simulate.arrivals import PRIVATE, Conversation, Turn
from anycore.simulate.engine import Sequence, Settings, VirtualEngine
from anycore.simulate.fleet import Fleet
from anycore.simulate.steptime import StepTime

Log = list[tuple[float, list[tuple[str, int, int]]]]


def seconds(step: Step) -> float:
    """Some function of all that a step is made of."""
    return 1.0 + 0.01 * step.rows + 0.001 * int(step.positions.sum()) + 0.1 * len(step.chunks)


def launching(step: Step) -> float:
    """Of the host: sometimes longer than the step before takes, and than the step itself."""
    return 0.05 + 4.0 * len(step.chunks)


class Launched:
    """Seconds of steps that the host takes its time to launch."""

    launching = staticmethod(launching)

    def __call__(self, step: Step) -> float:
        return seconds(step)


def watch(scheduler: Scheduler, log: Log, clock: Any) -> None:
    """Note what is scheduled and when: the name, the first row and the rows of each entry."""
    schedule = scheduler.schedule

    def noted() -> Step:
        step = schedule()
        if step.rows:
            log.append((round(clock(), 6), [(entry.request.id, entry.start, entry.rows) for entry in step.entries]))
        return step

    scheduler.schedule = noted  # type: ignore[method-assign]


def run_real(
    made: Engine, talks: list[Conversation], host: Callable[[Step], float] = lambda step: 0.0
) -> tuple[Log, dict[str, float], int]:
    """What the real engine schedules, when each request ended, and how many it refused."""
    paced = Paced(made.runner, seconds, host)
    made.runner, made._clock = paced, lambda: paced.now  # type: ignore[assignment]
    log: Log = []
    watch(made.scheduler, log, lambda: paced.now)
    ended: dict[str, float] = {}
    refused = 0
    left = deque(enumerate(talks, 1))
    while left or made.has_work():
        while left and left[0][1].at <= paced.now:
            number, talk = left.popleft()
            tokens = [random.Random(token).randrange(5, 400) for token in talk.turns[0].tokens]
            try:
                made.add(request(str(number), tokens, max_tokens=talk.turns[0].output, priority=talk.priority))
            except Overloaded:
                refused += 1
        if made.has_work():
            ended |= {delta.id: round(paced.now, 6) for delta in made.step() if delta.finish}
        elif left:
            paced.now = left[0][1].at
    return log, ended, refused


def run_simulated(
    settings: Settings, talks: list[Conversation], step_time: StepTime = seconds
) -> tuple[Log, list[float], Fleet]:
    fleet = Fleet(settings, [step_time])
    log: Log = []
    engine = fleet.engines[0]
    watch(engine.scheduler, log, lambda: engine.next_turn)
    outcomes = fleet.run(talks)
    engine.pool.check()
    return log, [round(end, 6) for end in outcomes.end], fleet


def talks_of(seed: int, count: int = 32, longest: int = 60, every: float = 3.0) -> list[Conversation]:
    """Requests of which some share beginnings, and of which some come together."""
    rng = random.Random(seed)
    at, free, talks = 0.0, PRIVATE, []
    for _ in range(count):
        at += rng.choice((0.0, 0.0, rng.expovariate(1 / every), rng.expovariate(1 / every)))
        shared = rng.choice((0, 0, 8, 20, 36))
        family = 1000 * rng.randrange(2)
        own = rng.randrange(1, longest - shared)
        tokens = [*range(family, family + shared), *range(free, free + own)]
        free += own
        talks.append(Conversation(at, [Turn(tokens, rng.randrange(1, 30))], priority=rng.randrange(3)))
    return talks


TOKEN = 1024
"""Bytes of the cache that a token takes."""

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 12, "max_num_seqs": 5},
    "preempted": {"kv_cache_memory": 9 * 16 * TOKEN, "max_model_len": 96},
    "small blocks": {"block_size": 4, "kv_cache_memory": 30 * 4 * TOKEN, "max_model_len": 96},
    "without a prefix cache": {"kv_cache_memory": 9 * 16 * TOKEN, "max_model_len": 96, "enable_prefix_caching": False},
    "priority": {"scheduling_policy": "priority", "max_num_seqs": 3},
    "short first": {"scheduling_policy": "short-first", "max_num_seqs": 3},
    "refused": {"max_num_seqs": 2, "max_queued": 3},
}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_lm(tmp_path_factory.mktemp("small"), layers=1)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
@pytest.mark.parametrize("name", CASES)
def test_the_schedule_is_the_real_engines(small: Path, name: str, overlap: bool) -> None:
    made = real_engine(small, overlap=overlap, **CASES[name])
    assert made.runner.model.spec.kv(16, "float32").bytes_per_token == TOKEN
    config = ModelConfig(model="", **CASES[name])
    settings = Settings(
        made.limits, overlap, config.enable_prefix_caching, config.scheduling_policy, True, config.max_queued
    )
    talks = talks_of(seed=len(name))
    log, ended, refused = run_real(made, talks)
    simulated, ends, fleet = run_simulated(settings, talks)
    assert simulated == log
    assert sorted(ends) == sorted(ended.values())
    outcomes, seen = fleet._outcomes, fleet.engines[0].seen
    assert (outcomes.refused, outcomes.preemptions) == (refused, made.stats().preemptions)
    assert (seen.prompt_tokens, seen.cached_tokens) == (made.stats().prompt_tokens, made.stats().cached_tokens)
    assert seen.output_tokens == made.stats().output_tokens == sum(outcomes.output)
    if name in ("preempted", "small blocks"):
        assert outcomes.preemptions > 0
    if name == "refused":
        assert refused > 0
    if config.enable_prefix_caching:
        assert seen.cached_tokens > 0
    if name == "chunked":
        assert any(start > 0 and rows > 1 for _, entries in log for _, start, rows in entries)


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_what_takes_long_to_launch_is_late_as_in_the_real_engine(small: Path, overlap: bool) -> None:
    """Results of the step before wait while the host launches the next one, and requests are seen later."""
    made = real_engine(small, overlap=overlap, max_num_batched_tokens=24, max_num_seqs=4)
    talks = talks_of(seed=11, every=6.0)
    log, ended, _ = run_real(made, talks, launching)
    simulated, ends, _ = run_simulated(Settings(made.limits, overlap), talks, Launched())
    assert simulated == log
    assert sorted(ends) == sorted(ended.values())
    assert ends != run_simulated(Settings(made.limits, overlap), talks)[1]


@pytest.mark.parametrize("seed", range(6))
def test_keys_in_place_of_hashes_decide_alike(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(seed)
    block_size = rng.choice((4, 8))
    limits = Limits(rng.randrange(5, 9), rng.randrange(9, 40), 96, block_size, 2 + 96 // block_size)
    settings = Settings(limits, overlap=bool(seed % 2))
    talks = talks_of(seed, count=150, every=2.0)
    keyed, ends, fleet = run_simulated(settings, talks)
    monkeypatch.setattr("anycore.simulate.engine.Keyed", BlockPool)
    hashed, others, other = run_simulated(settings, talks)
    assert type(other.engines[0].pool) is BlockPool
    assert keyed == hashed
    assert ends == others
    assert fleet._outcomes.preemptions > 0
    assert fleet.engines[0].seen.cached_tokens > 0


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_gaps_between_tokens_are_those_between_commits(overlap: bool) -> None:
    """Every gap, and the longest of each request, as they are when each token's moment is written down."""
    limits = Limits(6, 24, 96, 4, 31)
    moments: dict[str, list[float]] = {}

    class Watched(VirtualEngine):
        def _commit(self, step: Step, now: float) -> list[Sequence]:
            for entry in step.entries:
                if entry.last:
                    moments.setdefault(entry.request.id, []).append(now)
            return super()._commit(step, now)

    fleet = Fleet(Settings(limits, overlap), [seconds])
    fleet.engines = [Watched(fleet.settings, seconds)]
    finished: list[Sequence] = []
    finish = fleet._finish
    fleet._finish = lambda sequence, now: (finished.append(sequence), finish(sequence, now))[1]  # type: ignore
    outcomes = fleet.run(talks_of(3, count=200, every=1.5))
    assert outcomes.preemptions > 20
    seen = fleet.engines[0].seen
    wanted = sorted(round(b - a, 6) for times in moments.values() for a, b in pairwise(times))
    steps = [seen.ends[i] - seen.ends[i - 1] for i, count in enumerate(seen.steady) for _ in range(count)]
    assert sorted(round(gap, 6) for gap in [*steps, *seen.gaps]) == wanted
    for sequence in finished:
        times = moments[sequence.id]
        assert len(times) == len(sequence.tokens) - sequence.num_prompt
        assert sequence.first == times[0]
        assert sequence.longest == pytest.approx(max((b - a for a, b in pairwise(times)), default=0))
