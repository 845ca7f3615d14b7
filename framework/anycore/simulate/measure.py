"""Times whole steps of a real engine, at chosen numbers of requests, lengths and prompt chunks.

Requests get their context without computing it: their blocks are put into the prefix cache as they are, whatever is in
them. So a step over long contexts costs no long prompts before it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime, timezone
from itertools import count
from typing import Any, NamedTuple

import msgspec
import torch

from anycore import __version__
from anycore.contract.declare import Task
from anycore.engine.chains import Chain
from anycore.engine.engine import Engine
from anycore.engine.launch import Prepared
from anycore.engine.request import Delta, NewRequest, SamplingParams
from anycore.engine.scheduler import Step
from anycore.errors import ConfigError
from anycore.simulate.measured import FORMAT, Measured, StepTimes, shape_of
from anycore.simulate.scenes import MARGIN, Chunks, Scene, scenes

LEAST, MOST, MOST_PROMPTS = 3, 32, 10
"""Times that each kind of step is run, as the seconds for it allow; most for steps with prompts."""
SETTLING = 1
"""Times that prompts come before they count: something may be made anew at first."""
LAG = 1.2
"""A step before one with prompts that takes so many times what the one before it took has waited for their launch."""

Shape = tuple[int, int, Chunks]
"""Of a step: requests that decode, tokens that these look back on, chunks."""
Progress = Callable[[int, int], None]


class Timed(NamedTuple):
    """A step that has been run."""

    shape: Shape
    seconds: float
    launch: float  # of the host, from the begin of its turn until it was launched


class Watched:
    """A runner that notes what it is given and what it has given back."""

    def __init__(self, runner: Any, clock: Callable[[], float]) -> None:
        self.runner = runner
        self.began = 0.0  # the turn of the engine that is under way
        self.launched: deque[Timed] = deque()  # steps under way; in place of their seconds, when their turns began
        self.done: list[Timed] = []
        self._clock = clock

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, step: Step, ahead: bool = False) -> Any:
        chunks = tuple((chunk.start, chunk.rows) for chunk in step.chunks)
        shape = (len(step.decodes), int(step.positions.sum()) + len(step.decodes), chunks)
        launched = self.runner.launch(step, ahead)
        self.launched.append(Timed(shape, self.began, self._clock() - self.began))
        return launched

    def collect(self, launched: Any) -> Any:
        self.done.append(self.launched.popleft())
        return self.runner.collect(launched)


class Meter:
    """Drives one engine, which nobody else uses meanwhile.

    `seconds` is how long each kind of step is run, three times at least, by `clock`.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if engine.task is not Task.GENERATE or engine.pool is None or not engine.pool.caching:
            raise ConfigError(
                "steps are measured of models that generate, with --enable-prefix-caching",
                param="enable_prefix_caching",
            )
        self.engine = engine
        self.sampling = sampling
        self.seconds = seconds
        self._runner = Watched(engine.runner, clock)
        engine.runner = self._runner  # type: ignore[assignment]
        self._last = 0.0  # when the last results came
        self._names = count()
        self._rng = random.Random(0)
        self._clock = clock
        self._found: dict[tuple[Scene, int, Chunks], list[tuple[int, float, float]]] = {}

    def run(self, progress: Progress = lambda done, of: None) -> list[Measured]:
        """Measure all scenes twice, the second time in the other order, so that a slow drift meets both ends."""
        while self.engine.use_pause():  # as an engine that serves has had, before requests come
            pass
        order = scenes(self.engine.limits)
        both = [*order, *reversed(order)]
        for done, scene in enumerate(both):
            progress(done, len(both))
            self._play(scene)
        progress(len(both), len(both))
        overlaps = self.engine.runner.backend.overlap
        return [
            Measured(decodes, round(statistics.fmean(context for context, _, _ in took)), list(chunks),
                     [round(seconds, 7) for _, seconds, _ in took],
                     [round(launch, 7) for _, _, launch in took] if overlaps else [])
            for (_, decodes, chunks), took in self._found.items()
        ]  # fmt: skip

    # --- scenes -------------------------------------------------------------------------------------------------

    def _play(self, scene: Scene) -> None:
        self._place(scene)
        if scene.decodes:
            once = self._decode(scene, 1)
            self._decode(scene, self._times(once) - 1)
        for chunks in scene.arrivals:
            self._arrive(scene, chunks)
        self._clear()
        self.engine.reset_prefix_cache()

    def _place(self, scene: Scene) -> None:
        """Let the scene's requests decode. The first step is one of another batch, and is not measured."""
        for _ in range(scene.decodes):
            self._send(scene.context, 1)
        self._settle()
        if scene.decodes:
            self._step()

    def _settle(self) -> list[Timed]:
        """Step until all prompts are computed."""
        done = []
        while self.engine.scheduler.waiting or self._computing():
            done += self._step()
        return done

    def _clear(self) -> None:
        for request in list(self.engine.scheduler.running):
            self.engine.abort(request.id)
        while self.engine.has_work():
            self._step()

    def _decode(self, scene: Scene, steps: int) -> float:
        """Decode so many steps; return the seconds of the last one."""
        seconds = 0.0
        for _ in range(steps):
            for timed in self._step():
                seconds = timed.seconds
                self._note(scene, timed)
        return seconds

    def _arrive(self, scene: Scene, chunks: Chunks) -> None:
        """Let prompts come together, again and again.

        While the host launches them, the step before is done and its results wait, on devices that overlap: what that
        one took too long is theirs.
        """
        turns, turn = SETTLING + LEAST, 0
        while turn < turns:
            if any(len(r.tokens) > scene.context + MARGIN - LEAST for r in self.engine.scheduler.running):
                self._clear()  # they would come to their end: others take their place
                self._place(scene)
            requests = [self._request(start, rows) for start, rows in chunks]
            before = self._step() if scene.decodes else []
            for request in requests:
                self.engine.add(request)
            done = self._settle()
            lag = 0.0
            if before and done and not done[0].shape[2]:
                usual, seconds = self._usual(scene, before[-1]), done[0].seconds
                lag = seconds - usual if seconds > LAG * usual else 0.0
            for request in requests:
                self.engine.abort(request.id)
            if not scene.decodes:
                self._clear()
            if turn == SETTLING:
                turns = SETTLING + min(self._times(sum(timed.seconds for timed in done)), MOST_PROMPTS)
            if turn >= SETTLING:
                for timed in done:
                    if timed.shape[2]:
                        self._note(scene, timed._replace(seconds=timed.seconds + lag))
                        lag = 0.0
            turn += 1

    def _usual(self, scene: Scene, before: Timed) -> float:
        """Seconds of a step that only decodes: the median of those measured, for a single one may be seen late."""
        known = self._found.get((scene, scene.decodes, ()))
        return statistics.median(seconds for _, seconds, _ in known) if known else before.seconds

    def _times(self, once: float) -> int:
        return max(LEAST, min(MOST, int(self.seconds / max(once, 1e-6))))

    def _note(self, scene: Scene, timed: Timed) -> None:
        decodes, context, chunks = timed.shape
        self._found.setdefault((scene, decodes, chunks), []).append((context, timed.seconds, timed.launch))

    # --- the engine ---------------------------------------------------------------------------------------------

    def _send(self, start: int, rows: int) -> None:
        self.engine.add(self._request(start, rows))

    def _request(self, start: int, rows: int) -> NewRequest:
        """Make a request of which `start` tokens, in whole blocks, are found in the cache, and `rows` are computed."""
        pool = self.engine.pool
        assert pool is not None
        size = pool.block_size
        whole = start // size
        vocabulary = self.engine.spec.vocab_size
        tokens = self._rng.choices(range(min(100, vocabulary // 4), vocabulary), k=start + rows)
        chain = Chain()
        pool.extend(chain, tokens[: whole * size])
        blocks = pool.take(whole)
        for i, block in enumerate(blocks):
            pool.publish(block, chain, i)
        pool.release(blocks)
        name = f"measured-{next(self._names)}"
        return NewRequest(id=name, task=Task.GENERATE, token_ids=tokens, sampling=self.sampling)

    def _computing(self) -> bool:
        """Whether the prompt of a running request is not computed yet, or its results are under way."""
        prompts = any(not request.prefilled for request in self.engine.scheduler.running)
        return prompts or any(timed.shape[2] for timed in self._runner.launched)

    def _step(self) -> list[Timed]:
        """Take a turn of the engine; return the steps whose results came, with their seconds.

        A step begins with the turn that launches it, or when the one before it is done if that is later.
        """
        runner = self._runner
        runner.began = self._clock()
        turn(self.engine)
        now = self._clock()
        done = [timed._replace(seconds=now - max(timed.seconds, self._last)) for timed in runner.done]
        if done:
            self._last = now
            runner.done.clear()
        return done


def turn(engine: Engine) -> list[Delta]:
    """A turn of an engine that serves: a step, and what is made of its results before the next one begins."""
    deltas = engine.step()
    msgspec.msgpack.encode((deltas, engine.stats()))
    return deltas


def record(prepared: Prepared, engine: Engine, sampling: SamplingParams, steps: list[Measured]) -> StepTimes:
    """Steps, with what they were measured on."""
    backend, wish, device = engine.runner.backend, prepared.wish, prepared.choice.device
    return StepTimes(
        format=FORMAT,
        anycore=__version__,
        time=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        model=prepared.config.model,
        architecture=prepared.spec.architecture,
        shape=shape_of(prepared.spec),
        backend=backend.name,
        device=device.name,
        chip=device.chip,
        ranks=prepared.config.tensor_parallel_size,
        threads=torch.get_num_threads(),
        dtype=wish.dtype,
        quantization=wish.quantization.scheme if wish.quantization else None,
        kv_cache_dtype=wish.kv_cache,
        overlap=backend.overlap,
        limits=asdict(engine.limits),
        sampling={name: value for name, value in msgspec.to_builtins(sampling).items() if value},
        steps=steps,
    )
