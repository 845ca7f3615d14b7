"""`run_batch`: the whole server without its port. Lines go to the routes as requests do, answers to the file."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from anycore.batch.ledger import Answer, Fault, Ledger, Unwritable, record
from anycore.batch.lines import ENVELOPE, Asked, BadLine, Index, index, name_of, numbered, read
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError
from anycore.server.auth import Guard
from anycore.server.beforehand import check_names
from anycore.server.bridge import EngineClient
from anycore.server.run import private_directory

if TYPE_CHECKING:
    from anycore.server.lifecycle import Server

NOT_NOW = (429, 503)
"""Statuses of a full queue, and of an engine that is being started again: no answers to write down."""

TRIES = 4  # after an engine's end: what ends it every time has its 503 written down
POLL_SECONDS = 0.05
RETRY_SECONDS = 1.0

Progress = Callable[[str, float], None]

log = logging.getLogger(__name__)


@dataclass
class Outcome:
    """What a file holds at the end of a run."""

    total: int  # lines of the input that are not empty
    answered: int = 0
    failed: int = 0  # of the answers: errors
    stopped: str = ""  # why lines are missing
    code: int = 0  # of the process, where it was stopped


def run_batch(
    source: Path,
    target: Path,
    config: ServerConfig,
    models: Sequence[ModelConfig],
    *,
    max_concurrency: int | None = None,
    progress: Progress = lambda phase, fraction: None,
    client: Callable[..., EngineClient] = EngineClient,
) -> Outcome:
    """Answer the lines of `source` that `target` does not answer yet.

    Raises:
        AnycoreError: a file or a model cannot be used; nothing was begun.
    """
    check_names(models)
    if target.exists() and source.exists() and target.samefile(source):
        raise ConfigError(f"{source} cannot be input and output at once", param="output_file")
    longest = config.max_body_size + ENVELOPE
    lines = index(source, longest)
    with Ledger(target) as ledger:
        left = lines.without(ledger.finished)
        outcome = Outcome(lines.total, lines.total - int(left.sum()), ledger.failed)
        ledger.finished = ledger.finished[:0]
        log.info("%s: %d lines, %d of them answered before", source, outcome.total, outcome.answered)
        if left.any():
            batch = Batch(lines, ledger, outcome, progress, longest)
            pending = ((n, text) for n, text in numbered(source, longest) if left[n - 1])
            asyncio.run(batch.serve(config, models, pending, max_concurrency, client))
    return outcome


class Batch:
    """A run: reads lines, asks the server, writes answers. Lives in one event loop."""

    def __init__(self, lines: Index, ledger: Ledger, outcome: Outcome, progress: Progress, longest: int) -> None:
        self._lines = lines
        self._ledger = ledger
        self._outcome = outcome
        self._progress = progress
        self._longest = longest
        self._open = 0  # requests that the server has
        self._signal: asyncio.Future[int]
        self._server: Server

    async def serve(
        self,
        config: ServerConfig,
        models: Sequence[ModelConfig],
        pending: Iterator[tuple[int, bytes]],
        limit: int | None,
        client: Callable[..., EngineClient],
    ) -> None:
        """Bring the engines up, work, and take them down again.

        Raises:
            AnycoreError: a model cannot be served.
        """
        from anycore.server.lifecycle import Server  # heavy imports start here, once the files are ours

        loop = asyncio.get_running_loop()
        self._signal = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            with suppress(RuntimeError, ValueError):  # not the main thread: a test's
                loop.add_signal_handler(number, self._signalled, number)
        directory = private_directory()
        try:
            self._server = Server(config, models, Guard([]), directory, progress=self._progress, client=client)
            with socket.socket(socket.AF_UNIX) as listener:  # for whoever may look in; no request needs it
                listener.bind(str(directory / "front"))
                serving = asyncio.create_task(self._server.run(listener))
                await self._until_stopped(asyncio.create_task(self._work(pending, limit)), serving)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _signalled(self, number: int) -> None:
        if not self._signal.done():
            self._signal.set_result(number)

    async def _until_stopped(self, work: asyncio.Task[None], serving: asyncio.Task[int]) -> None:
        """Let it work until it is done, the disk is full, the server ends or a signal comes."""
        waiting: tuple[asyncio.Future[Any], ...] = (work, serving, self._signal)
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
        try:
            await work
        except asyncio.CancelledError:
            number = self._signal.result() if self._signal.done() else 0
            self._stop(signal.Signals(number).name if number else "the engines ended", 128 + number if number else 1)
        except Unwritable as error:
            self._stop(error.message, error.exit_code)
        finally:
            self._server.signalled(signal.SIGTERM)
            code = await serving  # a model that cannot be served ends it with its reason
        if self._outcome.stopped and code and not self._signal.done():
            self._outcome.code = code

    def _stop(self, why: str, code: int) -> None:
        self._outcome.stopped, self._outcome.code = why, code

    async def _work(self, pending: Iterator[tuple[int, bytes]], limit: int | None) -> None:
        """Answer lines, so many at a time; order is free."""
        await self._ready()
        places = limit or sum(2 * model.window for model in self._server.served)
        answers: asyncio.Queue[bytes] = asyncio.Queue(places)
        writer = asyncio.create_task(self._write(answers))
        asking = asyncio.create_task(self._ask_all(pending, answers, places))
        try:
            await asyncio.wait((writer, asking), return_when=asyncio.FIRST_COMPLETED)
            if writer.done():  # it only ends if it must, and then nobody takes the answers that are left
                writer.result()
            await asking
        finally:
            asking.cancel()
            writer.cancel()
            await asyncio.gather(asking, writer, return_exceptions=True)

    async def _ask_all(self, pending: Iterator[tuple[int, bytes]], answers: asyncio.Queue[bytes], places: int) -> None:
        """Ask for all lines, and wait until what was answered is written."""
        await asyncio.gather(*(self._ask(pending, answers) for _ in range(places)))
        await answers.join()

    async def _ask(self, pending: Iterator[tuple[int, bytes]], answers: asyncio.Queue[bytes]) -> None:
        for number, text in pending:
            await answers.put(await self._answer(number, text))

    async def _write(self, answers: asyncio.Queue[bytes]) -> None:
        """Write what has come together since the last time: one wait for the disk serves many answers."""
        outcome = self._outcome
        while True:
            lines = [await answers.get()]
            while not answers.empty():
                lines.append(answers.get_nowait())
            await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._ledger.append, lines))
            outcome.answered += len(lines)
            self._progress("batch: requests", outcome.answered / outcome.total)
            for _ in lines:
                answers.task_done()

    async def _answer(self, number: int, text: bytes) -> bytes:
        """The line of the output for a line of the input."""
        name = None
        try:
            if len(text) > self._longest:
                raise BadLine(f"it is longer than {self._longest} bytes (--max-body-size)")
            name = name_of(text)
            if self._lines.repeated[number - 1]:
                repeated, name = name, None
                raise BadLine(f"custom_id {repeated!r:.100} stands on an earlier line already")
            return self._record(name, await self._asked(read(text)))
        except BadLine as error:
            self._outcome.failed += 1
            return record(name, error=Fault("invalid_line", f"line {number}: {error}", number))

    def _record(self, name: str | None, reply: Reply) -> bytes:
        if reply.kind != "application/json":
            raise BadLine(f"the answer is {reply.kind or 'empty'}, and a file holds JSON only")
        self._outcome.failed += reply.status != 200
        body = reply.body.replace(b"\n", b" ")  # JSON has line breaks between its parts only
        return record(name, response=Answer(reply.status, reply.request_id, msgspec.Raw(body)))

    async def _asked(self, asked: Asked) -> Reply:
        """Ask until there is an answer. A full queue is waited for, as long as it is others that fill it."""
        lost = 0
        while True:
            self._open += 1
            try:
                reply = await post(self._server.app, asked.url, bytes(asked.body))
            finally:
                self._open -= 1
            lost += reply.status == 503
            if reply.status not in NOT_NOW or lost == TRIES or (reply.status == 429 and not self._open):
                return reply
            await asyncio.sleep(RETRY_SECONDS)
            await self._ready()

    async def _ready(self) -> None:
        while not all(model.ready for model in self._server.served):
            await asyncio.sleep(POLL_SECONDS)


@dataclass
class Reply:
    status: int = 0
    kind: str = ""
    request_id: str = ""
    body: bytes = b""


async def post(app: Any, path: str, body: bytes) -> Reply:
    """Send a request to an ASGI application, as its server would, and take the whole answer."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }
    reply, parts = Reply(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not parts:
            await asyncio.Event().wait()  # this client never leaves
        return parts.pop()

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            reply.status = message["status"]
            reply.kind = headers.get(b"content-type", b"").decode()
            reply.request_id = headers.get(b"x-request-id", b"").decode()
        else:
            reply.body += message.get("body", b"")

    await app(scope, receive, send)
    return reply
