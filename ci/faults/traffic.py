"""Clients that ask a server all the time, and how each of their requests ended."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
from server.harness import Live

CLIENTS = 4
SECONDS = 120.0  # without a byte, after which a request counts as hung
NOT_TAKEN = {"model_restarting", "model_loading", "queue_full"}
"""Errors that refuse a request before it is admitted; so does `shutting_down` where it says one of NOT_BEGUN."""

NOT_BEGUN = "takes no new requests", "this request had not started"


@dataclass
class Ends:
    """How requests ended. `sent` is the sum of all others."""

    sent: int = 0
    refused: int = 0  # never admitted: an error at once, or no connection
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)  # admitted, then ended with an error that says why, by code
    broken: int = 0  # the connection broke, which the client notices
    lost: Counter[str] = field(default_factory=Counter)  # none of these: cut off as if whole, hung, or a wrong answer

    def add(self, other: Ends) -> None:
        for name in ("sent", "refused", "answered", "errors", "broken", "lost"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def admitted(self) -> int:
        return self.sent - self.refused

    def note(self, kind: str, detail: str = "") -> None:
        self.sent += 1
        if detail:
            getattr(self, kind)[detail] += 1
        else:
            setattr(self, kind, getattr(self, kind) + 1)


class Traffic:
    """Clients that ask until told to stop, half of them for streams. Every request asks the same, greedily."""

    def __init__(self, live: Live, tokens: int = 48) -> None:
        self.ends = Ends()
        self._url = live.url
        self._body: dict[str, Any] = {"model": "lm", "prompt": "the river", "max_tokens": tokens}
        self._body |= {"ignore_eos": True, "temperature": 0}
        self._expected = live.post("/v1/completions", self._body).json()["choices"][0]["text"]
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number % 2 == 0,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Ends:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * SECONDS)
            self.ends.lost["hung"] += thread.is_alive()
        self.ends.lost += Counter()  # drops what is 0
        return self.ends

    def _ask(self, stream: bool) -> None:
        # A connection for each request: where several fronts share the port, each gets some.
        limits = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=self._url, timeout=SECONDS, limits=limits, verify=False) as client:
            while not self._stop.is_set():
                kind, detail = self._one(client, stream)
                with self._lock:
                    self.ends.note(kind, detail)
                if kind != "answered":
                    time.sleep(0.05)

    def _one(self, client: httpx.Client, stream: bool) -> tuple[str, str]:
        try:
            answer = client.post("/v1/completions", json=self._body | {"stream": stream})
        except (httpx.ConnectError, httpx.ConnectTimeout):
            return "refused", ""
        except httpx.TimeoutException:
            return "lost", "hung"
        except httpx.TransportError:
            return "broken", ""
        return ending(answer, self._expected)


def ending(answer: httpx.Response, expected: str) -> tuple[str, str]:
    """How an answered request ended: a field of `Ends`, and what is counted there by name."""
    if answer.status_code != 200:
        return of_error(answer.json()["error"])
    if "text/event-stream" not in answer.headers["content-type"]:
        said = answer.json()["choices"][0]["text"]
    else:
        events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        if not events or events[-1] != "[DONE]":
            last = json.loads(events[-1]) if events else {}
            return of_error(last["error"]) if "error" in last else ("lost", "cut off")
        said = "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])
    return ("answered", "") if said == expected else ("lost", "a wrong answer")


def of_error(error: dict[str, Any]) -> tuple[str, str]:
    code = str(error["code"])
    if code in NOT_TAKEN or any(said in error["message"] for said in NOT_BEGUN):
        return "refused", ""
    return "errors", code
