"""Sends requests at their times and notes when what comes back: one process's share of a load.

aiohttp, because its HTTP parser is C: a Python one is busy with a few thousand streamed tokens a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Iterator
from typing import Any

import aiohttp
import msgspec

from anycore.bench.load import Body, Load

READ_BYTES = 2**18
SLACK_SECONDS = 0.01  # the last arrival of a rate falls on the end of the duration


class Outcome(msgspec.Struct):
    """What became of one request. Times are seconds; `sent` is of the clock that all processes of a machine share."""

    sent: float
    first: float = 0.0  # from sending to the first token
    total: float = 0.0  # from sending to the end
    gaps: list[float] = []  # between events that carry tokens
    input_tokens: int = 0
    output_tokens: int = 0
    status: int = 0  # of HTTP; 0: none came
    error: str = ""


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    total_tokens: int = 0


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None


class Reply(msgspec.Struct):
    """The fields of an answer, or of one event of a stream, that are measured."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Reply).decode


class Failure(Exception):
    """The server answered, but not with what was asked for."""


class Client:
    """A session with the server."""

    def __init__(self, load: Load) -> None:
        self.load = load
        headers = {"Content-Type": "application/json"}
        if load.api_key:
            headers["Authorization"] = f"Bearer {load.api_key}"
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=load.timeout, sock_read=load.timeout),
            headers=headers,
            read_bufsize=READ_BYTES,
        )

    async def converse(self, turns: list[Body]) -> list[Outcome]:
        """Send the turns of a conversation, each with all that was said before; a failure ends it."""
        outcomes: list[Outcome] = []
        said: list[Any] = []
        for body in turns:
            if len(turns) > 1:
                said += body["messages"]
                body = body | {"messages": said}
            answer: list[str] = []
            outcomes.append(await self.send(msgspec.json.encode(body), answer))
            if outcomes[-1].error:
                break
            said.append({"role": "assistant", "content": "".join(answer)})
        return outcomes

    async def send(self, body: bytes, answer: list[str] | None = None) -> Outcome:
        """Send one request and read its answer to the end; what goes wrong is part of the outcome.

        Of a chat's answer the pieces of text are added to `answer`.
        """
        outcome = Outcome(time.monotonic())
        try:
            async with self.session.post(self.load.target, data=body) as response:
                outcome.status = response.status
                if response.status != 200:
                    raise Failure((await response.text())[:500])
                if self.load.streamed:
                    usage = await self._stream(response, outcome, [] if answer is None else answer)
                else:
                    usage = await self._whole(response)
            outcome.input_tokens = usage.prompt_tokens or usage.total_tokens
            outcome.output_tokens = usage.completion_tokens or 0
        except (Failure, aiohttp.ClientError, asyncio.TimeoutError, msgspec.DecodeError) as error:
            outcome.error = f"{type(error).__name__}: {error}" if not isinstance(error, Failure) else str(error)
        outcome.total = time.monotonic() - outcome.sent
        return outcome

    async def _whole(self, response: aiohttp.ClientResponse) -> Usage:
        reply = _decode(await response.read())
        if reply.usage is None:
            raise Failure("the answer has no usage, so its tokens cannot be counted")
        return reply.usage

    async def _stream(self, response: aiohttp.ClientResponse, outcome: Outcome, answer: list[str]) -> Usage:
        usage, last, rest, done = None, 0.0, b"", False
        outcome.gaps = []
        async for data in response.content.iter_any():
            now = time.monotonic()
            lines = (rest + data).split(b"\n")
            rest = lines.pop()
            for line in lines:
                if not line.startswith(b"data:"):
                    continue
                payload = line[5:].strip()
                if payload == b"[DONE]":
                    done = True
                    continue
                reply = _decode(payload)
                if reply.error is not None:
                    raise Failure(str(reply.error)[:500])
                usage = reply.usage or usage
                answer += [c.delta.content for c in reply.choices if c.delta is not None and c.delta.content]
                if not has_token(reply.choices, last > 0):
                    continue
                if last:
                    outcome.gaps.append(now - last)
                else:
                    outcome.first = now - outcome.sent
                last = now
        if not done:
            raise Failure("the stream ended before [DONE]")
        if usage is None:
            raise Failure("the stream has no usage (stream_options.include_usage), so its tokens cannot be counted")
        return usage


def has_token(choices: list[Choice], begun: bool) -> bool:
    """Whether an event carries a token. A token may show no text; an end alone, or a chat's role alone, is none."""
    for choice in choices:
        if choice.delta is not None:
            if choice.delta.content or choice.delta.reasoning_content or (choice.finish_reason and not begun):
                return True
        elif choice.text or choice.finish_reason is None or not begun:
            return True
    return False


def share(load: Load, index: int, processes: int) -> Iterable[tuple[float, list[Body]]]:
    """Arrival times and turns of every n-th conversation; made beforehand where their number is known."""
    own: Iterator[tuple[float, list[Body]]] = load.conversations(index, processes)
    return own if load.number is None else list(own)


def places(load: Load, index: int, processes: int) -> int | None:
    """How many of the conversations that may be open at once are this process's."""
    limit = load.max_concurrency
    return None if limit is None else len(range(index, limit, processes))


async def run_share(
    load: Load, requests: Iterable[tuple[float, list[Body]]], limit: int | None, start: float
) -> list[Outcome]:
    """Begin conversations from the moment `start` on, at most `limit` of them open at a time."""
    client = Client(load)
    gate = asyncio.Semaphore(limit) if limit is not None else None
    end = None if load.duration is None else start + load.duration
    running: list[asyncio.Task[list[Outcome]]] = []

    async def one(turns: list[Body]) -> list[Outcome]:
        try:
            return await client.converse(turns)
        finally:
            if gate is not None:
                gate.release()

    async with client.session:
        for at, turns in requests:
            await asyncio.sleep(max(0.0, start + at - time.monotonic()))
            if gate is not None:
                await gate.acquire()
            if end is not None and running and time.monotonic() > end + SLACK_SECONDS:
                break
            running.append(asyncio.create_task(one(turns)))
        return [outcome for outcomes in await asyncio.gather(*running) for outcome in outcomes]


async def try_out(load: Load, times: int) -> Outcome | None:
    """Send a request that the load does not hold a few times, unmeasured; return the first that failed."""
    client = Client(load)
    body = msgspec.json.encode(load.conversation(-1)[0])
    async with client.session:
        for _ in range(times):
            outcome = await client.send(body)
            if outcome.error:
                return outcome
    return None


async def about(load: Load) -> Any:
    """What the server says about its models, for the record; a sentence where it says nothing."""
    client = Client(load)
    async with client.session:
        try:
            async with client.session.get(f"{load.url}/models") as response:
                return await response.json(content_type=None)
        except (aiohttp.ClientError, asyncio.TimeoutError, ValueError) as error:
            return f"{type(error).__name__}: {error}"
