"""Predicts what a server would do under a load, without a device: the real scheduler, block pool and router run under a
virtual clock, whose steps take as long as steps measured by `anycore bench kernels MODEL --steps` did.

Requests are drawn like those of `anycore bench serve`, or come from a file. Several rates, concurrencies and numbers of
replicas, separated by commas, make a sweep. The KV cache is what `anycore plan` says. Figures have the names of
`anycore bench serve`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec

from anycore import __version__, plugins
from anycore.bench import plot
from anycore.cli import plan, simulate_flags
from anycore.cli.flags import Parser
from anycore.cli.settings import given
from anycore.config import ModelConfig
from anycore.engine import planning
from anycore.engine.launch import Prepared
from anycore.engine.memory import size
from anycore.errors import ConfigError
from anycore.simulate import measured, report, steptime
from anycore.simulate.arrivals import Drawn, Recorded
from anycore.simulate.engine import Settings
from anycore.simulate.measured import FrontTimes, StepTimes
from anycore.simulate.search import Point, fewest
from anycore.simulate.steptime import Estimated, Fitted


def add_arguments(parser: Parser) -> None:
    simulate_flags.add(parser)


def run(options: argparse.Namespace) -> int:
    simulate_flags.check(options)
    times = measured.read(Path(options.step_times)) if options.step_times else None
    made, times = planned(options, times)
    points, notes = points_of(options, made, times)
    found = everything(points, options)
    rows = [row for _, row, tried in found for row in ([row] if row is not None else tried[-1:])]
    text = [*heading(made, times, notes), *(line for point in found for line in told(*point, options))]
    if len(rows) > 1:
        text += ["", *report.table(rows)]
    if options.format == "json":
        about = {"anycore": __version__, "step_times": times and times.about(), "notes": notes, **plan.whom(made)}
        assert made.plan is not None
        print(json.dumps(about | {"limits": asdict(made.plan.limits), "points": rows}, indent=2))
    else:
        print("\n".join(text))
    if options.plot:
        drawn = plot.svg(rows) if options.plot.endswith(".svg") else plot.page(rows, text)
        Path(options.plot).write_text(drawn, encoding="utf-8")
    return 0 if all(row is not None and row["completed"] for _, row, _ in found) else 3


# --- what is simulated ----------------------------------------------------------------------------------------------


def planned(options: argparse.Namespace, times: StepTimes | None) -> tuple[Prepared, StepTimes | None]:
    """The model on its device, and the step times to take: those given, or the catalogue's.

    Raises:
        ConfigError: the step times are those of another model, or there are none.
    """
    values = given(options, ModelConfig) | {"model": options.model}
    if options.on is not None and re.fullmatch(r"\d\d?", options.on):
        values["device"], options.on = int(options.on), None
    elif options.on is None and times is not None and options.device_memory is None:
        values["backend"] = values.get("backend", times.backend)
        options.on = times.device if values["backend"] == times.backend else None
    config = ModelConfig(**values)
    ranks = config.tensor_parallel_size
    here = planning.on_device(plugins.load(), config.backend, options.on, options.device_memory, ranks)
    made = planning.read(config, here).fit()
    if not made.wish.paged or made.task.value != "generate":
        raise ConfigError(f"simulated are models that generate; {config.model} would {made.task.value}", param="task")
    wanted = measured.Wanted(
        shape=measured.shape_of(made.spec),
        backend=made.choice.spec.name,
        dtype=made.wish.dtype,
        quantization=made.wish.quantization.scheme if made.wish.quantization else None,
        kv_cache_dtype=made.wish.kv_cache,
        ranks=ranks,
    )
    if times is not None:
        wanted.check(times)
    elif options.bandwidth is None or options.flops is None:
        folder = made.choice.spec.evidence
        times = wanted.catalogued(folder / "step-times", made.choice.device.name) if folder else None
        if times is None:
            raise ConfigError(
                f"no step times of {config.model} on {made.choice.device.name} are known: measure them there with "
                "`anycore bench kernels MODEL --steps > steps.json` and give --step-times steps.json, or give "
                "--bandwidth and --flops for an estimate",
                param="step_times",
            )
    return made, times


def points_of(options: argparse.Namespace, made: Prepared, times: StepTimes | None) -> tuple[list[Point], list[str]]:
    """Every point of the sweep, and what a reader should know of all of them."""
    assert made.plan is not None
    limits, config = made.plan.limits, made.config
    notes = []
    if times is not None:
        fitted = Fitted(times, limits.max_num_batched_tokens, noise=not options.steady, seed=options.seed)
        step_time: Any = fitted.seeded
        quality = ", ".join(f"{name} {100 * q['median_error']:.1f} % ({100 * q['max_error']:.0f} % at most)"
                            for name, q in fitted.quality().items())  # fmt: skip
        notes.append(f"the fit misses measured steps by, in the median: {quality}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(limits, name) > times.limits[name]:
                notes.append(f"{name} is {getattr(limits, name)}, steps were measured up to {times.limits[name]}: "
                             "beyond, times are extrapolated")  # fmt: skip
        overlap = times.overlap
    else:
        step_time = partial(steptime.same, estimated(options, made))
        notes.append("estimated, not measured: no device computes faster than this, most are far from it")
        overlap = False
    settings = Settings(limits, overlap, config.enable_prefix_caching, config.scheduling_policy, config.fair_share,
                        config.max_queued, config.long_prompt_rows)  # fmt: skip
    front = front_of(options, times)
    points = []
    for rate, places, replicas in product(options.request_rate, options.max_concurrency, options.engines):
        if options.workload != "random":
            requests: Drawn | Recorded = Recorded(Path(options.workload), options.speed)
        else:
            requests = Drawn(options.num_prompts, rate, options.burstiness, options.input_len, options.output_len,
                             options.prefix_len, options.num_prefixes, options.turns, options.seed)  # fmt: skip
        about = {
            "target": "simulated", "endpoint": "simulated", "model": config.model,
            "request_rate": None if math.isinf(rate) else rate, "workload": options.workload, "seed": options.seed,
        }  # fmt: skip
        point = Point(requests, settings, step_time, about, dict(options.slo), replicas, front, options.api_servers,
                      options.delay_ms / 1e3, places, options.price_per_hour, config.tensor_parallel_size)  # fmt: skip
        points.append(point)
    return points, notes


def front_of(options: argparse.Namespace, times: StepTimes | None) -> FrontTimes | None:
    """What a front is busy with: as given, else as measured; None where that is nothing."""
    found = (times and times.front) or FrontTimes()
    if options.front_ms is not None:
        found = msgspec.structs.replace(found, request=options.front_ms / 1e3, prompt=0.0)
    if options.front_us is not None:
        found = msgspec.structs.replace(found, chunk=options.front_us / 1e6, wake=0.0, token=0.0)
    return found if found.work(1, 1, 1, 1) + found.wake else None


def estimated(options: argparse.Namespace, made: Prepared) -> Estimated:
    """What the device's figures allow at best."""
    assert made.plan is not None
    spec, terms = made.spec, made.plan.terms
    tables = (
        spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    )  # of all rows, only sampled ones meet the head
    ranks = made.config.tensor_parallel_size
    return Estimated(
        bandwidth=float(options.bandwidth),
        flops=float(options.flops),
        weight_bytes=float(terms["weights"]),
        token_bytes=float(made.plan.kv_token_bytes),
        row_flops=2.0 * (spec.parameter_count - tables) / ranks,
        pair_flops=4.0 * spec.layers * spec.heads * spec.head_dim / ranks,
    )


Found = tuple[Point, dict[str, Any] | None, list[dict[str, Any]]]
"""A point, its figures or those with the fewest engines that do, and all that was tried."""


def everything(points: list[Point], options: argparse.Namespace) -> list[Found]:
    """Run all points, several at a time."""
    work = partial(simulated, attain=options.attain if options.find_replicas else None)
    processes = min(len(points), options.processes or os.cpu_count() or 1)
    if processes == 1:
        return [work(point) for point in points]
    with ProcessPoolExecutor(processes) as pool:
        return list(pool.map(work, points))


def simulated(point: Point, attain: float | None) -> Found:
    if attain is None:
        row = point.run()
        return point, row, [row]
    return point, *fewest(point, attain)


# --- what is told ---------------------------------------------------------------------------------------------------


def heading(made: Prepared, times: StepTimes | None, notes: list[str]) -> list[str]:
    assert made.plan is not None
    limits, device = made.plan.limits, made.choice.device
    memory = f", {size(device.memory)}" if device.memory else ""
    source = (
        f"steps measured {times.time} by anycore {times.anycore} of {times.where}" if times else "no steps measured"
    )
    return [
        f"{made.config.model}: {made.spec.architecture} in {made.wish.dtype} on {device.name} "
        f"({made.choice.spec.name}{memory}); {source}",
        f"KV cache of {(limits.blocks - 1) * limits.block_size} tokens, at most {limits.max_num_seqs} sequences and "
        f"{limits.max_num_batched_tokens} tokens a step",
        *notes,
    ]


def told(
    point: Point, row: dict[str, Any] | None, tried: list[dict[str, Any]], options: argparse.Namespace
) -> list[str]:
    """A point for people."""
    if not options.find_replicas:
        return ["", *report.lines(tried[0])]
    limits = " ".join(f"{name}:{limit:g}" for name, limit in point.slo.items())
    wanted = f"{options.attain:.2%} of the requests within {limits}"
    others = ", ".join(f"{one['replicas']}: {one.get('attained', 0.0):.2%}" for one in tried if one is not row)
    if row is None:
        return ["", f"no number of engines keeps {wanted} ({others})", *report.lines(tried[-1])]
    fewest = f"{row['replicas']} engines are the fewest that keep" if row["replicas"] > 1 else "1 engine keeps"
    return ["", f"{fewest} {wanted}{f' ({others})' if others else ''}", *report.lines(row)]
