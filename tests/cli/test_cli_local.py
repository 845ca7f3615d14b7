"""The one-shot commands on tiny models: what they print, what they read, and that they agree with `LLM`."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from anycore.cli.main import main
from anycore.errors import BadRequest
from anycore.llm import LLM

TEXTS = ["Paris is the capital of France.", "The quick brown fox jumps over the lazy dog."]
SMALL = ["--dtype", "float32", "--kv-cache-memory", "4MiB", "--max-num-seqs", "4", "--threads", "1"]


def piped(text: str) -> io.TextIOWrapper:
    """Standard input that is a pipe."""
    return io.TextIOWrapper(io.BytesIO(text.encode()))


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().out.splitlines()


def test_generate_continues_each_prompt(t_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(t_lm), *TEXTS, "--max-tokens", "4", "--temperature", "0", "--json", *SMALL]
    assert main(words) == 0
    found = [json.loads(line) for line in lines(capsys)]
    override = '{"temperature": 0, "max_tokens": 4}'
    llm = LLM(str(t_lm), task="generate", dtype="float32", kv_cache_memory=2**22, override_generation_config=override)
    expected = llm.generate(TEXTS)
    assert [item["prompt"] for item in found] == TEXTS
    assert [item["text"] for item in found] == [output.text for output in expected]
    assert [item["tokens"] for item in found] == [len(output.token_ids) for output in expected]
    assert all(item["finish_reason"] in ("length", "stop") for item in found)


def test_generate_takes_standard_input_as_one_prompt(
    t_lm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", piped("yes no\nyes no\n"))
    assert main(["generate", str(t_lm), "--max-tokens", "2", "--temperature", "0", "--json", *SMALL]) == 0
    (line,) = lines(capsys)
    assert json.loads(line)["prompt"] == "yes no\nyes no\n"


def test_generate_prints_prompt_and_text_or_only_the_answer(t_lm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(t_lm), "yes no", "--max-tokens", "3", "--temperature", "0", *SMALL]
    assert main(words) == 0
    assert capsys.readouterr().out.startswith("yes no")
    assert main([*words, "--chat"]) == 0
    assert not capsys.readouterr().out.startswith("yes no")


def test_embed_prints_a_vector_a_text(t_bert: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(t_bert), *TEXTS, "--json", *SMALL]) == 0
    found = [json.loads(line) for line in lines(capsys)]
    assert [item["text"] for item in found] == TEXTS
    assert main(["embed", str(t_bert), *TEXTS, *SMALL]) == 0
    for item, line in zip(found, lines(capsys), strict=True):
        assert [float(word) for word in line.split()] == pytest.approx(item["embedding"], abs=1e-6)
    vectors = LLM(str(t_bert), task="embed", dtype="float32").embed(TEXTS)
    for item, vector in zip(found, vectors, strict=True):
        assert item["embedding"] == pytest.approx(vector, abs=1e-6)


def test_standard_input_is_utf_8_in_lines_as_other_tools_count_them(
    t_bert: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Texts were divided at U+2028 and form feeds, too, so that vectors no longer stood beside their lines."""
    monkeypatch.setattr("sys.stdin", piped("\ufeffone\u2028line\r\nanother\fline\n"))
    assert main(["embed", str(t_bert), "--json", *SMALL]) == 0
    said = capsys.readouterr().out.rstrip("\n").split("\n")
    assert [json.loads(line)["text"] for line in said] == ["one\u2028line", "another\fline"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"ok\ncaf\xe9\n")))
    assert main(["embed", str(t_bert), "--json", *SMALL]) == 2
    assert "standard input must be UTF-8, and line 2 is not (byte 0xe9)" in capsys.readouterr().err


def test_embed_and_rerank_take_a_line_each_from_standard_input(
    t_bert: Path, t_ce: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "\n\n".join(TEXTS) + "\n"
    monkeypatch.setattr("sys.stdin", piped(text))
    assert main(["embed", str(t_bert), "--json", *SMALL]) == 0
    assert [json.loads(line)["text"] for line in lines(capsys)] == TEXTS
    monkeypatch.setattr("sys.stdin", piped(text))
    assert main(["rerank", str(t_ce), "capital of France", "--json", *SMALL]) == 0
    assert {json.loads(line)["document"] for line in lines(capsys)} == set(TEXTS)


def test_rerank_prints_documents_best_first(t_ce: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rerank", str(t_ce), "capital of France", *TEXTS, "--json", *SMALL]) == 0
    found = [json.loads(line) for line in lines(capsys)]
    scores = [item["score"] for item in found]
    assert scores == sorted(scores, reverse=True)
    assert [TEXTS[item["index"]] for item in found] == [item["document"] for item in found]
    expected = LLM(str(t_ce), task="rerank", dtype="float32").rerank("capital of France", TEXTS)
    assert [(item["index"], item["score"]) for item in found] == [(i, pytest.approx(s, abs=1e-6)) for i, s in expected]


def test_chat_answers_in_this_process(
    t_lm: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", piped("yes no\n/exit\n"))
    assert main(["chat", str(t_lm), "--max-tokens", "5", "--temperature", "0", *SMALL]) == 0
    override = '{"temperature": 0, "max_tokens": 5}'
    llm = LLM(str(t_lm), task="generate", dtype="float32", kv_cache_memory=2**22, override_generation_config=override)
    assert capsys.readouterr().out == "".join(llm.stream_chat([{"role": "user", "content": "yes no"}])) + "\n"


@pytest.mark.parametrize(
    ("words", "code", "answer"),
    [
        (["generate", "no/such/folder", "x"], 2, "no/such/folder"),
        (["embed", "{t_ce}", "x"], 2, "cannot embed: this checkpoint can rerank"),
        (["embed", "{t_bert}", "x", "--backend", "nowhere"], 3, "there is no backend 'nowhere'; found: "),
        (["embed", "{t_bert}", "x", "--dtype", "float16", "--backend", "cpu"], 3, "float16"),
        (["embed", "{t_bert}", "x", "--backend", "cpu", "--device", "8"], 3, "device 8 asked for, devices seen: 0"),
    ],
)
def test_what_cannot_be_done_is_one_message_and_an_exit_code(
    words: list[str], code: int, answer: str, t_ce: Path, t_bert: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([word.format(t_ce=t_ce, t_bert=t_bert) for word in words]) == code
    output = capsys.readouterr()
    assert answer in output.err
    assert "Traceback" not in output.err
    assert output.out == ""


def test_no_input_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", piped(""))
    assert main(["embed", "m"]) == 2
    assert "there is no input: give it as arguments, or on standard input" in capsys.readouterr().err


def test_scores_of_many_pairs_are_those_of_each_query_alone(t_ce: Path) -> None:
    llm = LLM(str(t_ce), task="rerank", dtype="float32", threads=1)
    queries = [f"question {i % 3}" for i in range(40)]
    documents = [f"answer {i} " * (i % 5 + 1) for i in range(40)]
    together = llm.score(queries, documents)
    alone = [llm.score(query, [document])[0] for query, document in zip(queries, documents, strict=True)]
    assert together == pytest.approx(alone, abs=1e-6)
    with pytest.raises(BadRequest, match="2 queries for 40 documents"):
        llm.score(queries[:2], documents)
