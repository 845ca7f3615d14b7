"""Step times: a fit finds what steps were made of, says how far it is off, and is read back from its file."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from anycore.engine.scheduler import Entry, Step
from anycore.errors import ConfigError
from anycore.simulate.measured import FORMAT, Measured, StepTimes, Wanted, read
from anycore.simulate.steptime import Estimated, Fitted, Line, fit, knots_of, positive


def took(decodes: int, context: int, chunks: list[tuple[int, int]]) -> float:
    """A made-up device: a floor of 8 ms up to 64 rows, 0.1 ms a row above it."""
    rows = decodes + sum(n for _, n in chunks)
    pairs = sum(n * start + n * (n + 1) // 2 for start, n in chunks)
    seconds = 8e-3 + 1e-4 * max(0, rows - 64) + 2e-7 * context + 3e-8 * pairs
    return seconds + (4e-3 + 5e-5 * (decodes + len(chunks)) if chunks else 0.0)


def grid(noise: float = 0.0) -> list[Measured]:
    rng = random.Random(0)
    shapes: list[tuple[int, int, list[tuple[int, int]]]] = []
    for decodes in (1, 2, 4, 8, 16, 32, 64, 128):
        shapes += [(decodes, decodes * each, []) for each in (64, 512, 2000)]
        shapes += [(decodes, decodes * 64, [(0, n)]) for n in (16, 64, 256)]
    shapes += [(0, 0, [(start, n)]) for n in (16, 32, 64, 128, 256, 512) for start in (0, 512, 1024)]
    shapes += [(0, 0, [(0, n)] * 4) for n in (16, 64)]
    return [
        Measured(*shape, [took(*shape) * (1 + noise * rng.random()) for _ in range(5)])  # type: ignore[arg-type]
        for shape in shapes
    ]


def times(steps: list[Measured], **changes: Any) -> StepTimes:
    about: dict[str, Any] = {
        "format": FORMAT, "anycore": "1", "time": "2026-01-01T00:00:00+00:00", "model": "m", "architecture": "a",
        "shape": {"layers": 2}, "backend": "cpu", "device": "d", "chip": "c", "ranks": 1, "threads": 1,
        "dtype": "float32", "quantization": None, "kv_cache_dtype": None, "overlap": False,
        "limits": {"max_num_seqs": 128, "max_num_batched_tokens": 640, "max_model_len": 2048}, "sampling": {},
    }  # fmt: skip
    return StepTimes(**(about | changes), steps=steps)


def step_of(decodes: int, context: int, chunks: list[tuple[int, int]]) -> Step:
    """A step of that shape; `context` counts the decodes' own rows."""
    each = [context // decodes - 1] * decodes if decodes else []
    step = Step([None] * decodes, positions=np.array(each, dtype=np.int64))  # type: ignore[list-item]
    step.chunks = [Entry(None, start, rows, True) for start, rows in chunks]  # type: ignore[arg-type]
    return step


def test_a_fit_predicts_what_it_has_not_seen() -> None:
    fitted = Fitted(times(grid()), 640)
    unseen: list[tuple[int, int, list[tuple[int, int]]]] = [
        (3, 3 * 700, []), (100, 100 * 900, []), (24, 24 * 128, [(256, 200)]), (0, 0, [(100, 50), (0, 70)])
    ]  # fmt: skip
    for shape in unseen:
        assert fitted(step_of(*shape)) == pytest.approx(took(*shape), rel=0.03), shape
    quality = fitted.quality()
    assert quality["decode"]["max_error"] < 0.02
    assert quality["mixed"]["max_error"] < 0.05


def test_noise_is_that_of_the_measured_steps_and_belongs_to_the_seed() -> None:
    steps = times(grid(noise=0.5))
    noisy, steady = Fitted(steps, 640), Fitted(steps, 640, noise=False)
    step = step_of(8, 8 * 64, [])
    plain = steady(step)
    assert steady(step) == plain
    drawn = [noisy(step) for _ in range(400)]
    ratios = [s / float(np.median(one.seconds)) for one in steps.steps for s in one.seconds]
    assert min(ratios) <= min(drawn) / plain < 0.9 < 1.1 < max(drawn) / plain <= max(ratios) * (1 + 1e-9)
    assert [noisy.seeded(3)(step) for _ in range(5)] != [noisy.seeded(4)(step) for _ in range(5)]
    again = Fitted(steps, 640)
    assert [again(step) for _ in range(400)] == drawn


def test_no_coefficient_is_negative_and_the_rest_is_least_squares() -> None:
    rng = np.random.default_rng(0)
    columns = rng.random((40, 6))
    wanted = columns @ np.array([2.0, 0.0, 1.0, 0.0, 3.0, 0.5]) - 0.8 * columns[:, 1] + 0.01 * rng.random(40)
    found = positive(columns, wanted)
    assert (found >= 0).all()
    assert found[1] == 0
    active = found > 0
    gradient = columns.T @ (wanted - columns @ found)
    assert np.abs(gradient[active]).max() < 1e-8  # where it is free, no step makes it better
    assert (gradient[~active] <= 1e-8).all()  # where it is 0, only a negative one would


def test_a_line_goes_on_above_what_was_measured() -> None:
    table = Line((4, 8, 16), (1.0, 2.0, 4.0)).table(32)
    assert (table[0], table[4], table[6], table[16]) == (1.0, 1.0, 1.5, 4.0)
    assert table[32] == pytest.approx(4.0 + 16 * 0.25)
    assert knots_of(np.array([3.0, 16.0, 17.0, 250.0, 600.0])) == (3, 4, 16, 256, 512, 600)


def test_a_decoding_fit_does_not_fall_with_rows() -> None:
    made = fit([Measured(n, n * 10, [], [s]) for n, s in ((1, 3.0), (2, 2.9), (4, 3.1), (8, 5.0))], ("context",))
    values = made.line.values
    assert list(values) == sorted(values)


def test_an_estimate_is_what_is_moved_or_what_is_computed() -> None:
    bound = Estimated(bandwidth=1e12, flops=1e14, weight_bytes=1e10, token_bytes=1e5, row_flops=1e10, pair_flops=1e4)
    assert bound(step_of(2, 2 * 1000, [])) == pytest.approx((1e10 + 2000 * 1e5) / 1e12)
    rows, pairs = 4096, 4096 * 4097 // 2
    assert bound(step_of(0, 0, [(0, rows)])) == pytest.approx((rows * 1e10 + pairs * 1e4) / 1e14)


def test_files_are_read_back_and_strangers_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    made = times(grid())
    path.write_bytes(msgspec.json.encode(made))
    assert read(path) == made
    path.write_text(json.dumps({"operations": []}))
    with pytest.raises(ConfigError, match="bench kernels MODEL --steps"):
        read(path)
    path.write_bytes(msgspec.json.encode(times([], format="anycore step times 2")))
    with pytest.raises(ConfigError, match="this version reads"):
        read(path)
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="at least two of each"):
        Fitted(times(grid()[:3]), 640)


def test_step_times_of_something_else_are_refused_by_name(tmp_path: Path) -> None:
    wanted = Wanted({"layers": 2}, "cpu", "float32", None, None, 1)
    wanted.check(times([]))
    with pytest.raises(ConfigError, match="dtype is bfloat16, not float32; layers is 3, not 2"):
        wanted.check(times([], dtype="bfloat16", shape={"layers": 3}))
    for name, changes in {
        "old": {},
        "new": {"time": "2026-02-01"},
        "other": {"dtype": "float16", "time": "2027"},
    }.items():
        (tmp_path / f"{name}.json").write_bytes(msgspec.json.encode(times([], model=name, **changes)))
    found = wanted.catalogued(tmp_path, "d")
    assert found is not None
    assert found.model == "new"
    assert wanted.catalogued(tmp_path, "another device") is None


def test_launching_is_that_of_the_next_size_that_was_measured() -> None:
    """What is replayed up to 1,024 rows is launched kernel by kernel above: no line joins the two."""
    replayed, launched = [1e-4, 2e-4, 1.5e-4], [9e-3] * 3
    plain = [Measured(n, 64 * n, [], [5e-3], [1e-4]) for n in (1, 8)]
    mixed = [Measured(0, 0, [(0, n)], [8e-3], replayed) for n in (64, 1024)]
    mixed += [Measured(1, 64, [(0, n)], [8e-3], launched) for n in (1024, 1920)]
    fitted = Fitted(times([*plain, *mixed], overlap=True), 4096)

    def of(decodes: int, rows: int, fit: Fitted = fitted) -> float:
        chunks = [Entry(None, 0, rows, True)] if rows else []  # type: ignore[arg-type]
        return fit.launching(Step([None] * decodes, chunks=chunks))  # type: ignore[list-item]

    assert [of(n, 0) for n in (1, 5, 8, 40)] == [1e-4] * 4
    assert [of(0, n) for n in (16, 64, 700, 1024)] == [1.5e-4] * 4
    assert [of(0, n) for n in (1025, 1500, 4000)] == [9e-3] * 3
    assert of(0, 2000, Fitted(times([*plain, *mixed]), 4096)) == 0.0
    assert of(0, 64, Fitted(times(grid(), overlap=True), 4096)) == 0.0


def test_prompts_that_an_idle_engine_waited_for_say_nothing_of_the_device() -> None:
    """Launching hides what they compute; beside decodes it is hidden itself, and what is seen is the device's."""
    plain = [Measured(n, 64 * n, [], [20e-3], [1e-3]) for n in (1, 8)]
    beside = [Measured(1, 64, [(0, n)], [(20 + n / 8) * 1e-3] * 3, [30e-3] * 3) for n in (16, 64, 256)]
    alone = [Measured(0, 0, [(0, n)], [max(31.0, 20 + n / 8) * 1e-3] * 3, [30e-3] * 3) for n in (17, 65)]
    fitted = Fitted(times([*plain, *beside, *alone], overlap=True), 512, noise=False)
    assert fitted.quality()["mixed"]["steps"] == 3
    assert fitted(step_of(1, 64, [(0, 16)])) == pytest.approx(22e-3, rel=0.02)
    in_turn = Fitted(times([*plain, *beside, *alone]), 512, noise=False)
    assert in_turn.quality()["mixed"]["steps"] == 5
