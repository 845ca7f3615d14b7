"""What a key may use: requests and tokens a minute, requests at a time, tokens of one answer; and who else counts.

The clock of the limits is the test's own, so that a minute passes when the test says so.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from server.answers import error_of
from server.fake_child import ScriptedEngine, scripted
from server.harness import Live, serve_here, serve_scripted

from anycore.config import ModelConfig
from anycore.engine.request import NewRequest
from anycore.errors import DeadlineExceeded
from anycore.server import accounts
from anycore.server.accounts import Account
from anycore.server.auth import Guard
from anycore.server.door import Call
from anycore.server.keys import Key, entry_of, hash_of
from anycore.server.ledger import REQUESTS, TOKENS, Ledger

SEATS = 8  # sequences that run at once, and as many wait
COMPLETIONS = "/v1/completions"


def key(name: str, **limits: Any) -> Key:
    """A key that is its own name."""
    return Key(name=name, sha256=hash_of(name.encode()), **limits)


KEYS = [
    key("free"),
    key("one", requests_per_minute=1),
    key("counted", requests_per_minute=1),
    key("wrongs", requests_per_minute=2),
    key("tokens", tokens_per_minute=100),
    key("stream", tokens_per_minute=100),
    key("back", tokens_per_minute=100),
    key("two", max_concurrent=2),
    key("leaver", max_concurrent=1),
    key("capped", max_tokens=5),
    key("heavy", weight=4.0),
    key("scrape", scopes=frozenset(("metrics",))),
]


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    launch = scripted(str(t_lm), f"max_num_seqs={SEATS}", f"max_queued={SEATS}", "step=0.002")
    with serve_here(model, guard=Guard(KEYS), launch=launch) as live:
        yield live


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let seconds pass, of which there are none otherwise."""
    now = [1000.0]
    monkeypatch.setattr(accounts, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def pass_time(seconds: float) -> None:
        now[0] += seconds

    return pass_time


def body(prompt: int = 1, output: int = 1, **more: Any) -> dict[str, Any]:
    return {"model": "lm", "prompt": [7] * prompt, "max_tokens": output, **more}


def ask(live: Live, key: str, prompt: int = 1, output: int = 1, **more: Any) -> httpx.Response:
    return live.post(COMPLETIONS, body(prompt, output, **more), headers=bearer(key))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@contextmanager
def streaming(live: Live, key: str) -> Iterator[None]:
    """Have a stream under way, which goes on for long."""
    sent = body(1, 900, stream=True)
    with httpx.stream(
        "POST", live.url + COMPLETIONS, json=sent, headers=bearer(key), timeout=30, verify=False
    ) as response:
        parts = response.iter_text()  # kept: its end would close the connection
        next(parts)
        yield


def limited(answer: httpx.Response, code: str = "rate_limit_exceeded") -> int:
    """Check that an answer is a refusal for now; return the seconds it says."""
    error_of(answer, 429, code=code)
    return int(answer.headers["retry-after"])


# --- rates --------------------------------------------------------------------------------------------------------


def test_requests_a_minute(live: Live, pass_time: Callable[[float], None]) -> None:
    assert ask(live, "one").status_code == 200
    for _ in range(3):  # what is refused uses nothing up
        answer = ask(live, "one")
        assert limited(answer) == 60
        assert "key one may send 1 requests a minute" in answer.json()["error"]["message"]
    assert ask(live, "free").status_code == 200
    pass_time(59)
    assert limited(ask(live, "one")) == 1
    pass_time(1)
    assert ask(live, "one").status_code == 200
    pass_time(3600)  # what was not used in an hour does not add up
    assert ask(live, "one").status_code == 200
    assert limited(ask(live, "one")) == 60
    assert live.get("/v1/models", headers=bearer("one")).status_code == 200  # lists cost nothing


def test_requests_that_are_wrong_or_that_the_engine_refuses_count(
    live: Live, pass_time: Callable[[float], None]
) -> None:
    error_of(ask(live, "wrongs", temperature="hot"), 400, "temperature")
    assert limited(ask(live, "wrongs", n=2 * SEATS + 1), "queue_full") >= 1
    assert limited(ask(live, "wrongs")) == 30


def test_tokens_a_minute_are_those_of_prompts_and_answers(live: Live, pass_time: Callable[[float], None]) -> None:
    assert ask(live, "tokens", 60, 20).status_code == 200
    answer = ask(live, "tokens", 30)
    assert limited(answer) == 6  # ten too many, of which 100/60 are forgiven a second
    assert "100 tokens a minute" in answer.json()["error"]["message"]
    error_of(ask(live, "tokens", 101), 400, code="tokens_per_minute_exceeded")  # in no minute
    pass_time(6)
    assert ask(live, "tokens", 30, 50).status_code == 200  # nobody knew how long it would be: 150 are used
    assert limited(ask(live, "tokens", 1)) == 31
    pass_time(31)
    assert ask(live, "tokens", 1).status_code == 200


def test_tokens_of_streams_and_of_every_choice_count(live: Live, pass_time: Callable[[float], None]) -> None:
    sent = body(10, 15, n=2, stream=True)
    answer = live.post(COMPLETIONS, sent, headers=bearer("stream"))
    assert answer.status_code == 200
    assert "[DONE]" in answer.text
    assert limited(ask(live, "stream", 61)) == 1  # 40 are used
    assert ask(live, "stream", 60).status_code == 200


def test_m09_a_prompt_that_the_engine_refuses_is_not_counted(live: Live, pass_time: Callable[[float], None]) -> None:
    assert limited(ask(live, "back", 60, n=2 * SEATS + 1), "queue_full") >= 1
    assert ask(live, "back", 60).status_code == 200
    assert limited(ask(live, "back", 60)) > 0


def test_a_bucket_is_dry_when_its_minute_is_over_and_never_below() -> None:
    ledger = Ledger()
    assert [ledger.take("a", REQUESTS, 1, 3, 0.0) for _ in range(4)] == [0, 0, 0, 20]
    assert ledger.take("a", REQUESTS, 1, 3, 19.9) == pytest.approx(0.1)
    assert ledger.take("a", REQUESTS, 1, 3, 20.0) == 0
    assert ledger.take("a", TOKENS, 1, 3, 20.0) == ledger.take("b", REQUESTS, 1, 3, 20.0) == 0  # each its own
    ledger.use("a", TOKENS, -10, 3, 20.0)
    assert [ledger.take("a", TOKENS, 1, 3, 20.0) for _ in range(4)] == [0, 0, 0, 20]
    assert ledger.take("a", TOKENS, 1, 30, 20.0) == 0  # another allowance holds at once


# --- requests at a time -------------------------------------------------------------------------------------------


def test_requests_at_a_time(live: Live) -> None:
    with streaming(live, "two"):
        with streaming(live, "two"):
            answer = ask(live, "two")
            assert limited(answer, "concurrency_limit_exceeded") == 1
            assert "key two may have 2 requests" in answer.json()["error"]["message"]
            assert ask(live, "free").status_code == 200
        live.wait(lambda: ask(live, "two").status_code == 200, 5)
    assert ask(live, "two").status_code == 200


def test_m10_clients_that_leave_and_errors_give_their_place_back(live: Live) -> None:
    for _ in range(3):
        error_of(ask(live, "leaver", prompt=0), 400)
        with streaming(live, "leaver"):
            pass
        live.wait(lambda: ask(live, "leaver").status_code == 200, 5)


def test_load_counts_what_is_under_way(live: Live) -> None:
    def load() -> dict[str, Any]:
        found: dict[str, Any] = live.get("/load", headers=bearer("scrape")).json()
        assert found["server_load"] == found["models"][0]["requests"]
        return found

    live.wait(lambda: load()["server_load"] == 0, 5)
    with streaming(live, "free"), streaming(live, "free"):
        assert load()["server_load"] == 2
        live.wait(lambda: load()["models"][0]["running"] == 2, 5)
    live.wait(lambda: load()["server_load"] == 0, 5)


# --- the length of answers ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a10_the_length_of_an_answer_is_capped(live: Live, path: str) -> None:
    asked = {"model": "lm", "messages": [{"role": "user", "content": "a"}]}
    if path == COMPLETIONS:
        asked = {"model": "lm", "prompt": [7]}

    def answer(**more: Any) -> httpx.Response:
        return live.post(path, {**asked, **more}, headers=bearer("capped"))

    for given, length in (({}, 5), ({"max_tokens": 3}, 3), ({"max_tokens": 5}, 5)):
        assert answer(**given).json()["usage"]["completion_tokens"] == length
    for field in ("max_tokens", "max_completion_tokens"):
        error = error_of(answer(**{field: 6}), 400, "max_tokens")
        assert "6" in error["message"]
        assert "at most 5" in error["message"]


# --- who a request is for -----------------------------------------------------------------------------------------


def test_the_engine_hears_whose_request_it_is(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[str, float]] = []
    add = ScriptedEngine.add

    def hear(engine: ScriptedEngine, new: NewRequest) -> None:
        heard.append((new.tenant, new.weight))
        add(engine, new)

    monkeypatch.setattr(ScriptedEngine, "add", hear)
    for name in ("heavy", "free"):
        assert ask(live, name).status_code == 200
    assert heard == [("heavy", 4.0), ("free", 1.0)]


def test_refusals_are_counted_by_the_name_of_the_key(live: Live, pass_time: Callable[[float], None]) -> None:
    assert [ask(live, "counted").status_code for _ in range(3)] == [200, 429, 429]
    assert ask(live, "scrape").status_code == 403
    assert ask(live, "wrong").status_code == 401
    text = live.get("/metrics", headers=bearer("scrape")).text
    found = dict(re.findall(r"^anycore:request_errors_total({.*}) (\S+)$", text, re.MULTILINE))
    assert found['{code="rate_limit_exceeded",key="counted"}'] == "2.0"
    assert found['{code="insufficient_scope",key="scrape"}'] == "1.0"
    assert found['{code="invalid_api_key",key=""}'] == "1.0"


# --- until when ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "default", "left"), [(None, None, None), (5.0, None, 5), (None, 3.0, 3), (5.0, 3.0, 3), (2.0, 3.0, 2)]
)
def test_the_earlier_of_two_deadlines_holds(header: float | None, default: float | None, left: float | None) -> None:
    model: Any = SimpleNamespace(slot=SimpleNamespace(config=SimpleNamespace(request_timeout=default)))
    call = Call(Account(None, Ledger()), time.monotonic(), header)
    deadline = call.in_time(NewRequest(id="a", task="generate", token_ids=[]), model).deadline  # type: ignore[arg-type]
    if left is None:
        assert deadline is None
    else:
        assert deadline is not None
        assert left - 1 < deadline <= left


def test_the_time_before_the_engine_has_it_counts() -> None:
    model: Any = SimpleNamespace(slot=SimpleNamespace(config=SimpleNamespace(request_timeout=None)))
    late = Call(Account(None, Ledger()), time.monotonic() - 5, 4.0)
    with pytest.raises(DeadlineExceeded, match="before the engine had it"):
        late.in_time(NewRequest(id="a", task="generate", token_ids=[]), model)  # type: ignore[arg-type]


# --- several processes --------------------------------------------------------------------------------------------

TAKER = """
import sys
from pathlib import Path
from anycore.server.ledger import REQUESTS, Ledger
ledger = Ledger(Path(sys.argv[1]), int(sys.argv[2]), 2)
print("ready", flush=True)
sys.stdin.readline()
print(sum(ledger.take("a", REQUESTS, 1, 3000, 0.0) == 0 for _ in range(2500)), flush=True)
print(sum(ledger.enter("a", 100) for _ in range(80)), flush=True)
sys.stdin.readline()
"""


def test_two_processes_take_from_one_bucket_and_what_the_dead_held_is_free_again(tmp_path: Path) -> None:
    path = tmp_path / "limits"
    command = [sys.executable, "-c", TAKER, str(path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    takers = [subprocess.Popen([*command, str(front)], **pipes) for front in range(2)]
    try:
        lines = [taker.stdout for taker in takers]
        assert [line.readline() for line in lines if line] == ["ready\n"] * 2
        for taker in takers:
            assert taker.stdin
            print(file=taker.stdin, flush=True)
        taken = [int(line.readline()) for line in lines if line]
        entered = [int(line.readline()) for line in lines if line]
    finally:
        for taker in takers:
            taker.kill()
            taker.communicate()
    assert sum(taken) == 3000
    assert sum(entered) == 100
    successor = Ledger(path, 1, 2)
    assert sum(successor.enter("a", 100) for _ in range(150)) == entered[1]


@pytest.fixture(scope="module")
def fronts(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Path]]:
    """Two front processes with the same keys, and the file of these."""
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    write(path, key("slots", max_concurrent=2), key("rate", requests_per_minute=3), key("gone"))
    words = ["max_num_seqs=64", "max_queued=64", "step=0.01"]
    with serve_scripted(t_lm, *words, ready=False, api_servers=2, api_key_file=str(path)) as live:
        live.wait(lambda: "fronts share the port" in "".join(live.output), 60)
        yield live, path


def write(path: Path, *keys: Key) -> None:
    path.write_text("".join(entry_of(key) + "\n" for key in keys))


def many(live: Live, key: str, number: int = 12) -> list[int]:
    """Statuses of requests at the same time, each on a connection that the kernel gives to any front."""
    with ThreadPoolExecutor(number) as pool:
        return [answer.status_code for answer in pool.map(lambda _: ask(live, key), range(number))]


def test_limits_hold_for_all_fronts_together(fronts: tuple[Live, Path]) -> None:
    live, _ = fronts
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(streaming(live, "slots"))
        assert set(many(live, "slots")) == {429}
    live.wait(lambda: ask(live, "slots").status_code == 200, 10)
    began = time.monotonic()
    statuses = many(live, "rate", 16)
    due = (time.monotonic() - began) * 3 / 60  # that became free meanwhile, on a slow machine
    assert set(statuses) == {200, 429}
    assert 3 <= statuses.count(200) <= 3 + due


def test_sighup_lets_all_fronts_read_the_keys_again_and_a_bad_file_changes_nothing(fronts: tuple[Live, Path]) -> None:
    live, path = fronts
    with streaming(live, "gone"):
        write(path, key("slots", max_concurrent=2), key("fresh"))
        live.signal(signal.SIGHUP)
        live.wait(lambda: set(many(live, "fresh")) == {200}, 20)
    assert set(many(live, "gone")) == {401}
    for broken in ("- name: [", "", f"- {{name: fresh, sha256: {hash_of(b'x')}, max_token: 1}}"):
        seen = "".join(live.output).count("keys stay as they were")
        path.write_text(broken)
        live.signal(signal.SIGHUP)
        live.wait(lambda seen=seen: "".join(live.output).count("keys stay as they were") == seen + 2, 20)  # type: ignore[misc]
        assert set(many(live, "fresh")) == {200}
    path.unlink()
    live.signal(signal.SIGHUP)
    live.wait(lambda: "No such file" in "".join(live.output), 20)
    assert set(many(live, "fresh")) == {200}
