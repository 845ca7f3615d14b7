"""`anycore bench offline` on tiny models, and the workloads it shares with other engines."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny
from server.harness import SCRIPTED

from anycore.cli import bench_startup, workloads
from anycore.cli.main import main
from anycore.errors import AnycoreError


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


def test_kernels_are_timed_at_the_models_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tiny.tiny_lm(tmp_path, layers=1))
    words = ["bench", "kernels", model, "--dtype", "float32", "--backend", "cpu", "--seconds", "0.001", "--rows", "1,5"]
    assert main([*words, "--lengths", "8,32", "--requests", "1,3"]) == 0
    found = json.loads(capsys.readouterr().out)
    config = json.loads((Path(model) / "config.json").read_text())
    down = [row for row in found["operations"] if row.get("matrix") == "mlp.down_proj"]
    assert [row["rows"] for row in down] == [1, 5]
    assert down[0]["shape"] == [config["hidden_size"], config["intermediate_size"]]
    assert down[1]["flops"] == 5 * down[0]["flops"] == 10 * config["hidden_size"] * config["intermediate_size"]
    attention = [row for row in found["operations"] if row["operation"] == "attention"]
    shapes = [(row["kind"], row["requests"], row["length"]) for row in attention]
    of_each = ("decode", 1), ("decode", 3), ("prefill", 1)
    assert shapes == [(kind, count, length) for length in (8, 32) for kind, count in of_each]
    assert {row["operation"] for row in found["operations"]} == {"linear", "logits", "gated", "rms_norm", "attention"}
    assert all(row["seconds"] > 0 and row["bandwidth_share"] >= 0 for row in found["operations"])


def test_kernels_of_an_encoder_attend_without_a_cache(t_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--backend", "cpu", "--seconds", "0.001", "--rows", "2", "--lengths", "8", "--requests", "2"]
    assert main(["bench", "kernels", str(t_bert), *words]) == 0
    rows = json.loads(capsys.readouterr().out)["operations"]
    assert [row["kind"] for row in rows if row["operation"] == "attention"] == ["texts"]


def test_a_start_is_timed_in_its_stages(t_lm: Path) -> None:
    command = [sys.executable, str(SCRIPTED), str(t_lm), "--", "load=0.1"]
    found = bench_startup.start(command, {}, 60)
    assert 0 < found["port_s"] <= found["ready_s"] <= found["first_answer_s"]
    with pytest.raises(AnycoreError, match="refused as told"):
        bench_startup.start([*command, "refuse=refused as told"], {}, 60)


def test_startup_refuses_what_it_cannot_make_cold(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "startup", "nobody/model", "--caches", "cold"]) == 2
    assert "as a folder or file" in capsys.readouterr().err
