"""`anycore bench offline` on tiny models, and the workloads it shares with other engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny

from anycore.cli import workloads
from anycore.cli.main import main


def test_bench_prints_one_object_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.tiny_lm(tmp_path, layers=1))
    words = ["bench", "offline", model, "--workload", "g1", "--runs", "1", "--dtype", "float32"]
    assert main([*words, "--kv-cache-memory", "8MiB"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["engine"], row["model"], row["workload"], row["dtype"]) == ("anycore", model, "G1", "float32")
    assert row["out_tok_s"] == pytest.approx(128 / row["wall_s"], rel=0.01)
    assert row["decode_tok_s"] == pytest.approx(127 / (row["wall_s"] - row["ttft_s"]), rel=0.01)
    assert row["min_out_tok_s"] == row["max_out_tok_s"] == row["out_tok_s"]
    assert row["peak_rss_mib"] > 10


@pytest.mark.parametrize("flags", [["--workload", "G9"], ["--runs", "0"]])
def test_bench_refuses_what_it_cannot_measure(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "offline", "nowhere", *flags]) == 2
    assert flags[0] in capsys.readouterr().err


def test_workloads_are_the_same_every_time_and_differ_between_runs() -> None:
    ids = list(range(5000))
    for work in workloads.GENERATIONS.values():
        assert work.prompts(ids, 0) == work.prompts(ids, 0)
        assert work.prompts(ids, 0) != work.prompts(ids, 1)
    lengths = [len(prompt) for prompt in workloads.many_streams(ids, 0)]
    assert lengths == [len(prompt) for prompt in workloads.many_streams(ids, 1)]
    assert len(lengths) == 32
    assert 64 <= min(lengths) <= max(lengths) <= 256
    shared = workloads.shared_prefix(ids, 0)
    assert {tuple(prompt[:1024]) for prompt in shared} == {tuple(shared[0][:1024])}
    assert {len(prompt) for prompt in shared} == {1056}


def test_corpus_without_the_licences_is_made_up_and_fixed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(workloads, "LICENCES", tmp_path)
    assert workloads.corpus() == workloads.corpus()
    assert len(workloads.corpus().split()) == 40000
