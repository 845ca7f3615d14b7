"""Microseconds the host spends on a step, by phase: the real engine before a device that answers at once.

    python ci/bench/host.py                     # 1, 64, 256 and 1,024 requests, steady and mixed, greedy and sampled
    python ci/bench/host.py --running 256 --profile

"steady" decodes the same requests all the time; "mixed" lets a new one in for each that ends. Counted is this thread's
time on a core. Other processes still count, for they share caches and clocks: so the same steps are run several times
over and the least of each counts. Shown are the median of the phases; of whole steps the median, the mean (in which
rare long steps count in full) and the least. "calls" are those of torch, the median of some steps more; on a device
each of these costs several times what it costs here. "cycles" are objects that only the garbage collector frees.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from anycore.contract.backend import Backend, Memory, StepFn, StepOutput, WholeStep
from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.capture import Replay
from anycore.contract.declare import Task
from anycore.contract.graphs import GraphStep
from anycore.contract.ops import Ops
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.engine import Engine
from anycore.engine.request import NewRequest, SamplingParams
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.models.spec import ModelSpec

BLOCK, LENGTH, VOCAB, EOS = 16, 2048, 150_000, 149_999
PHASES = ("schedule", "build", "launch", "commit")


class Instant(Backend):
    """A device that overlaps, has graphs and samples ids drawn long ago; it computes nothing."""

    name = "instant"
    overlap = True

    def __init__(self, most: int) -> None:
        device = torch.device("cpu")
        super().__init__(device, Memory(device), Ops())
        self._ids = torch.randint(0, EOS, (most,), generator=torch.Generator().manual_seed(0))
        self._finite = torch.ones(most, dtype=torch.bool)
        self._rows = torch.zeros(most, 8)

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        instant = WholeStep(lambda batch: self._rows, self._sample)
        return GraphStep(instant, self.ops, limits, self.device, self._capture, compiles=False, memory=self.memory)

    def _sample(self, rows: torch.Tensor, sampling: Sampling) -> Samples:
        count = len(sampling.temperature)
        return Samples(self._ids[:count], self._finite[:count])

    def _capture(self, work: Callable[[], StepOutput]) -> tuple[Replay, StepOutput]:
        return lambda batch: None, work()


class Calls(TorchFunctionMode):
    """Counts what is asked of torch; attributes of tensors are free."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") != "__get__"
        return func(*args, **(kwargs or {}))


class Stub:
    """The part of a model that the runner reads."""

    spec = ModelSpec(
        architecture="Qwen2ForCausalLM", family="decoder", attention="causal", tasks=(Task.GENERATE,), hidden_size=8,
        intermediate_size=8, layers=1, heads=1, kv_heads=1, head_dim=8, vocab_size=VOCAB, max_positions=LENGTH,
        norm_eps=1e-6, activation="silu", eos_ids=(EOS,), head="lm",
    )  # fmt: skip

    def forward(self, batch: Batch) -> torch.Tensor:
        raise NotImplementedError("the device answers without computing")

    logits = forward


class Traffic:
    """Keeps `running` requests going and steps them, with a clock on each phase."""

    def __init__(self, running: int, temperature: float, mixed: bool) -> None:
        blocks = 1 + running * (LENGTH // BLOCK)
        limits = Limits(running, 8192, LENGTH, BLOCK, blocks)
        runner = Runner(Stub(), Instant(running), Task.GENERATE, limits, [None])  # type: ignore[arg-type]
        self.engine = Engine(runner, Scheduler(limits, BlockPool(blocks, BLOCK)), limits, max_queued=running, seed=1)
        self.running, self.temperature, self.mixed = running, temperature, mixed
        self.spent: dict[str, float] = defaultdict(float)
        self._rng = random.Random(running)
        self._count = 0
        for _ in range(running):
            self._add()
        while self.engine.scheduler.waiting:
            self.engine.step()
        self._watch(self.engine.scheduler, "schedule", "schedule")
        self._watch(runner.builder, "build", "build")
        self._watch(runner.builder, "next_tokens", "build")
        self._watch(runner, "launch", "launch")
        self._watch(self.engine, "_commit", "commit")

    def step(self) -> dict[str, float]:
        """One step: the seconds of each phase, and of all of it. Arrivals are added before the clock starts."""
        start = time.thread_time()
        deltas = self.engine.step()
        total = time.thread_time() - start
        if self.mixed:
            for delta in deltas:
                if delta.finish is not None:
                    self._add()
        spent = {**dict.fromkeys(PHASES, 0.0), **self.spent}
        spent["launch"] -= spent["build"]
        self.spent.clear()
        return {**spent, "step": total}

    def _add(self) -> None:
        """A prompt of 64 to 191 tokens; mixed, an output of 64 to 191 more."""
        tokens = [self._rng.randrange(100, 140_000) for _ in range(self._rng.randrange(64, 192))]
        output = self._rng.randrange(64, 192) if self.mixed else LENGTH - len(tokens)
        sampling = SamplingParams(max_tokens=output, temperature=self.temperature)
        self._count += 1
        self.engine.add(NewRequest(id=f"cmpl-{self._count}", task=Task.GENERATE, token_ids=tokens, sampling=sampling))

    def _watch(self, owner: Any, method: str, phase: str) -> None:
        setattr(owner, method, partial(self._timed, getattr(owner, method), phase))

    def _timed(self, work: Callable[..., Any], phase: str, *args: Any) -> Any:
        start = time.thread_time()
        result = work(*args)
        self.spent[phase] += time.thread_time() - start
        return result


def measure(running: int, temperature: float, mixed: bool, steps: int, times: int) -> str:
    timed: list[dict[str, float]] = []
    for _ in range(times):  # all is drawn from seeds: each time the same steps
        traffic = Traffic(running, temperature, mixed)
        for _ in range(32):
            traffic.step()
        gc.collect()
        gc.freeze()  # as after an engine's warm-up
        before = sum(stats["collected"] for stats in gc.get_stats())
        again = [traffic.step() for _ in range(steps)]
        cycles = sum(stats["collected"] for stats in gc.get_stats()) - before
        gc.unfreeze()
        timed = [{k: min(a[k], b[k]) for k in a} for a, b in zip(timed or again, again, strict=True)]
    calls = []
    for _ in range(30):
        with Calls() as counter:
            traffic.step()
        calls.append(counter.count)

    def microseconds(phase: str, summary: Callable[[list[float]], float]) -> str:
        return f"{1e6 * summary([spent[phase] for spent in timed]):9.0f}"

    figures = [microseconds(phase, statistics.median) for phase in PHASES]
    figures += [microseconds("step", summary) for summary in (statistics.median, statistics.fmean, min)]
    name = f"{'mixed' if mixed else 'steady'} {'sampled' if temperature else 'greedy'}"
    return f"{running:6d} {name:15s}{''.join(figures)} {statistics.median(calls):6.0f} {cycles:7d}"


def profile(running: int, temperature: float, mixed: bool, steps: int) -> None:
    import cProfile
    import pstats

    traffic = Traffic(running, temperature, mixed)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        traffic.step()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(18)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--times", type=int, default=4, help="how often the same steps are run")
    parser.add_argument("--profile", action="store_true", help="where the time goes, by function")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heads = "".join(f"{phase:>9s}" for phase in (*PHASES, "step", "mean", "least"))
    print(f"{'running':>6s} {'traffic':14s}{heads}  calls  cycles")
    for running in options.running:
        for mixed in (False, True):
            for temperature in (0.0, 0.6):
                if options.profile:
                    profile(running, temperature, mixed, options.steps)
                print(measure(running, temperature, mixed, options.steps, options.times), flush=True)


if __name__ == "__main__":
    main()
