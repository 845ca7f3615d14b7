"""Tenants that wait at the same time share the engine by their weights, whatever the policy within each."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from itertools import count

import pytest
from sequences import limits, sequence

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.request import NewRequest, PoolingParams
from anycore.engine.scheduler import Scheduler
from anycore.engine.sequence import Request

BACKLOG = 8  # more than may run at once: who has so many waiting takes all the turns there are

Make = Callable[[str, float], Request]


class Load:
    """A scheduler and tenants that ask; what is sampled does not matter here."""

    def __init__(self, scheduler: Scheduler, make: Make, weights: dict[str, float]) -> None:
        self.scheduler = scheduler
        self.make = make
        self.weights = weights
        self.rows: Counter[str] = Counter()  # computed so far, by tenant
        self.started: list[Request] = []

    def ask(self, tenant: str, number: int = 1) -> list[Request]:
        made = [self.make(tenant, self.weights[tenant]) for _ in range(number)]
        for request in made:
            self.scheduler.add(request, 0.0)
        return made

    def keep_waiting(self, *tenants: str) -> None:
        """Let each have some requests in its line."""
        waiting = Counter(request.new.tenant for request in self.scheduler.waiting)
        for tenant in tenants:
            self.ask(tenant, max(0, BACKLOG - waiting[tenant]))

    def step(self) -> None:
        step = self.scheduler.schedule()
        for entry in step.entries:
            request = entry.request
            self.rows[request.new.tenant] += entry.rows
            if entry.start == 0 and request.preemptions == 0:
                self.started.append(request)
            if not entry.last:
                continue
            if not request.is_pooled:
                request.tokens.append(1)
            if request.is_pooled or len(request.tokens) == request.max_total:
                self.scheduler.remove(request)


def generator(seed: int) -> Make:
    """Requests of random lengths; one tenant's are three times as long, which must not pay."""
    draw, numbers = random.Random(seed), count()

    def make(tenant: str, weight: float) -> Request:
        scale = 3 if tenant == "a" else 1
        prompt = [next(numbers) % 997 for _ in range(scale * draw.randint(1, 8))]
        return sequence(next(numbers), prompt, scale * draw.randint(1, 8), tenant, weight)

    return make


def embedder(seed: int) -> Make:
    draw, numbers = random.Random(seed), count()

    def make(tenant: str, weight: float) -> Request:
        tokens = [7] * draw.randint(1, 16)
        new = NewRequest(
            id=str(next(numbers)),
            task=Task.EMBED,
            token_ids=tokens,
            pooling=PoolingParams(),
            tenant=tenant,
            weight=weight,
        )
        return Request(new, 0, next(numbers), len(tokens))

    return make


def paged(policy: str = "fcfs", fair: bool = True) -> Scheduler:
    shape = limits(seqs=4, tokens=16, length=64, blocks=65)
    return Scheduler(shape, BlockPool(shape.blocks, shape.block_size), policy, fair)


def unsplit() -> Scheduler:
    return Scheduler(Limits(4, 32, 16, 0, 0), None)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("policy", "weight"), [("fcfs", 3.0), ("fcfs", 1.0), ("short-first", 3.0), ("priority", 2.0)])
def test_shares_follow_the_weights(seed: int, policy: str, weight: float) -> None:
    for scheduler, make in ((paged(policy), generator(seed)), (unsplit(), embedder(seed))):
        load = Load(scheduler, make, {"a": 1.0, "b": weight})
        for _ in range(1000):
            load.keep_waiting("a", "b")
            load.step()
        share = load.rows["b"] / load.rows.total()
        assert share == pytest.approx(weight / (1 + weight), abs=0.03)


def test_a_flood_delays_a_newcomer_by_no_more_than_what_runs() -> None:
    load = Load(paged(), generator(1), {"flood": 1.0, "new": 1.0})
    load.ask("flood", 500)
    for _ in range(50):
        load.step()
    (request,) = load.ask("new")
    before = len([r for r in load.scheduler.waiting if r.new.tenant == "flood"])
    while request.status.value == "waiting":
        load.step()
    passed = before - len([r for r in load.scheduler.waiting if r.new.tenant == "flood"])
    assert passed <= load.scheduler.limits.max_num_seqs


def test_without_fair_share_the_policy_alone_orders() -> None:
    load = Load(paged(fair=False), generator(1), {"flood": 1.0, "new": 100.0})
    load.ask("flood", 40)
    load.ask("new")
    while load.scheduler.waiting:
        load.step()
    assert load.started[-1].new.tenant == "new"


@pytest.mark.parametrize("idle_steps", [1, 2000])
def test_an_idle_tenant_saves_nothing_up(idle_steps: int) -> None:
    load = Load(paged(), generator(3), {"a": 1.0, "b": 1.0})
    load.keep_waiting("a", "b")
    for _ in range(idle_steps):
        load.keep_waiting("b")
        load.step()
    load.rows.clear()
    for _ in range(1000):
        load.keep_waiting("a", "b")
        load.step()
    assert load.rows["a"] / load.rows.total() == pytest.approx(0.5, abs=0.03)


def test_nobody_starves_beside_a_thousandfold_weight() -> None:
    load = Load(paged(), generator(4), {"heavy": 1000.0, "light": 0.5})
    load.ask("light", 3)
    for _ in range(60):
        load.keep_waiting("heavy")
        load.step()
    assert load.rows["light"] > 0
    steps = 0
    while any(r.new.tenant == "light" for r in load.scheduler.waiting):
        load.keep_waiting("heavy")
        load.step()
        steps += 1
        assert steps < 100_000, "a tenant that waits was never served"


def test_one_tenant_is_served_in_the_order_of_the_policy() -> None:
    load = Load(paged(), generator(5), {"only": 2.0})
    asked = load.ask("only", 60)
    while load.scheduler.waiting:
        load.step()
    assert load.started == asked
