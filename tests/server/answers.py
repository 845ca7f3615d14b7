"""Reading what a server answers as strictly as the strictest client would."""

from __future__ import annotations

import json
from typing import Any

import httpx


def strict_json(text: str) -> Any:
    """Parse JSON, refusing NaN and Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refuse)


def ok(response: httpx.Response) -> Any:
    """Return the body of a 200."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/json"
    return strict_json(response.text)


def events_of(response: httpx.Response) -> list[Any]:
    """Read a stream: every event is one `data:` line of UTF-8 JSON, `[DONE]` comes last and once."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.content.decode("utf-8").split("\n\n")
    assert parts.pop() == ""
    assert all(part.startswith("data: ") and "\n" not in part for part in parts)
    data = [part.removeprefix("data: ") for part in parts]
    assert data.count("[DONE]") == 1
    assert data.pop() == "[DONE]"
    return [strict_json(part) for part in data]


def streamed_text(events: list[Any], index: int = 0) -> str:
    """Concatenate what a stream of chat or completion chunks says for one choice."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


def error_of(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> Any:
    """Check that a response is the error envelope, for this field, and says nothing of our insides."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = strict_json(response.text)
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(response.content) < 2000
    assert not [word for word in ("Traceback", "pydantic", "anycore.", "File ") if word in error["message"]]
    if param is not None:
        assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code, error
    return error
