"""Several engines behind one name: who gets which request, and what deaths and changes of one mean for the others.

Engines are scripted and, like the server, in processes of their own, but where a test says otherwise.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from server.conftest import served
from server.harness import Live, serve_here, serve_scripted

from anycore.config import ModelConfig
from anycore.errors import ConfigError, WeightsError
from anycore.server.keeper import Keeper
from anycore.server.replicas import Replicas, parts_of

COUNT = 3
WORDS = ("step=0.01", "load=0.2", "max_num_seqs=8", "max_queued=64")


@pytest.fixture(scope="module")
def shared(t_lm: Path) -> Iterator[Live]:
    """A server with three engines of one model, all of them ready whenever a test begins."""
    with serve_scripted(t_lm, *WORDS, replicas=COUNT) as live:
        yield live


@pytest.fixture
def live(shared: Live) -> Live:
    shared.wait(lambda: phases(shared) == ["ready"] * COUNT and running(shared) == {}, 20)
    shared.wait(lambda: len(shared.engines()) == COUNT, 10)
    return shared


def ask(live: Live, prompt: list[int], tokens: int = 3, **more: Any) -> httpx.Response:
    body = {"model": "lm", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **more}
    return live.post("/v1/completions", body)


def streamed(live: Live, prompt: list[int], tokens: int) -> str:
    """All events of a stream."""
    body = {"model": "lm", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=60, verify=False) as response:
        return "".join(response.iter_text())


def entry(live: Live) -> dict[str, Any]:
    found: dict[str, Any] = live.get("/ready").json()["models"][0]
    return found


def phases(live: Live) -> list[str]:
    return [engine["phase"] for engine in entry(live)["engines"]]


def by_engine(live: Live, name: str, label: str = "") -> Counter[str]:
    """What the engines count, without those that count nothing."""
    pattern = rf'^anycore:{name}{{[^}}]*engine="(\d+)"[^}}]*{label}[^}}]*}} (\S+)$'
    found: Counter[str] = Counter()
    for engine, value in re.findall(pattern, live.get("/metrics").text, re.MULTILINE):
        found[engine] += int(float(value))
    return +found


def running(live: Live) -> Counter[str]:
    return by_engine(live, "num_requests_running")


def test_requests_go_where_least_is_done(live: Live) -> None:
    with ThreadPoolExecutor(6) as pool:
        long = [pool.submit(ask, live, [7 + i], 200) for i in range(6)]
        live.wait(lambda: running(live) == {"0": 2, "1": 2, "2": 2}, 10)
        assert {answer.result().status_code for answer in long} == {200}


def test_a_prompt_goes_where_its_blocks_are_unless_that_one_is_busy(live: Live) -> None:
    begun = [list(range(10 * i, 10 * i + 40)) for i in range(COUNT)]
    before = by_engine(live, "request_success_total")
    for _ in range(4):
        assert ask(live, begun[0]).status_code == 200
    taken = by_engine(live, "request_success_total") - before
    assert list(taken.values()) == [4]  # all at the same one
    (home,) = taken
    before = by_engine(live, "request_success_total")
    for prompt in begun:
        assert ask(live, prompt).status_code == 200
    assert len(by_engine(live, "request_success_total") - before) == COUNT  # the others' are new
    with ThreadPoolExecutor(12) as pool:
        long = [pool.submit(ask, live, [*begun[0], i], 200) for i in range(12)]
        live.wait(lambda: sum(running(live).values()) == 12, 10)
        # 8 run at once at each: one with the prefix may have a 4th of that, 2, more than the least busy one. The one
        # that gets its first request of this prompt has the prefix from then on.
        now = running(live)
        assert len(now) == COUNT
        assert max(now.values()) - min(now.values()) <= 3
        assert now[home] == max(now.values())
        assert {answer.result().status_code for answer in long} == {200}


def test_the_sequences_of_a_request_stay_together(live: Live) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, live, [90], 100, n=4, temperature=1)
        live.wait(lambda: list(running(live).values()) == [4], 10)
        assert len(answer.result().json()["choices"]) == 4


def test_a_death_ends_what_that_engine_had_and_nothing_else(live: Live) -> None:
    restarts = by_engine(live, "engine_restarts_total")
    with ThreadPoolExecutor(COUNT) as pool:
        long = [pool.submit(streamed, live, [20 + i], 250) for i in range(COUNT)]
        live.wait(lambda: len(running(live)) == COUNT, 10)
        victim = live.engines()[-1]
        os.kill(victim, signal.SIGKILL)
        live.wait(lambda: entry(live)["phase"] == "degraded", 10)
        now = entry(live)
        assert "2 of 3 engines serve" in now["reason"]
        assert "SIGKILL" in now["reason"]
        assert live.get("/ready").status_code == 200
        assert live.get("/ready?model=lm").status_code == 200
        assert ask(live, [1]).status_code == 200
        ends = sorted("[DONE]" in each.result() for each in long)
        assert ends == [False, True, True]
        assert sum('"engine_dead"' in each.result() for each in long) == 1
    live.wait(lambda: phases(live) == ["ready"] * COUNT, 20)
    assert (by_engine(live, "engine_restarts_total") - restarts).total() == 1
    assert by_engine(live, "engine_phase", 'phase="ready"') == {"0": 1, "1": 1, "2": 1}


def test_a_reload_goes_through_them_in_turn_and_serving_never_stops(live: Live, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    before = live.engines()
    most, states, seen = 0, set(), set()
    with ThreadPoolExecutor(4) as pool:
        long = pool.submit(streamed, live, [30], 100)
        live.wait(lambda: running(live).total() == 1, 10)
        change = pool.submit(live.post, "/v1/models/lm/reload", {"checkpoint": str(tmp_path)})
        while not change.done():
            assert ask(live, [31]).status_code == 200
            states.add(live.get("/ready").status_code)
            seen.add(entry(live)["code"])
            most = max(most, len(live.engines()))
        assert change.result().status_code == 200
        assert "[DONE]" in long.result()
    assert states == {200}
    assert "reloading" in seen
    assert most <= 2 * COUNT - 1  # never all of them twice
    live.wait(lambda: len(live.engines()) == COUNT, 10)
    assert not set(before) & set(live.engines())
    assert live.get("/v1/models/lm").json()["checkpoint"] == str(tmp_path)


def test_a_reload_that_fails_leaves_all_as_they_were(live: Live, tmp_path: Path) -> None:
    before = live.engines()
    failed = live.post("/v1/models/lm/reload", {"checkpoint": str(tmp_path)})
    assert (failed.status_code, failed.json()["error"]["code"]) == (400, "weights_damaged")
    assert failed.json()["error"]["message"].startswith("engine 0 of 3: ")
    assert live.engines() == before


class Kept:
    """A keeper of which only changes are asked."""

    def __init__(self, config: ModelConfig, fails: bool) -> None:
        self.config, self._fails = config, fails

    async def change(self, wanted: ModelConfig, what: str) -> None:
        if self._fails:
            raise WeightsError("damaged")
        self.config = wanted


def test_where_a_later_engine_cannot_be_changed_the_earlier_ones_go_back() -> None:
    parts = parts_of(ModelConfig(model="m", replicas=3))
    keepers = [Kept(part, fails=i == 2) for i, part in enumerate(parts)]

    async def reload() -> None:
        await Replicas(ModelConfig(model="m", replicas=3), cast(list[Keeper], keepers)).reload("elsewhere")

    with pytest.raises(WeightsError) as refused:
        asyncio.run(reload())
    assert refused.value.message == "engine 2 of 3: damaged"
    assert [keeper.config.checkpoint for keeper in keepers] == [None, None, None]


def test_all_are_unloaded_loaded_and_moved(live: Live) -> None:
    assert live.post("/v1/models/lm/unload").json()["phase"] == "unloaded"
    assert live.engines() == []
    refused = ask(live, [1])
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unloaded")
    assert live.post("/v1/models/lm/load").json()["phase"] == "ready"
    moved = live.post("/v1/models/lm/move", {"backend": "elsewhere", "devices": [1, 2]})
    assert moved.status_code == 200
    assert live.get("/v1/models/lm").json()["backend"] == "elsewhere"
    many = live.post("/v1/models/lm/move", {"backend": "elsewhere", "devices": [0, 1, 2, 3]})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "devices")


def test_one_change_of_all_at_a_time(live: Live) -> None:
    with ThreadPoolExecutor(1) as pool:
        change = pool.submit(live.post, "/v1/models/lm/reload")
        live.wait(lambda: entry(live)["code"] == "reloading", 10)
        assert live.post("/v1/models/lm/unload").status_code == 409
        assert change.result().status_code == 200


def test_all_rest_together_and_come_back_together(t_lm: Path) -> None:
    with serve_scripted(t_lm, *WORDS, replicas=2, keep_alive="0.5") as live, ThreadPoolExecutor(8) as pool:
        live.wait(lambda: entry(live)["code"] == "idle" and live.engines() == [], 20)
        answers = [pool.submit(ask, live, [1 + i]) for i in range(8)]
        assert {answer.result().status_code for answer in answers} == {200}
        assert len(by_engine(live, "request_success_total")) == 2


def test_the_server_ends_with_the_last_engine(t_lm: Path) -> None:
    with serve_scripted(t_lm, *WORDS, replicas=2, engine_restarts=0) as live:
        first, second = live.engines()
        os.kill(first, signal.SIGKILL)
        live.wait(lambda: sorted(phases(live)) == ["dead", "ready"], 10)
        assert live.get("/health").status_code == 200
        assert {ask(live, [1 + i]).status_code for i in range(6)} == {200}
        os.kill(second, signal.SIGKILL)
        assert live.exit_code(20) == 1


def test_several_fronts_each_route_and_all_follow_a_death(t_lm: Path) -> None:
    with serve_scripted(t_lm, *WORDS, replicas=2, api_servers=2) as live, ThreadPoolExecutor(12) as pool:
        live.wait(lambda: "fronts share the port" in "".join(live.output), 60)
        assert {answer.status_code for answer in pool.map(lambda i: ask(live, [1 + i]), range(24))} == {200}
        assert len(by_engine(live, "request_success_total")) == 2
        engine = next(pid for pid in live.engines() if b"fake_child" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(engine, signal.SIGKILL)
        live.wait(lambda: "its engine is back" in "".join(live.output), 20)
        live.wait(lambda: {ask(live, [1 + i]).status_code for i in range(12)} == {200}, 20)
        live.wait(lambda: phases(live) == ["ready", "ready"], 20)


def test_two_replicas_of_a_real_model_give_the_answers_of_one(t_lm: Path) -> None:
    """Engines in threads of this process."""
    alone, two = served(t_lm, "lm"), replace(served(t_lm, "two"), replicas=2)
    prompts = [[5 + i, 6, 7, 8] * 5 for i in range(6)]
    with serve_here(alone, two) as live:

        def texts(name: str) -> list[str]:
            answer = live.post("/v1/completions", {"model": name, "prompt": prompts, "max_tokens": 8, "temperature": 0})
            return [choice["text"] for choice in answer.json()["choices"]]

        assert texts("two") == texts("lm")
        assert texts("two") == texts("lm")  # from their prefix caches
        page = live.get("/metrics").text
        done = re.findall(
            r'^anycore:request_success_total{[^}]*engine="(\d)"[^}]*model_name="two"[^}]*} (\S+)$', page, re.M
        )
        assert Counter({engine: float(n) for engine, n in done if float(n)}).keys() == {"0", "1"}
        hits = re.findall(r'^anycore:prefix_cache_hits_total{[^}]*model_name="two"[^}]*} (\S+)$', page, re.M)
        assert sum(map(float, hits)) == 6 * 16  # every prompt found its first block where it was sent before
        assert live.get("/v1/models/two").json()["replicas"] == 2


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ({}, (0,)),
        ({"device": 3}, (3,)),
        ({"replicas": 2}, (0, 0)),
        ({"devices": (1, 2)}, (1, 2)),
        ({"replicas": 3, "devices": (0, 1)}, (0, 1, 0)),
        ({"devices": (2,)}, (2,)),
    ],
)
def test_replicas_are_placed_on_devices_in_turn(settings: dict[str, Any], places: tuple[int, ...]) -> None:
    config = ModelConfig(model="m", keep_alive=5.0, **settings)
    assert config.placement == places
    assert [part.device for part in parts_of(config)] == list(places)
    assert {part.placement for part in parts_of(config)} == {(place,) for place in places}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicas": 0}, "--replicas must be at least 1, not 0"),
        ({"devices": (0, 1), "replicas": 1}, "--devices names 2 devices, --replicas 1 would leave some idle"),
        ({"devices": (0, -1)}, "indices from 0 on, not -1"),
        ({"devices": (0, 1), "device": 1}, "--device 1 and --devices 0 1 exclude each other"),
    ],
)
def test_placements_that_cannot_be(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        ModelConfig(model="m", **settings)
