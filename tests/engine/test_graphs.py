"""What a device with graphs goes through before its first step, on one that has none: it leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import engines

from anycore.contract.backend import StepOutput
from anycore.contract.batch import Batch, Sampling
from anycore.contract.capture import NotCaptured, Replay
from anycore.contract.graphs import GraphStep

PROMPTS = [[7, 8, 9, 10, 11], list(range(20, 50)), [5] * 17]


def no_graphs(work: Any) -> tuple[Replay, StepOutput]:
    raise NotCaptured("a CPU has none")


@dataclass
class Watched:
    """The engine's own step; notes the lengths of those that run inside the rehearsal."""

    step: Any
    inside: bool = False
    rehearsed: list[list[int]] = field(default_factory=list)
    rehearsals: int = 0

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        if self.inside:
            self.rehearsed.append(batch.query_lens)
        output: StepOutput = self.step(batch, sampling)
        return output

    def sample(self, rows: Any, sampling: Sampling) -> Any:
        return self.step.sample(rows, sampling)

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        self.rehearsals += 1
        self.inside = True
        yield
        self.inside = False


def test_every_kind_of_step_is_rehearsed_once_before_the_first(t_lm: Path) -> None:
    wanted = engines.run(engines.engine(t_lm), PROMPTS, max_tokens=6)
    made = engines.engine(t_lm, max_num_seqs=6)
    runner = made.runner
    watched = Watched(runner._step)
    runner._step = GraphStep(
        watched, runner.backend.ops, made.limits, runner.backend.device, no_graphs, rehearsal=watched.rehearsal
    )  # type: ignore[arg-type]
    found = engines.run(made, PROMPTS, max_tokens=6)
    assert [output.tokens for output in found] == [output.tokens for output in wanted]
    first, *mixed = watched.rehearsed[:3]
    assert sum(first) == sum(map(len, PROMPTS))
    assert [lens.count(1) for lens in mixed] == [1, 5]
    assert sorted(map(len, watched.rehearsed[3:])) == [1, 2, 4, 6, 6]
    assert watched.rehearsals == 1
