"""Steps are measured at the shapes that they are said to have, and take what the device takes for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from engines import engine
from simulate.virtual import Paced

from anycore.cli.main import main
from anycore.contract.sizes import Limits
from anycore.engine.request import SamplingParams
from anycore.engine.scheduler import Step
from anycore.errors import ConfigError
from anycore.simulate.measure import Meter
from anycore.simulate.measured import read
from anycore.simulate.scenes import MARGIN, SHORT, doubling, scenes

FLAGS = ("--backend", "cpu", "--dtype", "float32", "--max-num-seqs", "3", "--max-num-batched-tokens", "64",
         "--max-model-len", "192", "--kv-cache-memory", "2MiB", "--threads", "1")  # fmt: skip
SHAPE = {"max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 192, "kv_cache_memory": 2 << 20}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_lm(tmp_path_factory.mktemp("small"), layers=1)


def seconds(step: Step) -> float:
    chunks = sum(chunk.rows * (1 + 0.01 * chunk.start) for chunk in step.chunks)
    return 1.0 + 0.1 * len(step.decodes) + 0.001 * (int(step.positions.sum()) + len(step.decodes)) + 0.01 * chunks


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlap"])
def test_what_is_measured_is_what_the_device_took(small: Path, overlap: bool) -> None:
    made = engine(small, overlap=overlap, **SHAPE)
    paced = Paced(made.runner, seconds)
    made.runner = paced  # type: ignore[assignment]
    steps = Meter(made, SamplingParams(ignore_eos=True), 0.1, lambda: paced.now).run()
    assert {step.decodes for step in steps if not step.chunks} == {1, 2, 3}
    assert {1, 2, 3} > {step.decodes for step in steps if step.decodes and step.chunks} == {1, 2}
    assert {(0, 16), (0, 64), (64, 16)} <= {chunk for step in steps if not step.decodes for chunk in step.chunks}
    assert any(len(step.chunks) > 1 for step in steps)
    for step in steps:
        assert len(step.seconds) >= 6  # three times, in both turns
        wanted = 1.0 + 0.1 * step.decodes + 0.001 * step.context
        wanted += sum(0.01 * rows * (1 + 0.01 * start) for start, rows in step.chunks)
        assert sum(step.seconds) / len(step.seconds) == pytest.approx(wanted, abs=0.001), step
        assert max(step.seconds) - min(step.seconds) < 0.001 * step.decodes * MARGIN + 1e-6
    assert not made.has_work()
    assert made.pool is not None
    made.pool.check()
    assert made.pool.free == made.pool.size


def test_what_takes_long_to_launch_is_charged_to_the_step_that_does(small: Path) -> None:
    """While its kernels are launched, the results of the step before wait: that one did not take so long."""
    made = engine(small, overlap=True, **SHAPE)
    paced = Paced(made.runner, lambda step: 0.5, lambda step: 8.0 if step.chunks else 0.1)
    made.runner = paced  # type: ignore[assignment]
    steps = Meter(made, SamplingParams(ignore_eos=True), 0.1, lambda: paced.now).run()
    for step in steps:
        wanted = 8.0 if step.chunks else 0.5
        assert step.launch == [pytest.approx(8.0 if step.chunks else 0.1)] * len(step.seconds), step
        assert sorted(step.seconds)[len(step.seconds) // 2] == pytest.approx(wanted, abs=0.51), step


def test_scenes_stay_within_the_limits() -> None:
    limits = Limits(48, 512, 1024, 16, 500)
    for scene in scenes(limits):
        assert scene.decodes <= 48
        assert scene.decodes * (scene.context + MARGIN) <= 499 * 16
        assert scene.context + MARGIN <= 1024
        for chunks in scene.arrivals:
            assert scene.decodes + sum(rows for _, rows in chunks) <= 512
            assert all(start + rows <= 1024 for start, rows in chunks)
    found = scenes(limits)
    assert {scene.decodes for scene in found} == {0, 1, 2, 4, 8, 16, 32, 48}
    assert max(rows for scene in found for chunks in scene.arrivals for _, rows in chunks) == 512
    with pytest.raises(ConfigError, match="max-model-len"):
        scenes(Limits(4, 64, SHORT + MARGIN - 1, 16, 100))
    assert list(doubling(1, 6)) == [1, 2, 4, 6]
    assert list(doubling(16, 100, 4)) == [16, 64, 100]
    assert list(doubling(16, 10)) == []


def test_only_models_that_generate_are_measured(t_bert: Path) -> None:
    with pytest.raises(ConfigError, match="models that generate"):
        Meter(engine(t_bert), SamplingParams(), 0.1)


def test_from_measured_steps_to_a_prediction(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """bench kernels --steps, then simulate: text, JSON, plot, search; what is wrong is refused."""
    model, file, plot = str(small), tmp_path / "steps.json", tmp_path / "figures.html"
    assert main(["bench", "kernels", model, "--steps", "--seconds", "0.001", *FLAGS]) == 0
    file.write_text(capsys.readouterr().out)
    times = read(file)
    assert (times.model, times.backend, times.dtype, times.overlap, times.ranks) == (model, "cpu", "float32", False, 1)
    assert times.limits["max_num_batched_tokens"] == 64
    assert times.sampling["ignore_eos"] is True
    assert times.front is not None
    assert 1e-5 < times.front.request < 1.0
    assert times.front.wake + times.front.chunk > 1e-6
    assert not any(step.launch for step in times.steps)  # they are launched when they are computed

    load = (
        "--step-times",
        str(file),
        "--num-prompts",
        "40",
        "--input-len",
        "4:40",
        "--output-len",
        "2:20",
        *FLAGS[2:-2],
    )
    judged = ("--slo", "ttft:5s,itl:900", "e2el:60000", "--price-per-hour", "2")
    assert main(["simulate", model, *load, "--rate", "1,40", *judged, "--processes", "1", "--plot", str(plot)]) == 0
    text = capsys.readouterr().out
    assert "40 answered" in text
    assert "of 1 process, " in text
    assert "cost of a million" in text
    assert "the fit misses measured steps by" in text
    assert plot.read_text().count("<svg") > 3

    assert main(["simulate", model, *load, "--rate", "40", "--format", "json", "--steady"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main(["simulate", model, *load, "--rate", "40", "--format", "json", "--steady"]) == 0
    assert json.loads(capsys.readouterr().out) == first
    row: dict[str, Any] = first["points"][0]
    assert (row["completed"], row["replicas"], row["max_concurrency"]) == (40, 1, None)
    assert first["step_times"]["device"] == times.device
    assert first["limits"]["max_num_seqs"] == 3
    assert row["kv_tokens"] == (first["limits"]["blocks"] - 1) * 16

    search = ("--rate", "400", "--slo", "ttft:100000", "--find-replicas")
    assert main(["simulate", model, *load, *search]) == 0
    assert "1 engine keeps 99.00%" in capsys.readouterr().out
    assert main(["simulate", model, *load, "--rate", "400", "--slo", "ttft:0.001", "--find-replicas"]) == 3
    assert "no number of engines keeps 99.00%" in capsys.readouterr().out


def test_without_measured_steps_it_says_so_or_estimates(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(small), "--backend", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MiB"]
    assert main(words) == 2
    assert "bench kernels MODEL --steps" in capsys.readouterr().err
    figures = ["--bandwidth", "1GB", "--flops", "100g", "--rate", "5", "--num-prompts", "20", "--input-len", "8:32"]
    assert main([*words, *figures, "--output-len", "4:8"]) == 0
    assert "estimated, not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--find-replicas"], "needs limits"),
        (["--find-replicas", "--slo", "ttft:5", "--replicas", "2"], "leave --replicas out"),
        (["--rate", "0"], "--request-rate must be above 0"),
        (["--replicas", "0"], "--replicas must be above 0"),
        (["--attain", "1.5"], "--attain is a share"),
        (["--plot", "x.png"], "must end with .html"),
        (["--workload", "nowhere.jsonl"], "neither random nor a file"),
        (["--step-times", "nowhere.json"], "nowhere.json"),
        (["--delay-ms", "nan"], "--delay-ms must be at least 0, not nan"),
        (["--num-prompts", "0"], "--num-prompts must be at least 1"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    small: Path, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(small), "--backend", "cpu", *flags]) == 2
    assert words in capsys.readouterr().err


def test_without_a_tokenizer_the_front_is_left_out_and_that_is_said(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(small / name)
    assert main(["bench", "kernels", str(bare), "--steps", "--seconds", "0.001", *FLAGS]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["front"] is None
    assert "give --front-ms to simulate" in said.err
    assert "tokenizer" in said.err
