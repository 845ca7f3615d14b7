"""Ranks that are processes: one pair of them, exchanging through gloo, behind `LLM` and behind a server."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
import torch.distributed
from server.harness import Live, serve_process

from anycore import LLM, SamplingParams
from anycore.engine.request import Delta
from anycore.errors import AnycoreError, Unavailable
from anycore.ranks.engines import LeadingEngine

SETTINGS = {"backend": "cpu", "dtype": "float32", "kv_cache_memory": 4 << 20}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12] * 4, [200, 201]]


@pytest.fixture(scope="module")
def llm(t_lm: Path) -> Iterator[LLM]:
    """Two ranks: this process and another one."""
    made = LLM(str(t_lm), tensor_parallel_size=2, **SETTINGS)
    yield made
    assert isinstance(made.engine, LeadingEngine)
    made.engine.close()


@pytest.fixture(scope="module")
def alone(t_lm: Path) -> LLM:
    return LLM(str(t_lm), **SETTINGS)


def followers(parent: int) -> list[int]:
    """Processes of other ranks that a process has started."""
    found = subprocess.run(["ps", "-A", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "anycore.ranks.follower" in args]


def both(one: LLM, two: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> None:
    mine, theirs = (llm.generate(prompts, params) for llm in (one, two))
    assert [(o.token_ids, o.finish_reason) for o in theirs] == [(o.token_ids, o.finish_reason) for o in mine]


def test_ids_are_those_of_one_rank(llm: LLM, alone: LLM) -> None:
    assert len(followers(os.getpid())) == 1
    both(alone, llm, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    both(alone, llm, SamplingParams(temperature=1, top_k=20, seed=4, max_tokens=24, n=2, logprobs=1))
    both(alone, llm, SamplingParams(temperature=0, max_tokens=24, repetition_penalty=1.2, stop=("e",)))


def test_draws_without_a_seed_and_requests_that_leave_keep_ranks_together(llm: LLM) -> None:
    """Each of these would have ranks do different things, and wait for one another forever, if it were not told."""
    for _ in range(3):
        llm.generate(PROMPTS, SamplingParams(temperature=1.5, max_tokens=8, n=2, ignore_eos=True))
        stream = llm.stream_chat([{"role": "user", "content": "hello"}], SamplingParams(temperature=1, max_tokens=50))
        next(stream)
        stream.close()
    llm.engine.reset_prefix_cache()
    assert not llm.engine.has_work()


def test_deadlines_are_kept_by_one_clock(llm: LLM) -> None:
    engine = llm.engine
    engine.add(engines.request("late", [5, 6, 7], deadline=0.05, max_tokens=400))
    engine.add(engines.request("whole", [5, 6, 8], max_tokens=30))
    deltas: list[Delta] = []
    while engine.has_work():
        deltas += engine.step()
    ends = {delta.id: delta.finish for delta in deltas if delta.finish is not None}
    assert ends["whole"] == "length"
    assert ends["late"] in ("error", "length")


def test_grammars_that_are_ready_at_different_times(llm: LLM, alone: LLM) -> None:
    pytest.importorskip("llguidance")
    from anycore.text.grammar import json_schema

    schema = json_schema({"type": "array", "items": {"type": "integer"}, "maxItems": 3})
    both(alone, llm, SamplingParams(temperature=0, max_tokens=12, grammar=schema))
    broken = SamplingParams(temperature=0, max_tokens=12, grammar="{")
    for _ in range(2):
        with pytest.raises(AnycoreError):
            llm.generate([[5, 6]], broken)
    both(alone, llm, SamplingParams(temperature=0, max_tokens=4))


def test_a_second_model_of_several_ranks_is_refused(llm: LLM, t_lm: Path) -> None:
    with pytest.raises(AnycoreError, match="one model of several ranks at a time"):
        LLM(str(t_lm), tensor_parallel_size=2, **SETTINGS)
    assert len(followers(os.getpid())) == 1


def test_a_step_that_is_broken_off_ends_the_group(alone: LLM) -> None:
    """Ranks that are not in step would wait for one another forever."""
    events: list[str] = []

    class Group:
        def tell(self, message: object) -> None:
            events.append(type(message).__name__)

        def check(self, error: BaseException | None = None) -> None:
            events.append(f"check {error!r}")

        def close(self) -> None:
            events.append("close")

    runner = alone.engine.runner
    engine = LeadingEngine(runner, alone.engine.scheduler, alone.engine.limits)
    engine.lead(Group())
    engine.add(engines.request("one", [5, 6, 7]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "launch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    assert events == ["check None", "check None", "Turn", "check KeyboardInterrupt()", "close"]
    engine.abort("one")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_rank_that_hangs_ends_what_runs_with_an_error(llm: LLM) -> None:
    """The last test of this pair: what is lost is said, nothing is left, and the process may open another one."""
    engine = llm.engine
    assert isinstance(engine, LeadingEngine)
    (other,) = followers(os.getpid())
    engine.add(engines.request("long", [5, 6, 7], max_tokens=400))
    for _ in range(5):
        engine.step()
    os.kill(other, signal.SIGSTOP)
    with pytest.raises(Unavailable, match=r"rank 1 of 2 has given no sign of life for 3 s"):
        engines.finish(engine)
    with pytest.raises(Unavailable, match="lost a part"):
        engine.add(engines.request("next", [5, 6, 7]))
    assert followers(os.getpid()) == []
    engine.close()
    assert not torch.distributed.is_initialized()


def test_what_another_rank_says_when_it_fails_is_told(t_lm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycore.ranks.leader.COMMAND", ("python", "-c", "import sys; sys.exit(7)"))
    with pytest.raises(Unavailable, match="rank 1 of 2 has ended: exit code 7"):
        LLM(str(t_lm), tensor_parallel_size=2, **SETTINGS)


# --- a server -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    options = ("--backend", "cpu", "--dtype", "float32", "--kv-cache-memory", "4MiB", "--tensor-parallel-size", "2")
    env = {"XDG_RUNTIME_DIR": str(tmp_path_factory.mktemp("runtime"))}
    with serve_process(str(t_lm), "--served-model-name", "lm", *options, env=env) as server:
        yield server


def answer(live: Live, tokens: int) -> tuple[int, str]:
    """The status of an answer, and its text or the code of its error."""
    body = {"model": "lm", "prompt": "the river", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    found = live.post("/v1/completions", body)
    told = found.json()
    return found.status_code, told["choices"][0]["text"] if found.status_code == 200 else told["error"]["code"]


def test_a_killed_rank_ends_the_group_which_comes_back(live: Live) -> None:
    """What runs ends with an error event; nothing of the old group is left."""
    expected = answer(live, 8)
    assert expected[0] == 200
    (first,) = live.engines()
    group = [first, *followers(first)]
    assert len(group) == 2
    ends: list[tuple[int, str]] = []
    running = threading.Thread(target=lambda: ends.append(answer(live, 500)))
    running.start()
    live.wait(lambda: re.search(r"num_requests_running{.*} 1", live.get("/metrics").text) is not None, 10)
    os.kill(group[1], signal.SIGKILL)
    running.join()
    assert ends[0][1] == "engine_dead" or ends[0][0] == 200
    live.wait(lambda: live.engines() not in ([], [first]) and answer(live, 8) == expected, 30)
    (second,) = live.engines()
    assert len(followers(second)) == 1
    live.wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in group), 10)


def test_a_stopped_server_leaves_no_rank_behind(live: Live) -> None:
    """The last test of this server."""
    (first,) = live.engines()
    group = [first, *followers(first)]
    live.signal(signal.SIGTERM)
    assert live.exit_code() == 0
    end = time.monotonic() + 10  # whoever inherits the last ones takes a moment to see them off
    while any(Path(f"/proc/{pid}").exists() for pid in group):
        assert time.monotonic() < end
        time.sleep(0.02)
