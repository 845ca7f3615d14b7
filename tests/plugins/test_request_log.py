"""The request log: one line a request, in the file that the environment names, and never any text."""

from __future__ import annotations

import json
from pathlib import Path

import anycore_request_log
import pytest
from installed import ECHO, REQUEST_LOG, install

from anycore import plugins
from anycore.contract.declare import Task
from anycore.engine.request import RequestRecord


def record(name: str = "r-1") -> RequestRecord:
    return RequestRecord(
        id=name,
        model="m",
        task=Task.GENERATE,
        prompt_tokens=5,
        cached_tokens=2,
        output_tokens=3,
        sequences=1,
        finish="stop",
        queue_seconds=0.25,
        first_token_seconds=None,
        total_seconds=0.5,
    )


def test_each_request_is_one_line_with_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    monkeypatch.setenv("ANYCORE_REQUEST_LOG", str(path))
    for name in ("r-1", "r-2"):
        anycore_request_log.request_finished(record(name))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["r-1", "r-2"]
    assert lines[0].pop("time").endswith("+00:00")
    assert lines[0] == {
        "id": "r-1",
        "model": "m",
        "task": "generate",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "output_tokens": 3,
        "sequences": 1,
        "finish": "stop",
        "queue_seconds": 0.25,
        "first_token_seconds": None,
        "total_seconds": 0.5,
        "preemptions": 0,
        "last_token_seconds": None,
        "longest_output": 0,
    }


def test_the_file_may_be_moved_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "requests.jsonl"
    monkeypatch.setenv("ANYCORE_REQUEST_LOG", str(path))
    anycore_request_log.request_finished(record("r-1"))
    path.rename(tmp_path / "old.jsonl")
    anycore_request_log.request_finished(record("r-2"))
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["r-2"]
    assert path.stat().st_mode & 0o007 == 0


def test_without_the_variable_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYCORE_REQUEST_LOG", raising=False)
    monkeypatch.chdir(tmp_path)
    anycore_request_log.request_finished(record())
    assert list(tmp_path.iterdir()) == []


def test_it_is_found_through_its_entry_point_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "anycore-request-log", "0.1.0", "request-log", "anycore_request_log"))
    path = tmp_path / "requests.jsonl"
    monkeypatch.setenv("ANYCORE_REQUEST_LOG", str(path))
    loaded = plugins.load(environ={})
    assert loaded.failures == ()
    loaded.request_finished(record())
    assert json.loads(path.read_text())["id"] == "r-1"


def test_a_log_that_cannot_be_written_does_not_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(install(tmp_path, "anycore-request-log", "0.1.0", "request-log", "anycore_request_log"))
    monkeypatch.setenv("ANYCORE_REQUEST_LOG", str(tmp_path / "nowhere" / "requests.jsonl"))
    plugins.load(environ={}).request_finished(record())
    assert "request-log (anycore-request-log 0.1.0)" in caplog.text
    assert "No such file or directory" in caplog.text


@pytest.mark.parametrize(
    ("folder", "line"),
    [(ECHO, 'echo = "anycore_echo"'), (REQUEST_LOG, 'request-log = "anycore_request_log"')],
)
def test_the_projects_declare_the_entry_points_that_the_tests_use(folder: Path, line: str) -> None:
    text = (folder / "pyproject.toml").read_text()
    assert f"[project.entry-points.anycore]\n{line}\n" in text
    assert f'name = "{folder.name}"' in text
