"""What is asked of a simulated server and how it is divided: arrivals, files, conversations, the front and replicas."""

from __future__ import annotations

import json
import math
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from anycore.bench.load import Load
from anycore.contract.sizes import Limits
from anycore.engine.scheduler import Step
from anycore.errors import ConfigError
from anycore.server.routing import Holders, chain, choose, slack_of
from anycore.simulate.arrivals import Conversation, Drawn, Recorded, Turn, chained
from anycore.simulate.engine import Sequence, Settings
from anycore.simulate.fleet import Fleet

SETTINGS = Settings(Limits(4, 64, 512, 8, 201))


def seconds(step: Step) -> float:
    return 0.1 + 0.001 * step.rows


def test_drawn_requests_come_when_bench_serve_sends_them() -> None:
    drawn = list(Drawn(50, 4.0, 0.5, (10, 20), (3, 5), prefix_len=8, num_prefixes=2, turns=(1, 3), seed=7))
    load = Load("", "", num_prompts=50, request_rate=4.0, burstiness=0.5, seed=7)
    assert [talk.at for talk in drawn] == load.arrivals
    firsts = [list(talk.turns[0].tokens) for talk in drawn]
    assert {len(tokens) - 8 for tokens in firsts} <= set(range(10, 21))
    assert {tuple(tokens[:8]) for tokens in firsts} == {tuple(range(8)), tuple(range(8, 16))}
    own = [token for talk, first in zip(drawn, firsts, strict=True) for token in first[8:]]
    own += [token for talk in drawn for turn in talk.turns[1:] for token in turn.tokens]
    assert len(set(own)) == len(own)
    assert {len(talk.turns) for talk in drawn} == {1, 2, 3}
    assert [talk.at for talk in Drawn(3, math.inf)] == [0.0, 0.0, 0.0]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_recorded_requests_share_what_their_file_says(tmp_path: Path) -> None:
    file = written(tmp_path / "trace.jsonl", [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [1, 2, 3]},
        {"timestamp": 500, "input_length": 1100, "output_length": 6, "hash_ids": [1, 2, 4]},
        {"timestamp": 1000, "input_length": 600, "output_length": 7, "hash_ids": [2]},
        {"at": 2.0, "prompt": [5, 6, 7], "max_tokens": 8, "priority": 3, "tenant": "t"},
        {"at": 2.0, "prompt": [5, 6, 9, 7], "max_tokens": 8},
    ])  # fmt: skip
    found = list(Recorded(file, speed=2.0))
    assert [talk.at for talk in found] == [0.0, 0.25, 0.5, 1.0, 1.0]
    assert [talk.turns[0].output for talk in found] == [5, 6, 7, 8, 8]
    first, second, third, fourth, fifth = (list(talk.turns[0].tokens) for talk in found)
    assert [len(first), len(second), len(third)] == [1200, 1100, 600]
    assert first[:1024] == second[:1024]
    assert not set(first[1024:]) & set(second[1024:])
    assert not set(second) & set(third)  # the same hash behind another beginning is something else
    assert fourth[:2] == fifth[:2]
    assert fourth[2] != fifth[3]
    assert (found[3].priority, found[3].tenant) == (3, "t")
    assert list(islice(chained([1, 2, 3]), 2)) == list(chained([1, 2]))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"at": 1.0, "prompt": "text", "max_tokens": 3}, "token ids"),
        ({"at": 1.0, "prompt": [1]}, "output_length"),
        ({"prompt": [1], "max_tokens": 3}, "timestamp"),
        ({"at": 1.0, "prompt": [], "max_tokens": 3}, "no prompt"),
        ({"at": 0.1, "prompt": [1], "max_tokens": 3}, "sort the file"),
        ({"at": float("nan"), "prompt": [1], "max_tokens": 3}, "no time"),
        ({"at": float("inf"), "prompt": [1], "max_tokens": 3}, "no time"),
        ({"at": "1", "prompt": [1], "max_tokens": 3}, "TypeError"),
        ({"at": 1.0, "prompt": [1.5], "max_tokens": 3}, "TypeError"),
        ({"at": 1.0, "prompt": [1], "max_tokens": 2.5}, "2.5 is no number of tokens"),
        ({"timestamp": 1000, "input_length": 10**12, "output_length": 1}, "no number of tokens"),
    ],
)
def test_lines_that_make_no_sense_are_named(tmp_path: Path, row: dict[str, Any], words: str) -> None:
    good = {"at": 0.5, "prompt": [1], "max_tokens": 3}
    with pytest.raises(ConfigError, match=words) as error:
        list(Recorded(written(tmp_path / "x.jsonl", [good, row])))
    assert "x.jsonl:2" in error.value.message


def test_a_file_as_windows_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    row = '{"at": 1.0, "prompt": [1], "max_tokens": 3}'
    file.write_bytes(f"{row}\r\n\r\n{row}\r\n".encode("utf-8-sig"))
    assert [talk.at for talk in Recorded(file)] == [1.0, 1.0]
    file.write_bytes(row.encode() + b'\n{"tenant": "\xff"}\n')
    with pytest.raises(ConfigError, match=r"x.jsonl:2 is neither .*UnicodeDecodeError"):
        list(Recorded(file))


def test_turns_find_what_was_said_and_answered() -> None:
    talk = Conversation(0.0, [Turn(range(1000, 1032), 16), Turn(range(2000, 2008), 4), Turn(range(3000, 3008), 4)])
    fleet = Fleet(SETTINGS, [seconds])
    found = fleet.run([talk])
    assert list(found.prompt) == [32, 32 + 16 + 8, 32 + 16 + 8 + 4 + 8]
    assert list(found.sent)[1:] == list(found.end)[:2]
    assert fleet.engines[0].seen.cached_tokens == 40 + 56  # the last token of an answer is never computed


@pytest.mark.parametrize("places", [1, 3])
def test_no_more_are_open_than_may_be(places: int) -> None:
    found = Fleet(SETTINGS, [seconds], most_open=places).run(Drawn(20, math.inf, input_len=(9, 40), output_len=(2, 9)))
    moments = sorted([(at, 1) for at in found.sent] + [(at, -1) for at in found.end], key=lambda one: (one[0], one[1]))
    now = most = 0
    for _, change in moments:
        now += change
        most = max(most, now)
    assert most == places
    assert len(found.end) == 20
    freed = [0.0] * places + sorted(found.end)[: 20 - places]
    assert sorted(found.sent) == freed


def test_replicas_are_chosen_as_the_server_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choices as with the real hashes of the tokens, from the same loads."""
    fleet = Fleet(SETTINGS, [seconds] * 3)
    holders, turn, wanted, chosen = Holders(3), 0, [], []
    route = fleet._route

    def noted(sequence: Sequence) -> int:
        nonlocal turn
        hashes = chain(sequence.tokens, 8, None)
        matches = holders.matches(hashes)
        wanted.append(choose(fleet._open, matches, slack_of(4), 4 + SETTINGS.max_queued, turn))
        holders.add(hashes, wanted[-1])
        turn = (wanted[-1] + 1) % 3
        chosen.append(route(sequence))
        return chosen[-1]

    monkeypatch.setattr(fleet, "_route", noted)
    rng = random.Random(5)
    load = Drawn(200, 12.0, 0.5, (4, 40), (4, 20), prefix_len=32, num_prefixes=5, turns=(1, 3), seed=rng.randrange(9))
    found = fleet.run(load)
    assert chosen == wanted
    assert {chosen.count(number) > 20 for number in range(3)} == {True}
    hits = sum(engine.cached_tokens for engine in found.engines) / sum(engine.prompt_tokens for engine in found.engines)
    assert hits > 0.3
    assert fleet._open == [0, 0, 0]
