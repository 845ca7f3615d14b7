"""A Ray cluster of several nodes on this machine: requests, a node that is lost under load, scaling, ranks.

Ray is not among the packages of the tests: `ci/ray` installs it and runs these.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server.harness import patience

pytest.importorskip("ray", reason="no ray: ci/ray installs it and runs these tests")

import httpx
import openai
import psutil
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MEMORY = 80 << 20  # of a node's object store
SECONDS = 60.0  # for whatever has to happen; times `patience`
PATIENT = {  # a busy machine starts actors slowly, and Ray would start others in their place
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "OMP_NUM_THREADS": "1",
}
ENGINE = ("--backend", "cpu", "--dtype", "float32", "--kv-cache-memory", "8MiB", "--threads", "1")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head that holds no engine, and two nodes with room for one each."""
    before = {name: os.environ.get(name) for name in PATIENT}
    os.environ.update(PATIENT)
    found = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False},
    )
    try:
        for _ in range(2):
            found.add_node(num_cpus=1, object_store_memory=MEMORY)
        yield found
    finally:
        children = psutil.Process().children(recursive=True)
        found.shutdown()
        for child in children:
            if child.is_running():
                child.kill()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


@dataclass
class Live:
    url: str
    lines: list[str]  # of its log, and of the cluster's processes

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key="none", timeout=900)


@contextmanager
def served(cluster: Cluster, folder: Path, *flags: str) -> Iterator[Live]:
    """`anycore serve --ray` on the cluster."""
    command = [sys.executable, "-m", "anycore.cli.main", "serve", str(folder), "--served-model-name", "lm"]
    command += ["--ray", cluster.address, "--port", "8431", *ENGINE, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines: list[str] = []
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    url = "http://127.0.0.1:8431"
    try:
        wait(lambda: process.poll() is None and any(line.startswith("anycore: http") for line in lines), lines)
        wait(lambda: httpx.get(url + "/ready", timeout=60).status_code == 200, lines)
        yield Live(url, lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS * patience()) == 0, "".join(lines[-30:])
    finally:
        process.kill()
        process.wait()
        print("".join(lines[-60:]))


def wait(condition: Callable[[], Any], said: list[str] | None = None) -> None:
    end = time.monotonic() + SECONDS * patience()
    while time.monotonic() < end:
        try:
            if condition():
                return
        except httpx.TransportError:
            pass
        time.sleep(0.25)
    raise AssertionError("not in time:\n" + "".join((said or [])[-60:]))


async def ask(client: openai.AsyncOpenAI, number: int, tokens: int) -> str:
    """One streamed completion; how it ended: "length", the code of an error event, or the kind of a failure."""
    ended = "silently"
    try:
        stream = await client.completions.create(
            model="lm",
            prompt=f"request {number}: " + "word " * 20,
            max_tokens=tokens,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            ended = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), ended)
    except openai.APIConnectionError:
        return "connection"
    except openai.APIError as error:
        return str(error.code)
    except httpx.TransportError:
        return "connection"
    return ended


async def burst(url: str, requests: int, tokens: int, meanwhile: Callable[[], None] | None = None) -> list[str]:
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=900) as client:
        work = [asyncio.create_task(ask(client, number, tokens)) for number in range(requests)]
        if meanwhile is not None:
            await asyncio.to_thread(meanwhile)
        return await asyncio.gather(*work)


def engines() -> list[psutil.Process]:
    """The actors that hold an engine."""
    return [each for each in children() if "ServeReplica:anycore:engine-0" in name_of(each)]


def children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def figures(live: Live) -> dict[str, float]:
    """The last value of each series of /metrics."""
    rows = httpx.get(live.url + "/metrics", timeout=60).text.splitlines()
    pairs = (row.rsplit(" ", 1) for row in rows if not row.startswith("#"))
    return {name.partition("{")[0].removeprefix("anycore:"): float(value) for name, value in pairs}


def answered(live: Live) -> set[str]:
    """The engines' actors that have completed a request, by process."""
    found = (re.search(r"engine-0 pid=(\d+)\).* CALL generate OK", line) for line in list(live.lines))
    return {match[1] for match in found if match}


def name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_two_nodes_serve_and_the_loss_of_one_is_told(cluster: Cluster, t_lm: Path) -> None:
    """RAY-01, RAY-02: the OpenAI client is served by two nodes; of those requests that a lost one had, each ends as
    complete or with an error, the others go on, and another node takes its place."""
    with served(cluster, t_lm, "--replicas", "2", "--max-num-seqs", "8") as live:
        client = live.client()
        assert [model.id for model in client.models.list()] == ["lm"]
        reply = client.chat.completions.create(model="lm", messages=[{"role": "user", "content": "hi"}], max_tokens=4)
        assert reply.usage is not None
        assert reply.usage.completion_tokens > 0
        assert len(engines()) == 2
        assert asyncio.run(burst(live.url, 4, 8)) == ["length"] * 4

        wait(lambda: "generation_tokens_total" in figures(live) and figures(live)["generation_tokens_total"] >= 36)
        assert len(answered(live)) == 2

        victim = engines()[0]
        raylet = victim.parent()
        assert raylet is not None

        def kill() -> None:
            time.sleep(2)
            for process in [raylet, *raylet.children(recursive=True)]:
                process.kill()

        ends = asyncio.run(burst(live.url, 24, 180, kill))
        assert set(ends) <= {"length", "engine_dead", "connection"}, ends
        assert any("is lost" in line for line in live.lines), ends  # requests were there
        assert "length" in ends
        cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        wait(lambda: asyncio.run(burst(live.url, 4, 4)) == ["length"] * 4)
        wait(lambda: len(engines()) == 2)


def test_engines_come_with_a_burst_and_go_after_it(cluster: Cluster, t_lm: Path) -> None:
    """RAY-03: 1, 3 and again 1 engine; no request is refused, cut or lost by either."""
    cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
    scaling = {
        "max_replicas": 3,
        "target_ongoing_requests": 2,
        "upscale_delay_s": 1,
        "downscale_delay_s": 5,
        "look_back_period_s": 2,
    }
    with served(cluster, t_lm, "--max-num-seqs", "2", "--ray-autoscaling", json.dumps(scaling)) as live:
        assert len(engines()) == 1
        for _ in range(100):
            assert asyncio.run(burst(live.url, 24, 150)) == ["length"] * 24
            if len(answered(live)) == 3:
                break
        assert len(answered(live)) == 3
        wait(lambda: len(engines()) == 1)
        assert asyncio.run(burst(live.url, 2, 8)) == ["length"] * 2


def test_ranks_on_two_nodes_are_one_engine(cluster: Cluster, t_lm: Path) -> None:
    """RAY-04: a placement group of two bundles, each node has room for one."""
    with served(cluster, t_lm, "--tensor-parallel-size", "2") as live:
        client = live.client()
        first, second = (
            client.completions.create(model="lm", prompt="one two", max_tokens=6, temperature=0) for _ in range(2)
        )
        assert first.choices[0].text == second.choices[0].text
        parents = [each.parent() for each in children() if "anycore.ranks.follower" in name_of(each)]
        assert len(parents) == 1
        assert "Follower" in name_of(parents[0])  # type: ignore[arg-type]
        assert engines()[0].parent() != parents[0].parent()  # type: ignore[union-attr]
