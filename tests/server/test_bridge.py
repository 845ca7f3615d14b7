"""The bridge with a scripted engine in a real process: streams, refusals, aborts, deaths."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from server.harness import patience

from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.request import NewRequest, RequestRecord, SamplingParams
from anycore.errors import AnycoreError, BadRequest, NonFiniteOutput, Overloaded, Unavailable
from anycore.server import wire
from anycore.server.bridge import EngineClient
from anycore.server.phases import Phase

FAKE = str(Path(__file__).parent / "fake_child.py")


class Recorder:
    """Keeps what the client tells its observer."""

    def __init__(self) -> None:
        self.records: list[RequestRecord] = []
        self.refusals: list[str | None] = []

    def begin(self, card: dict[str, Any], stats: Callable[[], Any]) -> None:
        assert card["backend"] == "scripted"

    def token_after(self, seconds: float) -> None:
        assert seconds >= 0

    def refused(self, code: str | None) -> None:
        self.refusals.append(code)

    def finished(self, record: RequestRecord, request: NewRequest) -> None:
        self.records.append(record)


@asynccontextmanager
async def engine(folder: Path, *script: str, **settings: Any) -> AsyncIterator[EngineClient]:
    """Start a scripted engine and wait until it is ready; `settings` are the model's."""
    config = ModelConfig(model="m", **settings)
    client = EngineClient(config, folder, Recorder(), command=(sys.executable, FAKE, "x", *script))
    await client.start()
    try:
        await client.planned
        client.load()
        await client.ready
        yield client
    finally:
        await client.stop()


def request(name: str, tokens: int = 5, n: int = 1, prompt: list[int] | None = None) -> NewRequest:
    sampling = SamplingParams(max_tokens=tokens, n=n)
    return NewRequest(id=name, task=Task.GENERATE, token_ids=prompt or [1, 2], sampling=sampling)


async def collect(client: EngineClient, new: NewRequest) -> list[int]:
    async with client.submit(new) as stream:
        return [i async for delta in stream for i in delta.token_ids]


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20 * patience()))


async def idle(client: EngineClient) -> None:
    """Wait until the engine holds nothing."""
    while client.stats.running or client.stats.waiting or client.live:
        await asyncio.sleep(0.01)


def test_streams_run_together_and_are_recorded(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path) as client:
            answers = await asyncio.gather(*(collect(client, request(f"r{i}")) for i in range(4)))
            assert answers == [[100, 101, 102, 103, 104]] * 4
            assert client.phase is Phase.READY
            assert client.live == 0
            records = client.observer.records  # type: ignore[attr-defined]
            assert sorted(r.id for r in records) == ["r0", "r1", "r2", "r3"]
            assert {(r.output_tokens, r.prompt_tokens, r.finish) for r in records} == {(5, 2, "length")}
            assert all(0 < r.first_token_seconds <= r.total_seconds for r in records)

    run(test())


def test_m09_full_queue_refuses_and_recovers(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path, "max_num_seqs=1", "max_queued=4") as client:
            answers = await asyncio.gather(
                *(collect(client, request(f"r{i}")) for i in range(10)), return_exceptions=True
            )
            assert sum(isinstance(a, list) for a in answers) == 5
            assert [type(a) for a in answers if not isinstance(a, list)] == [Overloaded] * 5
            assert client.observer.refusals == ["queue_full"] * 5  # type: ignore[attr-defined]
            assert len(await collect(client, request("later"))) == 5

    run(test())


def test_m09_a_queue_known_to_be_full_refuses_without_asking_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path, "max_num_seqs=1", "max_queued=100", max_queued=1) as client:
            async with client.submit(request("runs", 10_000)) as running:
                await anext(running)
                async with client.submit(request("waits", 10_000)):
                    with pytest.raises(Overloaded, match="1 sequences wait and 1 may") as caught:
                        client.submit(request("refused"))
                    assert caught.value.retry_after >= 1
                    assert client.observer.refusals == ["queue_full"]  # type: ignore[attr-defined]
                assert client.live == 1
            assert len(await collect(client, request("later"))) == 5

    run(test())


def test_refusals_keep_their_field(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path) as client:
            with pytest.raises(BadRequest) as caught:
                await collect(client, request("bad", prompt=[0]))
            assert caught.value.param == "prompt"
            assert client.live == 0

    run(test())


def test_m10_leaving_early_frees_the_engine(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path) as client:
            for n in (1, 4):
                async with client.submit(request(f"left {n}", 10_000, n)) as stream:
                    await anext(stream)
                await asyncio.wait_for(idle(client), 1 * patience())
            task = asyncio.create_task(collect(client, request("cancelled", 10_000)))
            await asyncio.sleep(0.05)
            task.cancel()
            await asyncio.wait_for(idle(client), 1 * patience())
            assert [r.finish for r in client.observer.records] == ["abort"] * 3  # type: ignore[attr-defined]
            assert client.stats.aborted == 6

    run(test())


def test_a_stopped_sequence_leaves_the_others_running(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path) as client:
            seen: dict[int, int] = {0: 0, 1: 0}
            async with client.submit(request("two", 6, n=2)) as stream:
                async for delta in stream:
                    seen[delta.index] += len(delta.token_ids)
                    if delta.index == 0 and seen[0] == 2:
                        stream.stop(0)
            assert seen == {0: 2, 1: 6}
            async with client.submit(request("both", 10_000, n=2)) as stream:
                async for delta in stream:
                    stream.stop(delta.index)
            await asyncio.wait_for(idle(client), 1 * patience())
            assert [r.finish for r in client.observer.records] == ["length", "stop"]  # type: ignore[attr-defined]

    run(test())


def test_an_error_ends_one_request_only(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path, "fail_id=bad") as client:
            bad, good = await asyncio.gather(
                collect(client, request("bad", n=2)), collect(client, request("good")), return_exceptions=True
            )
            assert isinstance(bad, NonFiniteOutput)
            assert good == [100, 101, 102, 103, 104]
            await asyncio.wait_for(idle(client), 1 * patience())

    run(test())


@pytest.mark.parametrize("script", ["fail_step=3", "die_step=3"])
def test_o01_death_ends_requests_with_an_error(tmp_path: Path, script: str) -> None:
    async def test() -> None:
        async with engine(tmp_path, script) as client:
            started = time.monotonic()
            answers = await asyncio.gather(
                *(collect(client, request(f"r{i}")) for i in range(3)), return_exceptions=True
            )
            assert [type(a) for a in answers] == [Unavailable] * 3
            assert time.monotonic() - started < 2 * patience()
            await asyncio.wait_for(client.dead.wait(), 2 * patience())
            assert client.phase is Phase.DEAD
            assert client.failure is not None
            assert client.failure.exit_code == 1
            with pytest.raises(Unavailable):
                client.submit(request("late"))

    run(test())


def test_reports_that_cannot_be_read_are_a_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(data: bytes) -> None:
        raise ValueError("not a report")

    async def test() -> None:
        async with engine(tmp_path) as client:
            monkeypatch.setattr(wire, "decode_report", unreadable)
            with pytest.raises(Unavailable):
                await collect(client, request("lost"))
            assert client.phase is Phase.DEAD
            assert client.failure is not None

    run(test())


def test_the_reason_of_a_refused_start_arrives(tmp_path: Path) -> None:
    async def test() -> None:
        for script, where in (("refuse=no such model", "planned"), ("fail_load=secret prompt", "ready")):
            client = EngineClient(
                ModelConfig(model="m"), tmp_path, Recorder(), command=(sys.executable, FAKE, "x", script)
            )
            await client.start()
            if where == "ready":
                await client.planned
                client.load()
            with pytest.raises(AnycoreError) as caught:
                await getattr(client, where)
            expected = ("no such model", 2) if where == "planned" else ("the engine failed (RuntimeError)", 1)
            assert caught.value.message.startswith(expected[0])
            assert caught.value.exit_code == expected[1]
            await client.stop()

    run(test())


def test_an_idle_engine_is_not_stalled_however_long_it_was_silent(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path, "hang_step=3") as client:
            client._step_timeout = 100
            client.heard -= 1000
            assert not client._stalled()
            hung = asyncio.create_task(collect(client, request("hung")))
            while client.stats.steps < 2:
                await asyncio.sleep(0.01)
            assert not client._stalled()
            client.heard -= 1000
            assert client._stalled()
            client.kill()
            with pytest.raises(Unavailable):
                await hung

    run(test())


def test_o07_a_drain_refuses_what_has_not_started(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path, "max_num_seqs=2", "step=0.02") as client:
            running = [asyncio.create_task(collect(client, request(f"run{i}", 20))) for i in range(2)]
            await asyncio.sleep(0.1)
            queued = [asyncio.create_task(collect(client, request(f"wait{i}"))) for i in range(3)]
            await asyncio.sleep(0.1)
            client.drain()
            refused = await asyncio.gather(*queued, return_exceptions=True)
            assert [(type(e), e.code) for e in refused] == [(Unavailable, "shutting_down")] * 3  # type: ignore[union-attr]
            with pytest.raises(Unavailable):
                client.submit(request("late"))
            assert [len(ids) for ids in await asyncio.gather(*running)] == [20, 20]

    run(test())


def test_the_engine_outlives_signals_meant_for_the_front(tmp_path: Path) -> None:
    async def test() -> None:
        async with engine(tmp_path) as client:
            pid = client._child.pid  # type: ignore[union-attr]
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            assert os.getpgid(pid) != os.getpgid(0)
            assert len(await collect(client, request("after"))) == 5

    run(test())
