"""Scheduler and block pool with integers only: the invariants of the engine under random work.

The device is a function: the next token of a sequence is a hash of all its tokens. So every sequence has one right
output, whatever its company, and a wrong block, a lost token or a repeated one shows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sequences import limits, sequence

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.request import NewRequest, PoolingParams
from anycore.engine.scheduler import Scheduler, Step
from anycore.engine.sequence import Request, Status


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 5


def expected_output(request: Request) -> list[int]:
    tokens = list(request.new.token_ids)
    while len(tokens) < request.max_total:
        tokens.append(next_token(tokens))
    return tokens[request.num_prompt :]


@dataclass
class Device:
    """Remembers which token stands in which slot, as a KV cache would, and checks what each row would read."""

    block_size: int
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot -> (position, token)
    under_way: list[tuple[Step, list[tuple[Request, int]]]] = field(default_factory=list)
    known: dict[int, list[int]] = field(default_factory=dict)  # id(request) -> all its tokens, host-seen or not

    def launch(self, step: Step) -> None:
        samples = []
        for entry in step.entries:
            request = entry.request
            assert entry.rows >= 1, "a hidden state is needed even where everything is cached"
            assert entry.start + entry.rows < request.max_total, "the last token is never computed"
            tokens = self.known.setdefault(id(request), list(request.tokens))
            for position in range(entry.start, entry.start + entry.rows):
                self.slots[self.slot(request, position)] = (position, tokens[position])
            end = entry.start + entry.rows
            for position in range(end):  # what attention reads must be this request's own prefix
                assert self.slots[self.slot(request, position)] == (position, tokens[position])
            if entry.last:
                samples.append((request, next_token(tokens[:end])))
                tokens.append(samples[-1][1])
        self.under_way.append((step, samples))

    def slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.block_size] * self.block_size + position % self.block_size


class Machine:
    """A scheduler, its pool and a device, stepped with or without overlap."""

    def __init__(
        self, limits: Limits, overlap: bool, policy: str = "fcfs", caching: bool = True, long_rows: int | None = None
    ) -> None:
        self.limits = limits
        self.overlap = overlap
        self.pool = BlockPool(limits.blocks, limits.block_size, caching)
        self.scheduler = Scheduler(limits, self.pool, policy, long_prompt_rows=long_rows)
        self.device = Device(limits.block_size)
        self.requests: list[Request] = []
        self.now = 0.0

    def add(self, request: Request) -> None:
        self.requests.append(request)
        self.scheduler.add(request, self.now)

    def step(self) -> Step:
        self.now += 0.01
        step = self.scheduler.schedule()
        if step.entries:
            self.device.launch(step)
        while len(self.device.under_way) > (1 if self.overlap and step.entries else 0):
            self.commit()
        self.check(step)
        return step

    def commit(self) -> None:
        _, samples = self.device.under_way.pop(0)
        for request, token in samples:
            if request.status is Status.FINISHED:
                continue
            request.tokens.append(token)
            if len(request.tokens) == request.max_total:
                self.scheduler.remove(request)

    def check(self, step: Step) -> None:
        self.pool.check()
        assert step.rows <= self.limits.max_num_batched_tokens
        assert len(self.scheduler.running) <= self.limits.max_num_seqs
        assert len({id(entry.request) for entry in step.entries}) == len(step.entries)
        seats = [request.seat for request in self.scheduler.running]
        assert sorted(seats + self.scheduler._seats) == list(range(self.limits.max_num_seqs))
        owners: dict[int, int] = {}
        for request in self.scheduler.running:
            assert 0 <= request.num_computed <= request.num_tokens
            assert len(request.blocks) >= self.pool.blocks_for(request.num_computed)
            for block in request.blocks:
                owners[block] = owners.get(block, 0) + 1
        for block, count in owners.items():
            assert self.pool.references[block] == count
        assert all(not r.blocks and r.num_computed == 0 for r in self.scheduler.waiting)

    def run(self, max_steps: int = 5000) -> int:
        """Step until everything is finished; a run that makes no progress fails."""
        for number in range(max_steps):
            if all(r.status is Status.FINISHED for r in self.requests):
                return number
            self.step()
        raise AssertionError("livelock: unfinished requests after many steps")


@st.composite
def work(draw: Callable[..., int]) -> dict[str, object]:
    block_size = draw(st.sampled_from([1, 2, 4]))
    length = draw(st.integers(8, 40))
    needed = -(-length // block_size)
    return {
        "limits": Limits(
            max_num_seqs=draw(st.integers(1, 6)),
            max_num_batched_tokens=draw(st.integers(6, 24)),
            max_model_len=length,
            block_size=block_size,
            blocks=1 + needed + draw(st.integers(0, 2 * needed)),
        ),
        "overlap": draw(st.booleans()),
        "caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority", "short-first"])),
        "long_rows": draw(st.sampled_from([None, 1, 3])),
        "seed": draw(st.integers(0, 2**32)),
        "count": draw(st.integers(1, 14)),
    }


@given(work())
@settings(max_examples=300, deadline=None)
def test_invariants_hold_and_every_sequence_gets_its_own_output(case: dict[str, object]) -> None:
    shape: Limits = case["limits"]  # type: ignore[assignment]
    rng = random.Random(case["seed"])
    options = (case[name] for name in ("overlap", "policy", "caching", "long_rows"))
    machine = Machine(shape, *options)  # type: ignore[arg-type]
    prefixes = [[rng.randrange(3) for _ in range(shape.max_model_len)] for _ in range(2)]
    for number in range(case["count"]):  # type: ignore[call-overload]
        prompt = rng.choice(prefixes)[: rng.randint(1, shape.max_model_len - 1)]
        request = sequence(number, prompt, rng.randint(1, shape.max_model_len - len(prompt)))
        request.needs_host = rng.random() < 0.2
        if number and rng.random() < 0.3:
            leader = machine.requests[-1]
            if leader.new.token_ids == prompt:
                request.leader = leader
        machine.add(request)
        for _ in range(rng.randint(0, 3)):
            machine.step()
        if rng.random() < 0.15:
            machine.scheduler.remove(rng.choice(machine.requests))
    aborted = {r.id for r in machine.requests if r.status is Status.FINISHED and len(r.tokens) < r.max_total}
    machine.run()
    for request in machine.requests:
        if request.id not in aborted:
            assert request.tokens[request.num_prompt :].tolist() == expected_output(request)
    assert machine.pool.free == machine.pool.size


def test_decodes_are_never_stalled_by_a_long_prompt() -> None:
    machine = Machine(limits(seqs=4, tokens=8, length=64), overlap=False)
    machine.add(sequence(0, [1, 2], output=20))
    machine.step()
    machine.add(sequence(1, list(range(3)) * 13, output=2))
    for _ in range(5):
        step = machine.step()
        assert step.entries[0].request.id == "0"
        assert step.rows == 8 or step.entries[-1].last


def test_long_prompts_leave_a_step_to_shorter_requests() -> None:
    machine = Machine(limits(seqs=4, tokens=8, length=64, blocks=200), overlap=False, long_rows=2)
    first, second = sequence(0, list(range(40)), 2), sequence(1, list(range(100, 140)), 2)
    machine.add(first)
    machine.add(second)
    assert machine.step().chunks[0].rows == 8  # alone, a long prompt has the whole step
    short = sequence(2, list(range(200, 206)), 4)
    machine.add(short)
    step = machine.step()
    assert {entry.request.id: entry.rows for entry in step.entries} == {"0": 2, "2": 6}
    assert [entry.rows for entry in machine.step().entries] == [1, 2]  # it decodes beside two rows of the prompt
    machine.run()
    for request in (first, second, short):
        assert request.tokens[request.num_prompt :].tolist() == expected_output(request)


def test_requests_that_arrive_together_compute_their_shared_prefix_once() -> None:
    machine = Machine(limits(seqs=8, tokens=64, length=64, blocks=200), overlap=False)
    prefix = [1, 2, 3, 4] * 8
    for number in range(6):
        machine.add(sequence(number, [*prefix, number], output=1))
    first = machine.step()
    assert [entry.rows for entry in first.entries] == [33]
    second = machine.step()
    assert [entry.rows for entry in second.entries] == [1] * 5
    assert all(r.cached == 32 for r in machine.requests[1:])


def test_followers_share_the_prompt_of_their_leader_without_prefix_caching() -> None:
    machine = Machine(limits(seqs=8, tokens=64, length=64, blocks=200), overlap=False, caching=False)
    leader = sequence(0, list(range(10)))
    machine.add(leader)
    followers = [sequence(n, list(range(10))) for n in (1, 2)]
    for follower in followers:
        follower.leader = leader
        machine.add(follower)
    assert len(machine.step().entries) == 1
    machine.step()
    assert all(f.blocks[:2] == leader.blocks[:2] for f in followers)
    machine.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_all_full_blocks_of_a_finished_request_can_be_found(overlap: bool) -> None:
    machine = Machine(limits(block_size=4), overlap)
    first = sequence(0, [1, 2, 3], output=6)  # its eighth token is the last that is computed
    machine.add(first)
    machine.run()
    again = sequence(1, [*first.tokens, 1], output=1)
    machine.add(again)
    machine.run()
    assert again.cached == 8


def test_m07_preemption_is_invisible_and_ends() -> None:
    """40 blocks of 16, 8 requests of 32 + 128 tokens: all finish with their own output, and some are preempted."""
    machine = Machine(Limits(8, 64, 640, 16, 41), overlap=False)
    for number in range(8):
        machine.add(sequence(number, [number] * 32, output=128))
    steps = machine.run(max_steps=2000)
    assert machine.scheduler.preemptions > 0
    assert steps < 2000
    for request in machine.requests:
        assert request.tokens[32:].tolist() == expected_output(request)


def test_a_prompt_that_lost_its_blocks_half_way_does_not_block_its_equals() -> None:
    machine = Machine(Limits(2, 2, 64, 4, 11), overlap=False)
    machine.add(sequence(0, [0, 1] * 4, output=24))
    machine.step()
    twins = [sequence(n, [1, 2] * 12, output=2) for n in (1, 2)]
    for twin in twins:
        machine.add(twin)
    machine.run(max_steps=200)
    assert machine.scheduler.preemptions > 0
    assert all(twin.tokens[24:].tolist() == expected_output(twin) for twin in twins)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "short-first"])
def test_nobody_starves(policy: str) -> None:
    machine = Machine(Limits(1, 16, 32, 4, 9), overlap=False, policy=policy)
    patient = sequence(0, [1] * 16, output=1)
    patient.new.priority = 1
    machine.add(sequence(1, [2], output=1))
    machine.add(patient)
    machine.now = 0.0
    for number in range(2, 400):
        machine.now += 0.5
        hurried = sequence(number, [3], output=1)
        machine.add(hurried)
        machine.step()
        if patient.status is Status.FINISHED:
            break
    assert patient.status is Status.FINISHED


def test_priority_runs_first() -> None:
    machine = Machine(Limits(1, 16, 32, 4, 9), overlap=False, policy="priority")
    low, high = sequence(0, [1], output=1), sequence(1, [2], output=1)
    low.new.priority, high.new.priority = 5, 0
    machine.add(low)
    machine.add(high)
    assert machine.step().entries[0].request is high


def pooled(number: int, length: int) -> Request:
    new = NewRequest(id=str(number), task=Task.EMBED, token_ids=[1] * length, pooling=PoolingParams())
    return Request(new, 0, number, length)


def test_unsplit_requests_go_whole_by_length_and_in_budget() -> None:
    scheduler = Scheduler(Limits(4, 20, 20, 0, 0), None)
    lengths = [10, 3, 10, 9, 1, 10, 19]
    waiting = [pooled(n, length) for n, length in enumerate(lengths)]
    for request in waiting:
        scheduler.add(request, 0.0)
    seen = []
    while scheduler.waiting:
        step = scheduler.schedule()
        rows = [entry.rows for entry in step.entries]
        assert sum(rows) <= 20
        assert rows == sorted(rows)
        assert len(rows) <= 4
        assert all(entry.last for entry in step.entries)
        for entry in step.entries:
            seen.append(entry.request.id)
            scheduler.remove(entry.request)
    assert sorted(seen) == sorted(r.id for r in waiting)
    assert {"0"} <= set(seen[:2])  # the first in line is in the first step


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.integers(1, 6))
def test_unsplit_steps_are_those_of_going_through_the_line_one_by_one(lengths: list[int], seats: int) -> None:
    scheduler = Scheduler(Limits(seats, 40, 40, 0, 0), None)
    waiting = [pooled(n, length) for n, length in enumerate(lengths)]
    for request in waiting:
        scheduler.add(request, 0.0)
    while waiting:
        first, *others = waiting[: 4 * seats]
        others.sort(key=lambda request: abs(request.num_prompt - first.num_prompt))
        expected: list[Request] = []
        for request in (first, *others):
            if len(expected) < seats and sum(r.num_prompt for r in expected) + request.num_prompt <= 40:
                expected.append(request)
        step = scheduler.schedule()
        assert {entry.request for entry in step.entries} == set(expected)
        for request in expected:
            scheduler.remove(request)
            waiting.remove(request)
