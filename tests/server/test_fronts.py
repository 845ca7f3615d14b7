"""Several front processes on one port: each answers for its own requests, all count together, and all end together."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server.harness import Live, serve_scripted

FRONTS = 3
PROCESSES = FRONTS - 1 + 1  # the other fronts and one engine


@contextmanager
def several(folder: Path, restarts: int = 10) -> Iterator[Live]:
    words = ["max_num_seqs=64", "max_queued=64", "step=0.005"]
    settings = {"api_servers": FRONTS, "shutdown_timeout": 5.0, "engine_restarts": restarts}
    with serve_scripted(folder, *words, **settings) as live:
        live.wait(lambda: "fronts share the port" in "".join(live.output), 60)
        yield live


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    with several(t_lm) as live:
        yield live


@pytest.fixture
def mortal(t_lm: Path) -> Iterator[Live]:
    """A server of the test's own, to be ended by it."""
    with several(t_lm) as live:
        yield live


def ask(live: Live, tokens: int, **more: Any) -> httpx.Response:
    """A request on a connection of its own, which the kernel gives to any front."""
    return live.post(
        "/v1/completions", {"model": "lm", "prompt": [7], "max_tokens": tokens, "ignore_eos": True, **more}
    )


def metric(live: Live, name: str) -> float:
    found = re.findall(rf"^anycore:{name}{{[^}}]*}} (\S+)$", live.get("/metrics").text, re.MULTILINE)
    return sum(map(float, found))


def test_every_front_answers_and_all_count_together(live: Live) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda _: ask(live, 5), range(48)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {5}
    live.wait(lambda: metric(live, "request_success_total") == 48, 5)
    assert metric(live, "time_to_first_token_seconds_count") == 48
    assert metric(live, "cache_config_info") == 1
    shares = front_shares(live)
    assert len(shares) == FRONTS, f"{shares}: some front had no request"


def front_shares(live: Live) -> set[str]:
    """Process ids of the fronts that counted finished requests, from the names of the files they count in."""
    assert live.process is not None
    environment = Path(f"/proc/{live.engines()[0]}/environ").read_bytes().decode().split("\0")
    folder = next(line.partition("=")[2] for line in environment if line.startswith("PROMETHEUS_MULTIPROC_DIR="))
    files = [path for path in Path(folder).glob("counter_*.db") if b"request_success" in path.read_bytes()]
    return {path.stem.split("_")[1] for path in files if count_in(path) > 0}


def count_in(path: Path) -> float:
    from prometheus_client.mmap_dict import MmapedDict

    entries = MmapedDict.read_all_values_from_file(str(path))
    return sum(value for key, value, *_ in entries if "request_success" in key)


def test_the_same_id_at_two_fronts_is_two_requests(live: Live) -> None:
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: ask(live, 20, request_id="mine"), range(12)))
    ids = {answer.json()["id"] for answer in answers if answer.status_code == 200}
    assert ids == {"cmpl-mine"}
    assert {answer.status_code for answer in answers} <= {200, 400}  # 400: in use at the same front


def test_a_client_that_leaves_is_forgotten_whichever_front_it_had(live: Live) -> None:
    for _ in range(9):
        with httpx.stream(
            "POST", live.url + "/v1/completions", verify=False,
            json={"model": "lm", "prompt": [7], "max_tokens": 900, "stream": True},
        ) as stream:  # fmt: skip
            next(stream.iter_text())
    live.wait(lambda: metric(live, "num_requests_running") == 0, 5)


def test_sigterm_lets_every_front_finish(mortal: Live) -> None:
    assert len(mortal.engines()) == PROCESSES
    with ThreadPoolExecutor(12) as pool:
        answers = [pool.submit(ask, mortal, 200) for _ in range(12)]
        mortal.wait(lambda: metric(mortal, "num_requests_running") == 12, 5)
        mortal.signal(signal.SIGTERM)
        assert {answer.result().status_code for answer in answers} == {200}
    assert mortal.exit_code() == 0
    assert "Traceback" not in "".join(mortal.output)


@pytest.mark.parametrize("victim", ["front", "engine"])
def test_a_death_ends_the_server(t_lm: Path, victim: str) -> None:
    with several(t_lm, restarts=0) as mortal:
        commands = commands_of(mortal)
        pid = next(pid for pid, command in commands.items() if ("server.front" in command) == (victim == "front"))
        os.kill(pid, signal.SIGKILL)
        assert mortal.exit_code(15) != 0
        for other in commands:
            assert not Path(f"/proc/{other}").exists()


def commands_of(live: Live) -> dict[int, str]:
    return {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in live.engines()}


def test_every_front_follows_a_restarted_engine(mortal: Live) -> None:
    for _ in range(2):
        engine = next(pid for pid, command in commands_of(mortal).items() if "server.front" not in command)
        with ThreadPoolExecutor(12) as pool:
            answers = [pool.submit(ask, mortal, 900) for _ in range(12)]
            mortal.wait(lambda: metric(mortal, "num_requests_running") == 12, 5)
            os.kill(engine, signal.SIGKILL)
            assert {(a.result().status_code, a.result().json()["error"]["code"]) for a in answers} == {
                (503, "engine_dead")
            }
            mortal.wait(lambda: all(ask(mortal, 1).status_code == 200 for _ in range(12)), 20)
            assert {answer.status_code for answer in pool.map(lambda _: ask(mortal, 5), range(24))} == {200}
    assert len(mortal.engines()) == PROCESSES
    refused = mortal.post("/v1/models/lm/reload")
    assert refused.status_code == 400
    assert "--api-servers" in refused.json()["error"]["message"]
    assert "Traceback" not in "".join(mortal.output)


def test_a_second_server_on_the_port_is_refused(live: Live, t_lm: Path) -> None:
    port = int(live.url.rsplit(":", 1)[1])
    with pytest.raises(AssertionError, match="in use"), serve_scripted(t_lm, api_servers=2, port=port):
        pass
