"""Wrong requests for a long time: `ci/fuzz.py [--seconds 1800] [--seed 1]` prints a table in Markdown.

A server of three tiny random models gets requests that schemathesis makes of its OpenAPI document, and valid bodies
that were spoilt (`fuzz_bodies.py`), in turn. After each round what is right must be answered as before. It must give
no 5xx, its engines must be the same processes at the end, their memory must not grow, and no block may stay in use.
`--shot N` sends one request again and shows the answer.
"""

from __future__ import annotations

import argparse
import collections
import json
import socket
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import hypothesis
import psutil
import schemathesis

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import tiny
from fuzz_bodies import VALID, Shot, shot_of
from server.harness import Live, serve_process

ROUND = 400  # spoilt bodies between two looks at the server
EXAMPLES = 12  # of schemathesis for each operation in a round
CLIENTS = 3
WARM_UP = 0.2  # of the time, after which memory must not grow
GROWTH = 16 * 2**20  # bytes that a process may grow by nevertheless
SECONDS = 60.0  # that an answer may take
ENDS = (
    *(b"data: [DONE]\n\n", b'data: {"error":', b"event: error\n", b"event: message_stop\n"),
    *(b"event: response.completed\n", b"event: response.incomplete\n", b"event: response.failed\n"),
)
"""What streams end with."""
KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "lm", "prompt": "the river", "max_tokens": 8, "temperature": 0, "ignore_eos": True}),
    ("/v1/embeddings", {"model": "embed", "input": "the river"}),
    ("/v1/rerank", {"model": "rerank", "query": "a river", "documents": ["the bank", "a fox"]}),
]
"""What is right, and answered as ever."""


@dataclass
class Report:
    """What was sent and what came back."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def note(self, status: int | None, problem: str | None, what: str) -> None:
        self.statuses["hung up" if status is None else str(status)] += 1
        if problem is not None:
            self.wrong.append(f"{problem}: {what}")

    @property
    def requests(self) -> int:
        return sum(self.statuses.values())


def send(url: str, shot: Shot) -> bytes:
    """Send a request over a connection of its own; return all that comes back."""
    host, port = urlsplit(url).netloc.split(":")
    received = b""
    with socket.create_connection((host, int(port)), SECONDS) as connection:
        try:
            connection.sendall(shot.wire)
            if shot.is_torn:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(2**16):
                received += part
        except (ConnectionResetError, BrokenPipeError):
            pass
    return received


def judged(answer: bytes, is_torn: bool) -> tuple[int | None, str | None]:
    """The status of an answer, and what is wrong with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    if not head:
        return None, None if is_torn else "no answer"
    status = int(head.split(b" ")[1])
    return status, problem_of(status, head.decode("latin-1").lower(), body)


def problem_of(status: int, head: str, body: bytes) -> str | None:
    """What is wrong with an answer, whatever was asked."""
    if status >= 500:
        return f"status {status}"
    if "text/event-stream" in head:
        return None if any(end in body for end in ENDS) else "a stream without an end"
    try:
        found = json.loads(body)
    except ValueError:
        return "an answer that is not JSON"
    if status >= 400 and not (isinstance(found, dict) and found.get("error", {}).get("message")):
        return "an error without the envelope"
    return None


def spoilt(url: str, seeds: range, fields: list[str], report: Report) -> None:
    """Send the requests of some numbers, a few at a time."""

    def one(seed: int) -> None:
        shot = shot_of(seed, fields)
        try:
            status, problem = judged(send(url, shot), shot.is_torn)
        except OSError as error:
            status, problem = None, f"{type(error).__name__}"
        report.note(status, problem, f"--shot {seed}: {shot.path} {shot.headers} {shot.body[:300]!r}")

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(one, seeds))


def described(schema: Any, seed: int, examples: int, report: Report) -> None:
    """Send what schemathesis makes of every operation of the document, but for those that load and unload models."""
    for result in schema.get_all_operations():
        operation = result.ok()
        if "administration" not in (operation.tags or ()):
            by_schema(operation, seed, examples, report)


def by_schema(operation: Any, seed: int, examples: int, report: Report) -> None:
    models = [body["model"] for body in VALID.get(operation.path, [])]

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.given(case=operation.as_strategy())
    def run(case: Any) -> None:
        if models and isinstance(case.body, dict) and isinstance(case.body.get("model"), (str, type(None))):
            case.body["model"] = models[0]  # what lies behind an unknown model is seen by nobody
        answer = case.call(timeout=SECONDS)
        kind = str(answer.headers.get("content-type", [""])[0])
        # Metrics are text, and of a stream schemathesis reads so many events and no more.
        is_other = answer.status_code == 200 and kind.startswith(("text/plain", "text/event-stream"))
        problem = None if is_other else problem_of(answer.status_code, f"content-type: {kind}", answer.content)
        what = f"seed {seed}: {case.method} {case.formatted_path} {str(case.body)[:600]} -> {answer.content[-300:]!r}"
        report.note(answer.status_code, problem, what)

    run()


def known(url: str) -> list[Any]:
    """The answers to what is right, without what differs from one to the next."""
    answers = []
    for path, body in KNOWN:
        answer = httpx.post(url + path, json=body, timeout=SECONDS)
        found = {key: value for key, value in answer.json().items() if key not in ("id", "created", "usage")}
        answers.append((answer.status_code, found))
    return answers


def field_names(url: str) -> list[str]:
    """Names of all fields that some route reads."""
    schemas = httpx.get(f"{url}/openapi.json", timeout=SECONDS).json()["components"]["schemas"]
    return sorted({name for schema in schemas.values() for name in schema.get("properties", {})})


def memory(live: Live, engines: list[int]) -> dict[str, int]:
    """Bytes of each process. Helpers are those that come and go, such as the one that renders templates."""
    assert live.process is not None
    sizes = {"server": rss(live.process.pid), **{f"engine {i}": rss(pid) for i, pid in enumerate(engines)}}
    return {**sizes, "helpers": sum(rss(pid) for pid in live.engines() if pid not in engines)}


def rss(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.NoSuchProcess:
        return 0


def in_use(live: Live) -> float:
    """Share of blocks in use, and requests that run or wait."""
    wanted = ("anycore:kv_cache_usage_perc{", "anycore:num_requests_running{", "anycore:num_requests_waiting{")
    lines = live.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(wanted))


def served(folder: Path) -> list[str]:
    """Make the models; return what `anycore serve` is told."""
    makers = {"lm": tiny.tiny_lm, "embed": tiny.tiny_bert, "rerank": tiny.tiny_cross_encoder}
    lines = ["backend: cpu", "dtype: float32", "kv-cache-memory: 8MiB", "threads: 1", "log-level: warning", "models:"]
    for name, make in makers.items():
        (folder / name).mkdir()
        lines += [f"  - model: {make(folder / name)}", f"    served-model-name: {name}"]
        lines += ["    max-model-len: 128"] if name == "lm" else []
    (folder / "serve.yaml").write_text("\n".join(lines))
    return ["--config", str(folder / "serve.yaml")]


def fuzz(live: Live, seconds: float, seed: int) -> Report:
    """Send for so long; return what came back, and what was found wrong."""
    report, fields, first, engines = Report(), field_names(live.url), known(live.url), live.engines()
    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    began, rounds = time.monotonic(), 0
    cold, warm = memory(live, engines), {}
    while (passed := time.monotonic() - began) < seconds:
        if not warm and passed > seconds * WARM_UP:
            warm = memory(live, engines)
        spoilt(live.url, range(seed * 10**6 + rounds * ROUND, seed * 10**6 + (rounds + 1) * ROUND), fields, report)
        described(schema, seed + rounds, EXAMPLES, report)
        rounds += 1
        if known(live.url) != first:
            report.wrong.append(f"round {rounds}: what is right is answered otherwise than at first")
        now = " ".join(f"{name} {size >> 20}" for name, size in memory(live, engines).items())
        print(f"{passed:5.0f} s, {report.requests} requests, {len(report.wrong)} wrong, MiB: {now}", file=sys.stderr)
    live.wait(lambda: in_use(live) == 0, 10)
    hot = memory(live, engines)
    for name in hot:
        print(f"| {name} | {cold[name] >> 20} | {(warm or hot)[name] >> 20} | {hot[name] >> 20} |")
        if warm and hot[name] - warm[name] > GROWTH:
            report.wrong.append(f"{name} grew by {(hot[name] - warm[name]) >> 20} MiB after it was warm")
    if not set(engines) <= set(live.engines()):
        report.wrong.append(f"engines were {engines} and are {live.engines()}")
    if "Traceback" in "".join(live.output):
        report.wrong.append("a traceback in the log")
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shot", type=int, help="number of one request to send again")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve_process(*served(Path(folder))) as live:
        if options.shot is not None:
            shot = shot_of(options.shot, field_names(live.url))
            print(shot.wire.decode("latin-1"), send(live.url, shot).decode("latin-1"), *live.output, sep="\n")
            return 0
        print("| process | MiB at first | when warm | at the end |\n|---|---|---|---|")
        report = fuzz(live, options.seconds, options.seed)
        log = "".join(live.output)
    print(f"\n{report.requests} requests in {options.seconds:g} s, seed {options.seed}:")
    print(", ".join(f"{status}: {count}" for status, count in sorted(report.statuses.items())))
    for wrong in report.wrong:
        print(f"WRONG {wrong}")
    if report.wrong:
        print(log[-20_000:], file=sys.stderr)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
