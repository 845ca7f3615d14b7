"""Log lines: plain or JSON, with the id of their request, and never with a prompt or a key in them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from server.harness import serve_scripted

from anycore.cli.main import main
from anycore.server import visits
from anycore.server.access import line_of
from anycore.server.logs import JsonFormatter, MaskingFormatter, log_crash
from anycore.server.visits import Visit

KEY, PROMPT = "key-5f1c77e2", "marker-of-a-prompt-9931"
HEADERS = {"authorization": f"Bearer {KEY}"}


def record(message: str = "said", error: BaseException | None = None, **extra: Any) -> logging.LogRecord:
    raised = None if error is None else (type(error), error, error.__traceback__)
    made = logging.LogRecord("anycore.x", logging.WARNING, "", 0, message, (), raised)
    made.__dict__.update(extra)
    return made


def raised() -> ValueError:
    try:
        raise ValueError(PROMPT)
    except ValueError as error:
        return error


def test_a_json_line_has_its_parts() -> None:
    formatter = JsonFormatter([KEY], label="lm")
    line = json.loads(formatter.format(record(f"with {KEY}\nand more", fields={"status": 200, "key": ""})))
    assert line.pop("time").endswith("Z")
    said = {"message": "with ***\nand more", "level": "warning", "logger": "anycore.x", "process": "lm", "status": 200}
    assert line == said
    assert json.loads(JsonFormatter(['"quo"']).format(record('a "quo" b')))["message"] == "a *** b"  # before escaping


def test_lines_carry_the_id_of_the_request_that_they_are_about() -> None:
    visits.begin(Visit("id-7", "GET", "/"))
    assert json.loads(JsonFormatter([]).format(record()))["request_id"] == "id-7"
    assert MaskingFormatter([], label="lm").format(record()).endswith("lm: id-7: said")


@pytest.mark.parametrize("kind", [MaskingFormatter, JsonFormatter])
def test_what_an_exception_says_is_written_only_where_prompts_may_be(
    kind: type[MaskingFormatter], caplog: pytest.LogCaptureFixture
) -> None:
    log_crash(logging.getLogger("anycore.x"), "it failed", raised())
    for each in (*caplog.records, record(error=raised())):
        quiet, loud = kind([]).format(each), kind([], loud=True).format(each)
        assert "ValueError" in quiet
        assert "test_logs.py" in quiet  # where
        assert PROMPT not in quiet
        assert PROMPT in loud
    assert PROMPT not in caplog.text.replace(str(record(error=raised()).exc_info), "")


def test_a_path_cannot_begin_a_line_of_its_own() -> None:
    assert "\n" not in line_of(Visit("a", "GET", "/v1/x\n2026-01-01 ERROR forged"), 0.1)


def ask(live: Any) -> None:
    """Requests of every kind, good and bad, all with the marker."""
    chat = {"model": "lm", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    bodies = [
        ("/v1/completions", {"model": "lm", "prompt": PROMPT, "max_tokens": 2}),
        ("/v1/completions", {"model": "lm", "prompt": PROMPT, "max_tokens": 2, "stream": True}),
        ("/v1/completions", {"model": "lm", "prompt": PROMPT, "max_tokens": PROMPT}),
        ("/v1/completions", {"model": "lm", "prompt": PROMPT, "user": PROMPT, "best_of": PROMPT}),
        ("/v1/completions", {"model": PROMPT, "prompt": PROMPT}),
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", {**chat, "messages": [{"role": PROMPT, "content": PROMPT}]}),
        ("/v1/chat/completions", {**chat, "stop": [PROMPT]}),
        ("/v1/embeddings", {"model": "lm", "input": PROMPT}),
        ("/rerank", {"model": "lm", "query": PROMPT, "documents": [PROMPT]}),
        ("/tokenize", {"model": "lm", "prompt": PROMPT}),
    ]
    for path, body in bodies:
        live.post(path, body, headers=HEADERS)
    live.post("/v1/completions", headers={**HEADERS, "content-type": "application/json"})
    live.get(f"/v1/models?api_key={KEY}", headers=HEADERS)
    live.get("/v1/models", headers={"authorization": f"Bearer {KEY}-almost"})
    live.get("/v1/models", headers={**HEADERS, "x-request-id": "mine-42"})
    live.get("/health")


@pytest.mark.parametrize(("level", "style"), [("debug", "json"), ("debug", "text"), ("info", "json")])
def test_o06_prompts_and_keys_are_in_no_line_at_any_level(t_lm: Path, level: str, style: str) -> None:
    environment = {"ANYCORE_API_KEY": KEY}
    with serve_scripted(
        t_lm, "fail_step=60", env=environment, engine_restarts=0, log_level=level, log_format=style
    ) as live:
        ask(live)
        slow = {"model": "lm", "prompt": PROMPT, "max_tokens": 200}
        live.post("/v1/completions", slow, headers=HEADERS)  # the engine fails on the way, with a traceback
        live.wait(lambda: any("RuntimeError" in line for line in live.output), 20)
    text = "".join(live.output)
    assert "RuntimeError" in text
    assert KEY not in text
    assert PROMPT not in text
    assert "mine-42" in text
    assert ("GET /health" in text) == (level == "debug")
    if style == "text":
        return
    lines = [json.loads(line) for line in live.output if not line.startswith("anycore: ")]
    served = [line for line in lines if line["logger"] == "anycore.access" and line["level"] == "info"]
    assert len({line["request_id"] for line in served}) == len(served) >= 15
    by_status = [line for line in served if line["status"] == 200 and line["path"] == "/v1/completions"]
    assert all(line["output_tokens"] == 2 and line["model"] == "lm" and line["seconds"] > 0 for line in by_status)
    assert {"invalid_value", "model_not_found", "invalid_api_key"} <= {line.get("error") for line in served}
    assert any(line.get("process") == "lm" for line in lines)  # of the engine's own process
    assert {line["level"] for line in lines} <= {"debug", "info", "warning", "error"}


def test_the_command_writes_its_own_lines_in_that_form_too(monkeypatch: pytest.MonkeyPatch) -> None:
    styles: list[tuple[Any, ...]] = []
    monkeypatch.setattr("anycore.server.logs.configure", lambda *given: styles.append(given))
    monkeypatch.setattr("anycore.cli.serve.serve", lambda *_, **__: 0)
    assert main(["serve", "m", "--log-format", "json", "--log-prompts"]) == 0
    assert styles[-1][-2:] == ("json", True)
