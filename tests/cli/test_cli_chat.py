"""The terminal chat: history, commands, Ctrl-C, and a running server on the other side."""

from __future__ import annotations

import io
import json
import os
import signal
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from anycore.cli.chat import answer, converse, stoppable
from anycore.cli.main import main
from anycore.errors import AnycoreError, BadRequest

Message = dict[str, Any]


def talk(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_the_conversation_is_remembered_until_cleared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard: list[list[Message]] = []

    def reply(messages: list[Message]) -> Iterator[str]:
        heard.append([dict(message) for message in messages])
        yield "answer "
        yield str(len(heard))

    talk(monkeypatch, "one\n\ntwo\n/clear\nthree\n/exit\nfour\n")
    converse(reply, [{"role": "system", "content": "be brief"}])
    assert [[message["content"] for message in messages] for messages in heard] == [
        ["be brief", "one"],
        ["be brief", "one", "answer 1", "two"],
        ["be brief", "three"],
    ]
    assert capsys.readouterr().out == "answer 1\nanswer 2\nanswer 3\n"


def test_an_error_ends_the_answer_and_not_the_conversation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = []

    def reply(messages: list[Message]) -> Iterator[str]:
        heard.append(len(messages))
        if len(heard) == 1:
            raise BadRequest("too long")
        yield "fine"

    talk(monkeypatch, "one\ntwo\n")
    converse(reply, [])
    assert heard == [1, 1]
    output = capsys.readouterr()
    assert "error: too long" in output.err
    assert "fine" in output.out


def test_ctrl_c_stops_the_answer_and_closes_the_stream(capsys: pytest.CaptureFixture[str]) -> None:
    closed = []

    def reply(messages: list[Message]) -> Iterator[str]:
        try:
            yield "first"
            os.kill(os.getpid(), signal.SIGINT)
            yield "second"
            yield "third"
        finally:
            closed.append(True)

    before = signal.getsignal(signal.SIGINT)
    assert answer(reply, []) == "firstsecond"
    assert closed == [True]
    assert signal.getsignal(signal.SIGINT) is before
    assert capsys.readouterr().out == "firstsecond\n"


def test_a_second_ctrl_c_is_not_held_back() -> None:
    with stoppable() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_chat_needs_a_model_or_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat"]) == 2
    assert "name a MODEL, such as demo, or a server with --url" in capsys.readouterr().err


class Stub(BaseHTTPRequestHandler):
    """Two models and a stream; one path refuses, one breaks off with an error event, one without a word."""

    seen: list[tuple[str, str | None, Any]]

    def do_GET(self) -> None:
        self.note(None)
        models = [{"id": "embedder", "tasks": ["embed"]}, {"id": "talker", "tasks": ["generate"]}]
        self.send(200, json.dumps({"data": models}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.note(body)
        if body["model"] == "missing":
            self.send(404, json.dumps({"error": {"message": "there is no model 'missing' here"}}).encode())
            return
        events: list[Any] = [{"choices": [{"delta": {"content": word}}]} for word in ("bo", "njour ", "é")]
        if body["model"] == "breaks":
            events.append({"error": {"message": "the engine ended"}})
        events.append({"choices": [], "usage": {}})
        if body["model"] == "cut":
            self.send(200, f"data: {json.dumps(events[0])}\n\n".encode())
            return
        lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
        self.send(200, "".join([*lines, ": a comment\n\n", "data: [DONE]\n\n"]).encode())

    def note(self, body: Any) -> None:
        self.seen.append((self.path, self.headers["Authorization"], body))

    def send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    Stub.seen = []
    with HTTPServer(("127.0.0.1", 0), Stub) as http:
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_running_server_answers(
    server: str, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYCORE_API_KEY", "sk-one,sk-two")
    talk(monkeypatch, "salut\n")
    assert main(["chat", "--url", server + suffix, "--temperature", "0.5", "--max-tokens", "9"]) == 0
    assert capsys.readouterr().out == "bonjour é\n\n"
    (first, second) = Stub.seen
    assert first == ("/v1/models", "Bearer sk-one", None)
    assert second[0] == "/v1/chat/completions"
    assert second[2] == {
        "model": "talker",
        "messages": [{"role": "user", "content": "salut"}],
        "stream": True,
        "temperature": 0.5,
        "max_tokens": 9,
    }


@pytest.mark.parametrize(
    ("model", "words"), [("missing", "there is no model"), ("breaks", "the engine ended"), ("cut", "broke off")]
)
def test_what_the_server_refuses_is_told_in_its_words(
    server: str, model: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, "salut\n")
    assert main(["chat", model, "--url", server, "--api-key", "sk-one"]) == 0
    assert words in capsys.readouterr().err
    assert Stub.seen[0][1] == "Bearer sk-one"


@pytest.mark.parametrize(
    "url", ["localhost", "localhost:9", "ftp://here", "http://", "http://x y", "http://[::1", "file:///etc"]
)
def test_what_is_no_address_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url]) == 2
    assert f"--url must be an address such as http://127.0.0.1:8000/v1, with http:// or https://, not {url!r}" in (
        capsys.readouterr().err
    )


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1"]) == AnycoreError.exit_code
    assert "cannot reach http://127.0.0.1:1/v1/models" in capsys.readouterr().err
