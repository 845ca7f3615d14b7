"""Talks to a running server's chat route, with the standard library alone."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from typing import Any

from anycore.cli.addresses import address
from anycore.errors import AnycoreError

SECONDS = 600


def remote_reply(url: str, model: str | None, api_key: str | None, sampling: dict[str, Any]) -> Any:
    """Return a function from messages to the pieces of the answer of a server's model (default: its only one)."""
    base = address(url, "url").removesuffix("/v1")
    key = api_key or os.environ.get("ANYCORE_API_KEY", "").split(",")[0]
    name = model or _chat_model(base, key)

    def reply(messages: list[dict[str, Any]]) -> Iterator[str]:
        body = {"model": name, "messages": messages, "stream": True, **sampling}
        finished = False
        with _open(f"{base}/v1/chat/completions", key, body) as response:
            try:
                for line in response:
                    data = line.decode("utf-8").strip().removeprefix("data: ")
                    if data == "[DONE]":
                        return
                    if data.startswith("{"):
                        event = json.loads(data)
                        yield _text(event)
                        finished |= any(choice.get("finish_reason") for choice in event["choices"])
            except (OSError, HTTPException) as error:
                raise AnycoreError(f"{base} broke off the answer: {error}") from error
        if not finished:
            raise AnycoreError(f"{base} broke off the answer: it has no end")

    return reply


def _text(event: dict[str, Any]) -> str:
    if "error" in event:
        raise AnycoreError(event["error"]["message"])
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


def _chat_model(base: str, key: str) -> str:
    """Return the first model that generates."""
    with _open(f"{base}/v1/models", key, None) as response:
        models = json.load(response)["data"]
    for model in models:
        if "generate" in model.get("tasks", ["generate"]):
            return str(model["id"])
    raise AnycoreError(f"{base} serves no model that generates: {', '.join(model['id'] for model in models)}")


def _open(url: str, key: str, body: dict[str, Any] | None) -> Any:
    """Send a request; a refusal becomes an AnycoreError in the server's words."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=SECONDS)
    except urllib.error.HTTPError as error:
        text = error.read().decode("utf-8", "replace")
        try:
            text = json.loads(text)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = text[:500]
        raise AnycoreError(f"{url} answered {error.code}: {text}") from error
    except (OSError, ValueError, HTTPException) as error:
        raise AnycoreError(f"cannot reach {url}: {getattr(error, 'reason', error)}") from error
