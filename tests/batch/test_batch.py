"""`anycore run-batch`: answers equal HTTP's, bad lines are told, no death of the process loses or doubles a line."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from server.conftest import served
from server.fake_child import scripted
from server.harness import ThreadClient, patience, serve_here

from anycore.batch.ledger import Ledger, Unwritable, record
from anycore.batch.lines import index, numbered
from anycore.batch.run import Outcome, run_batch
from anycore.cli.main import main
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError

SCRIPT = Path(__file__).with_name("batch_scripted.py")


def line(name: str, url: str = "/v1/completions", **body: Any) -> str:
    asked = body or {"model": "lm", "prompt": [5, 6], "max_tokens": 3}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": asked}) + "\n"


def answers(target: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in target.read_text().splitlines()]


def run_here(source: Path, target: Path, *models: ModelConfig, **options: Any) -> Outcome:
    options.setdefault("client", ThreadClient)
    return run_batch(source, target, ServerConfig(), models, **options)


def run_scripted(folder: Path, source: Path, target: Path, *script: str, **options: Any) -> Outcome:
    client = partial(ThreadClient, launch=scripted(str(folder), *script))
    model = ModelConfig(model=str(folder), served_model_name=("lm",), task="generate")
    return run_here(source, target, model, client=client, **options)


# --- what is answered ------------------------------------------------------------------------------------------------


def test_answers_are_those_of_http_to_the_byte(tmp_path: Path, t_lm: Path, t_bert: Path, t_ce: Path) -> None:
    models = served(t_lm, "lm"), served(t_bert, "bert"), served(t_ce, "ce")
    asked = {
        "chat": ("/v1/chat/completions", {"model": "lm", "messages": [{"role": "user", "content": "a"}], "seed": 1}),
        "text": ("/v1/completions", {"model": "lm", "prompt": "b c", "temperature": 0, "max_tokens": 4, "n": 2}),
        "vector": ("/v1/embeddings", {"model": "bert", "input": ["a", "b c"]}),
        "coded": ("/v1/embeddings", {"model": "bert", "input": "a", "encoding_format": "base64"}),
        "order": ("/v1/rerank", {"model": "ce", "query": "a", "documents": ["b", "a c"]}),
        "score": ("/v1/score", {"model": "ce", "text_1": "a", "text_2": ["b", "c"]}),
        "nobody": ("/v1/completions", {"model": "other", "prompt": "a"}),
        "wrong": ("/v1/completions", {"model": "lm", "prompt": "a", "temperature": -1}),
    }
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(name, url, **body) for name, (url, body) in asked.items()))
    outcome = run_here(source, target, *models)
    assert (outcome.total, outcome.answered, outcome.failed, outcome.stopped) == (8, 8, 2, "")
    found = {made["custom_id"]: made for made in answers(target)}
    assert found.keys() == asked.keys()
    assert {name: made["response"]["status_code"] for name, made in found.items() if name in ("nobody", "wrong")} == {
        "nobody": 404,
        "wrong": 400,
    }
    raw = {json.loads(text)["custom_id"]: text for text in target.read_text().splitlines()}
    with serve_here(*models) as live:
        for name, (url, body) in asked.items():
            made = found[name]["response"]
            reply = live.post(url, body, headers={"x-request-id": made["request_id"]})
            assert reply.status_code == made["status_code"]
            assert reply.headers["x-request-id"] == made["request_id"]
            assert found[name]["error"] is None
            same = [re.sub(r'"created":\d+', "", text) for text in (reply.text, raw[name])]
            assert same[0] in same[1]


def test_bad_lines_are_told_by_their_number_and_stop_nothing(tmp_path: Path, t_lm: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    bad = [
        "no json\n",
        '{"method": "POST", "url": "/v1/completions", "body": {}}\n',
        line("route", "/v1/files"),
        line("a"),  # there already
        line("stream", model="lm", prompt="a", stream=True),
        line("list").replace(json.dumps({"model": "lm", "prompt": [5, 6], "max_tokens": 3}), "[]"),
        line("get").replace("POST", "GET"),
        line(""),
        line("long", prompt="a" * (ServerConfig().max_body_size + 5000)),
        '{"custom_id": "\xff"}\n',
    ]
    source.write_bytes("\n".join(["\ufeff" + line("a"), *bad, line("z")]).encode("utf-8", "surrogateescape"))
    outcome = run_scripted(t_lm, source, target)
    assert (outcome.total, outcome.answered, outcome.failed) == (12, 12, 10)
    found = answers(target)
    errors = {made["error"]["line"]: made for made in found if made["error"]}
    assert sorted(errors) == [2 * number + 1 for number in range(1, 11)]
    assert [errors[n]["custom_id"] for n in sorted(errors)][:7] == [None, None, "route", None, "stream", "list", "get"]
    assert "stands on an earlier line" in errors[9]["error"]["message"]
    assert "--max-body-size" in errors[19]["error"]["message"]
    assert {made["custom_id"] for made in found if not made["error"]} == {"a", "z"}
    before = target.read_bytes()
    again = run_scripted(t_lm, source, target)
    assert (again.answered, again.failed, target.read_bytes()) == (12, 10, before)


def test_a_full_queue_is_waited_for_and_a_hopeless_line_is_not(tmp_path: Path, t_lm: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wide = line("wide", model="lm", prompt=[5], max_tokens=2, n=9)
    source.write_text(wide + "".join(line(f"{n}") for n in range(12)))
    outcome = run_scripted(t_lm, source, target, "max_queued=2", max_concurrency=8)
    assert (outcome.answered, outcome.failed) == (13, 1)
    status = {made["custom_id"]: made["response"]["status_code"] for made in answers(target)}
    assert Counter(status.values()) == {200: 12, 429: 1}
    assert status["wide"] == 429


# --- what goes wrong -------------------------------------------------------------------------------------------------


def start(folder: Path, source: Path, target: Path, largest: int, *script: str) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(SCRIPT.parent.parent), os.environ.get("PYTHONPATH", "")])
    words = [str(folder), str(source), str(target), str(largest), *script]
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def test_killed_at_any_moment_every_line_is_answered_once(tmp_path: Path, t_lm: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"line {n}") for n in range(300)))
    chosen = random.Random(4)
    kept = 0
    for _ in range(3):
        process = start(t_lm, source, target, 0, "step=0.01")
        wanted = kept + chosen.randrange(1, 4000)
        end = time.monotonic() + 60 * patience()
        while time.monotonic() < end and process.poll() is None:
            if target.exists() and target.stat().st_size >= wanted:
                break
            time.sleep(0.001)
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        process.communicate()
        kept = target.stat().st_size
        with target.open("ab") as file:
            file.write(b'{"id":"batch_req_0","custom_id":"line 29'[: chosen.randrange(1, 40)])  # a torn last line
    process = start(t_lm, source, target, 0)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    counts = Counter(made["custom_id"] for made in answers(target))
    assert counts == Counter(f"line {n}" for n in range(300))


def test_a_full_disk_stops_the_run_which_goes_on_when_there_is_room(tmp_path: Path, t_lm: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"{n}") for n in range(60)))
    process = start(t_lm, source, target, 5000)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "File too large" in said
    assert 0 < target.stat().st_size <= 5000
    done = len(answers(target))  # whole lines, all of them
    assert f"answered={done}," in said
    assert 0 < done < 60
    assert run_scripted(t_lm, source, target).answered == 60
    assert Counter(made["custom_id"] for made in answers(target)) == Counter(map(str, range(60)))


def test_a_full_disk_stops_a_run_whose_lines_are_all_answered(tmp_path: Path, t_lm: Path, monkeypatch: Any) -> None:
    """So few that all were answered before the first was to be written: the run waited for ever."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a") + line("b"))

    def full(self: Ledger, lines: list[bytes]) -> None:
        time.sleep(0.2)  # until both have come
        raise Unwritable("out.jsonl cannot be written: No space left on device")

    monkeypatch.setattr(Ledger, "append", full)
    outcome = run_scripted(t_lm, source, target)
    assert (outcome.answered, outcome.code) == (0, 1)
    assert "No space left" in outcome.stopped
    monkeypatch.undo()
    assert run_scripted(t_lm, source, target).answered == 2


def test_an_engine_that_dies_leaves_the_rest_for_the_next_run(tmp_path: Path, t_lm: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(line(f"{n}") for n in range(20)))
    process = start(t_lm, source, target, 0, "die_step=9")
    process.communicate(timeout=120)
    assert run_scripted(t_lm, source, target).answered == 20
    assert Counter(made["custom_id"] for made in answers(target)) == Counter(map(str, range(20)))
    assert {made["response"]["status_code"] for made in answers(target)} <= {200, 503}


def test_two_runs_and_foreign_files_are_refused(tmp_path: Path) -> None:
    target = tmp_path / "out.jsonl"
    with Ledger(target) as ledger:
        ledger.append([record("a")])
        with pytest.raises(ConfigError, match="another run"):
            Ledger(target)
    for foreign in (b"notes of mine", b'{"custom_id": "a"}\n', record("a") + b"x"):
        target.write_bytes(foreign)
        with pytest.raises(ConfigError, match=r"out.jsonl:\d is no answer"):
            Ledger(target)
        assert target.read_bytes() == foreign
    with pytest.raises(ConfigError, match="no regular file"):
        Ledger(Path("/dev/null"))
    with pytest.raises(ConfigError, match="cannot be written"):
        Ledger(tmp_path / "nowhere" / "out.jsonl")


def test_a_write_that_fails_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.jsonl"
    with Ledger(target) as ledger:
        ledger.append([record("a")])
        real = os.write

        def half(file: int, data: memoryview) -> int:
            if len(data) < 60:
                raise OSError(28, "No space left on device")
            return real(file, data[:50])

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(Unwritable, match="No space left"):
            ledger.append([record("b"), record("c")])
        monkeypatch.undo()
        ledger.append([record("d")])
    assert [made["custom_id"] for made in answers(target)] == ["a", "d"]


def test_lines_are_read_without_their_length_in_memory(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b"short\n" + b"x" * 5_000_000 + b"\n\nlast")
    assert [(n, len(text)) for n, text in numbered(source, 100)] == [(1, 5), (2, 101), (3, 0), (4, 4)]
    assert index(source, 100).total == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "name the file IN.jsonl"),
        (["in.jsonl"], "name the file OUT.jsonl"),
        (["-i", "in.jsonl", "-o", "out.jsonl"], "no model is named"),
        (["in.jsonl", "out.jsonl", "--model", "m", "--max-concurrency", "0"], "--max-concurrency must be at least 1"),
        (["in.jsonl", "out.jsonl", "--model", "m"], "in.jsonl cannot be read"),
    ],
)
def test_flags_that_make_no_sense(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_command_answers_a_file(tmp_path: Path, t_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(line("a", prompt=[5, 6], max_tokens=3) + "{}\n")
    words = ["run-batch", "-i", str(source), "-o", str(target), "--model", str(t_lm), "--dtype", "float32"]
    assert main([*words, "--backend", "cpu", "--kv-cache-memory", "8MiB", "--threads", "1"]) == 1
    assert "answers 2 of 2 lines, 1 of them with errors" in capsys.readouterr().out
    assert {made["custom_id"] for made in answers(target)} == {"a", None}
