"""`anycore bench serve`: what it sends and when, and that it counts what a real server answers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from threading import Thread
from typing import Any
from xml.etree import ElementTree

import pytest
from server.conftest import served
from server.fake_child import scripted
from server.harness import Live, serve_here

from anycore.bench.client import Choice, Delta, Outcome, has_token, places, share
from anycore.bench.load import Load
from anycore.bench.report import most_at_once, percentile, summarize
from anycore.cli.main import main
from anycore.errors import ConfigError

LOAD = Load("http://nowhere/v1", "lm", num_prompts=40, input_len=(3, 9), output_len=(2, 5), vocab_size=400, seed=3)


@pytest.fixture(scope="module")
def live(t_lm: Path, t_bert: Path, t_ce: Path) -> Iterator[Live]:
    """Models of each kind that bench can ask, and a queue that overflows soon."""
    models = (
        served(t_lm, "lm"),
        served(t_lm, "narrow", max_num_seqs=1, max_queued=1),
        served(t_bert, "bert"),
        served(t_ce, "ce"),
    )
    with serve_here(*models) as live:
        yield live


def bench(live: Live, capsys: pytest.CaptureFixture[str], model: str, *words: str, code: int = 0) -> dict[str, Any]:
    where = ["--url", live.url + "/v1", "--model", model, "--vocab-size", "400", "--json", "-"]
    assert main(["bench", "serve", *where, *words]) == code
    row: dict[str, Any] = json.loads(capsys.readouterr().out)
    return row


# --- what is sent, and when ------------------------------------------------------------------------------------------


def test_equal_loads_make_equal_requests_and_other_seeds_others() -> None:
    assert LOAD.bodies() == replace(LOAD).bodies() != replace(LOAD, seed=4).bodies()
    for body in LOAD.bodies():
        assert 3 <= len(body["prompt"]) <= 9
        assert 2 <= body["max_tokens"] <= 5
        assert all(100 <= token < 400 for token in body["prompt"])
    shared = replace(LOAD, prefix_len=7, input_len=(2, 2)).bodies()
    assert {len(body["prompt"]) for body in shared} == {9}
    assert len({tuple(body["prompt"][:7]) for body in shared}) == 1


@pytest.mark.parametrize("burstiness", [0.3, 1.0, 50.0])
def test_arrivals_keep_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = replace(LOAD, num_prompts=2000, request_rate=20.0, burstiness=burstiness).arrivals
    assert times == sorted(times)
    assert times[-1] == pytest.approx(100)
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) / mean
    assert deviation == pytest.approx(burstiness**-0.5, rel=0.2)
    assert set(LOAD.arrivals) == {0.0}


def test_processes_share_every_request_and_every_place() -> None:
    alone = [body for _, body in share(LOAD, 0, 1)]
    parts = [[body for _, body in share(LOAD, index, 3)] for index in range(3)]
    assert sorted(map(str, alone)) == sorted(str(turns) for part in parts for turns in part)
    assert [places(replace(LOAD, max_concurrency=8), index, 3) for index in range(3)] == [3, 3, 2]
    assert places(LOAD, 0, 3) is None


def test_files_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b", "max_tokens": 7}\n\n{"conversations": [{"from": "human", "value": "c"}]}\n')
    bodies = replace(LOAD, file=path, num_prompts=5).bodies()
    assert [body["prompt"] for body in bodies] == ["a b", "c", "a b", "c", "a b"]
    assert bodies[0]["max_tokens"] == 7
    assert 2 <= bodies[1]["max_tokens"] <= 5
    chat = replace(LOAD, file=path, num_prompts=1, endpoint="chat").bodies()[0]
    assert chat["messages"] == [{"role": "user", "content": "a b"}]
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ConfigError, match=r"prompts.jsonl:2 is neither"):
        replace(LOAD, file=path).bodies()


def test_files_as_other_programs_write_them(tmp_path: Path) -> None:
    """A UTF-8 mark, CRLF, empty lines, a line separator within a text, and conversations in which nothing is said."""
    path = tmp_path / "prompts.jsonl"
    lines = ['{"prompt": "a\u2028b\x85c"}', "", "  ", '{"prompt": "d"}', '{"conversations": []}', ""]
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    assert [row.prompts for row in replace(LOAD, file=path).rows] == [("a\u2028b\x85c",), ("d",)]
    path.write_text('[{"conversations": []}, {"conversations": [{"value": "e"}]}]', encoding="utf-8-sig")
    assert [row.prompts for row in replace(LOAD, file=path).rows] == [("e",)]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"prompt": "a"}\n\n{"prompt": \n', r"bad:3 is not JSON"),
        (b'[{"prompt": "a"}', "begins as a list that is not JSON"),
        ('{"prompt": "a"}'.encode("utf-16"), "is not UTF-8 .* save it as UTF-8"),
        (b"7", r"bad:1 is neither"),
        (b'{"prompt": {"a": 1}}', r"bad:1: prompt must be a text or a list of token ids"),
        (b'{"prompt": "a", "max_tokens": 0}', r"bad:1: max_tokens must be .* at least 1, not 0"),
        (b'{"prompt": "a", "at": NaN}', r"bad:1: at must be seconds, 0 or more, not nan"),
        (b'{"timestamp": 0, "input_length": 3, "output_length": "7"}', r"bad:1: output_length must be"),
    ],
)
def test_a_line_that_cannot_be_sent_is_told_by_its_number(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        _ = replace(LOAD, file=path).rows


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-concurrency", "1", "--processes", "2"], "--max-concurrency must be at least 2"),
        (["--request-rate", "0"], "--request-rate must be above 0"),
        (["--workload", "nowhere.jsonl"], "neither random nor a file"),
        (["--url", "localhost:8000"], "--url must be an address such as http://127.0.0.1:8000/v1"),
        (["--url", "http://[::1"], "--url must be an address"),
        (["--url", "http://here:99999/v1"], "--url must be an address"),
        (["--peer", "ftp://here/v1"], "--peer must be an address"),
        (["--peer", "http://127.0.0.1:8000/v1/"], "--peer is the same URL as --url"),
    ],
)
def test_flags_that_make_no_sense(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--model", "lm", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--input-len", "9:3"], ["--output-len", "few"], ["--extra-body", "[]"]])
def test_words_that_cannot_be_read(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "serve", "--model", "lm", *words])
    assert f"argument {words[0]}: must be a" in capsys.readouterr().err


def test_a_recorded_trace_keeps_its_times_lengths_and_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = [(2500, 1500, 7, [3, 4]), (0, 600, 5, [3])]
    names = "timestamp", "input_length", "output_length", "hash_ids"
    path.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in trace))
    load = replace(LOAD, file=path)
    assert load.arrivals == [0.0, 2.5]
    first, second = load.bodies()
    assert [(len(body["prompt"]), body["max_tokens"]) for body in (first, second)] == [(600, 5), (1500, 7)]
    assert first["prompt"][:512] == second["prompt"][:512]
    assert first["prompt"][512:] != second["prompt"][512:600]
    assert replace(load, duration=1.0).number == 1


def test_sharegpt_lists_and_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    said = [("human", "a"), ("gpt", "b"), ("human", "c")]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    turns = replace(LOAD, file=path, endpoint="chat", turns=(9, 9)).conversation(0)
    assert [turn["messages"][0]["content"] for turn in turns] == ["a", "c"]
    prompts = [body["prompt"] for body in replace(LOAD, prefix_len=7, num_prefixes=3).bodies()]
    assert len({tuple(prompt[:7]) for prompt in prompts}) == 3


# --- what comes back -------------------------------------------------------------------------------------------------


def test_events_that_carry_tokens() -> None:
    assert has_token([Choice(text="a")], True)
    assert has_token([Choice(text="")], True)  # a token that shows no text
    assert not has_token([Choice(text="", finish_reason="length")], True)
    assert has_token([Choice(text="", finish_reason="length")], False)  # the only token showed none
    assert not has_token([Choice(delta=Delta(content=""))], False)  # the role
    assert has_token([Choice(delta=Delta(reasoning_content="a"))], False)
    assert not has_token([], False)  # usage


def test_figures_of_known_outcomes() -> None:
    outcomes = [
        Outcome(10.0, first=0.1, total=0.5, gaps=[0.1, 0.3], input_tokens=5, output_tokens=3, status=200),
        Outcome(10.2, first=0.3, total=0.4, gaps=[0.1], input_tokens=7, output_tokens=2, status=200),
        Outcome(11.9, total=0.1, status=429, error="full"),
    ]
    figures = summarize(outcomes, {"ttft": 200.0})
    assert (figures["completed"], figures["failed"], figures["errors"]) == (2, 1, {"429": 1})
    assert figures["first_error"] == "full"
    assert figures["duration"] == pytest.approx(2.0)
    assert figures["output_throughput"] == pytest.approx(2.5)
    assert figures["total_token_throughput"] == pytest.approx(8.5)
    assert figures["request_goodput"] == pytest.approx(0.5)
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["median_tpot_ms"] == pytest.approx(150)
    assert figures["median_itl_ms"] == pytest.approx(100)
    assert figures["max_concurrent_requests"] == most_at_once(outcomes) == 2
    assert percentile([0.0, 1.0, 2.0, 4.0], 90) == pytest.approx(3.4)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_generated_tokens_are_counted_exactly(
    live: Live, capsys: pytest.CaptureFixture[str], endpoint: str, processes: int
) -> None:
    words = ["--endpoint", endpoint, "--num-prompts", "12", "--input-len", "3:9", "--output-len", "4:8", "--seed", "5"]
    row = bench(
        live, capsys, "lm", *words, "--processes", str(processes), "--max-concurrency", "4", "--goodput", "ttft:1e9"
    )
    asked = replace(LOAD, endpoint=endpoint, num_prompts=12, output_len=(4, 8), seed=5).bodies()
    assert (row["completed"], row["failed"]) == (12, 0)
    assert row["total_output_tokens"] == sum(body["max_tokens"] for body in asked)
    if endpoint == "completions":
        assert row["total_input_tokens"] == sum(len(body["prompt"]) for body in asked)
    assert 1 <= row["max_concurrent_requests"] <= 4
    assert row["output_throughput"] == pytest.approx(row["total_output_tokens"] / row["duration"], rel=1e-3)
    assert row["request_goodput"] == row["request_throughput"]
    assert 0 < row["median_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"]
    assert row["mean_itl_ms"] > 0


def test_vectors_and_scores(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--num-prompts", "6", "--input-len", "3:9", "--vocab-size", "60"]
    row = bench(live, capsys, "bert", "--endpoint", "embeddings", *few)
    asked = replace(LOAD, endpoint="embeddings", num_prompts=6, output_len=(100, 1024), seed=0, vocab_size=60).bodies()
    assert (row["completed"], row["total_output_tokens"]) == (6, 0)
    assert row["total_input_tokens"] == sum(len(body["input"]) for body in asked)
    assert "mean_ttft_ms" not in row
    row = bench(
        live, capsys, "ce", "--endpoint", "rerank", "--documents", "3", "--input-len", "1:2", "--num-prompts", "2"
    )
    assert (row["completed"], row["failed"]) == (2, 0)
    assert row["total_input_tokens"] > 2 * 3


def test_a_full_queue_is_counted_with_its_message(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--num-prompts", "12", "--input-len", "3", "--output-len", "60"]
    row = bench(live, capsys, "narrow", *words, code=1)
    assert row["completed"] + row["failed"] == 12
    assert row["completed"] >= 2
    assert row["errors"] == {"429": row["failed"]}
    assert "queue" in row["first_error"]
    assert row["total_output_tokens"] == 60 * row["completed"]


def test_a_rate_is_kept(t_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serve_here(served(t_lm, "lm"), launch=scripted(str(t_lm), "max_num_seqs=64")) as live:
        words = ["--num-prompts", "20", "--input-len", "3", "--output-len", "2", "--request-rate", "20"]
        row = bench(live, capsys, "lm", *words)
    first, last = LOAD.arrivals[0], 1.0
    assert row["completed"] == 20
    assert last - first - 0.3 < row["duration"] < 3
    assert row["request_rate"] == 20


def test_a_duration_ends_a_load_that_has_no_other_end(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--input-len", "3", "--output-len", "2", "--max-concurrency", "2", "--duration", "0.4"]
    row = bench(live, capsys, "lm", *words)
    assert row["completed"] >= 2
    assert row["max_concurrent_requests"] <= 2
    assert row["duration"] > 0.2
    assert main(["bench", "serve", "--model", "lm", "--duration", "1"]) == 2
    assert "it has no end" in capsys.readouterr().err


def test_turns_of_a_chat_grow_by_what_was_said(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--endpoint", "chat", "--turns", "3", "--num-prompts", "2", "--input-len", "4", "--output-len", "3"]
    row = bench(live, capsys, "lm", *words, "--save-detailed", "--max-concurrency", "1")
    assert (row["completed"], row["total_output_tokens"]) == (6, 18)
    lengths = [request["input_tokens"] for request in row["requests"]]
    assert lengths[0] < lengths[1] < lengths[2] > lengths[3]


def test_a_sweep_against_a_peer_takes_turns_and_is_drawn(
    live: Live, t_lm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, page, drawing = tmp_path / "rows.jsonl", tmp_path / "page.html", tmp_path / "drawing.svg"
    words = ["bench", "serve", "--url", live.url + "/v1", "--model", "lm", "--vocab-size", "400", "--input-len", "3"]
    words += [
        "--output-len",
        "3",
        "--num-prompts",
        "4",
        "--max-concurrency",
        "1,2",
        "--rounds",
        "2",
        "--json",
        str(rows),
    ]
    with serve_here(served(t_lm, "other")) as peer:
        words += ["--peer", peer.url + "/v1", "--peer-model", "other", "--peer-api-key", "secret"]
        assert main([*words, "--plot", str(page)]) == 0
        table = capsys.readouterr().out
        assert main([*words, "--plot", str(drawing)]) == 0
    found = [json.loads(text) for text in rows.read_text().splitlines()][:8]
    ours, theirs = live.url + "/v1", peer.url + "/v1"
    assert [row["target"] for row in found] == [ours, theirs, theirs, ours, theirs, ours, ours, theirs]
    assert [row["max_concurrency"] for row in found] == [1] * 4 + [2] * 4
    assert [row["seed"] for row in found] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert found[0]["total_input_tokens"] == found[1]["total_input_tokens"]
    assert found[1]["server"]["data"][0]["id"] == "other"
    assert "secret" not in rows.read_text()
    assert table.count("times the first") == 2
    assert page.read_text().count("<svg") >= 5
    ElementTree.fromstring(drawing.read_text())


def test_what_fails_before_the_load_is_said(live: Live, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["bench", "serve", "--vocab-size", "400", "--url"]
    assert main([*where, live.url + "/v1", "--model", "nobody"]) == 1
    assert "(404)" in (said := capsys.readouterr().err)
    assert "there is no model 'nobody'" in said
    assert main([*where, "http://127.0.0.1:9/v1", "--model", "lm"]) == 1
    assert "(no status)" in capsys.readouterr().err


STREAMS = {
    "/cut/v1": b'data: {"choices": [{"text": "a"}]}\n\n',
    "/uncounted/v1": b'data: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n',
    "/broken/v1": b'data: {"error": {"message": "not finite"}}\n\n',
}


class Liar(BaseHTTPRequestHandler):
    """Answers 200 and then not what was asked for, as the URL says."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(STREAMS[self.path.removesuffix("/completions")])

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "said"), [("/cut/v1", "before [DONE]"), ("/uncounted/v1", "no usage"), ("/broken/v1", "not finite")]
)
def test_a_stream_that_is_not_whole_has_failed(path: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Liar)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}{path}"
        words = ["--url", url, "--model", "lm", "--num-prompts", "2", "--num-warmups", "0", "--json", "-"]
        assert main(["bench", "serve", *words]) == 1
    finally:
        server.shutdown()
        server.server_close()
    row = json.loads(capsys.readouterr().out)
    assert row["failed"] == 2
    assert said in row["first_error"]
