"""O02: how many sequences one request may ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from server.answers import error_of, ok
from server.conftest import served
from server.fake_child import scripted
from server.harness import Live, serve_here

from anycore.config import ServerConfig
from anycore.errors import ConfigError

MOST = 6
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    with serve_here(served(t_lm, "lm"), launch=scripted(str(t_lm)), max_request_sequences=MOST) as live:
        yield live


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        (COMPLETIONS, {"prompt": ["a"] * 7}, "prompt", "n 1 for each of 7 prompts makes 7"),
        (COMPLETIONS, {"prompt": ["a"] * 3, "n": 3}, "n", "n 3 for each of 3 prompts makes 9"),
        (COMPLETIONS, {"prompt": ["a"] * 2, "n": 4, "stream": True}, "n", "n 4 for each of 2 prompts makes 8"),
        (COMPLETIONS, {"prompt": ["a"] * 2, "best_of": 4}, "best_of", "best_of 4 for each of 2 prompts makes 8"),
        (CHAT, {"messages": HI, "n": 7}, "n", "n 7 for each of 1 prompts makes 7"),
        (CHAT, {"messages": HI, "best_of": 7, "use_beam_search": True}, "best_of", "best_of 7 for each of 1"),
    ],
)
def test_o02_more_sequences_than_a_request_may_have(
    live: Live, path: str, body: dict[str, Any], param: str, said: str
) -> None:
    error = error_of(live.post(path, {"model": "lm", "max_tokens": 1, **body}), 400, param)
    assert said in error["message"]
    assert f"may ask for {MOST}" in error["message"]
    assert "--max-request-sequences" in error["message"]


@pytest.mark.parametrize(("prompts", "n"), [(6, 1), (2, 3), (1, 6)])
def test_o02_as_many_as_it_may(live: Live, prompts: int, n: int) -> None:
    asked = {"model": "lm", "prompt": ["a"] * prompts, "n": n, "max_tokens": 1}
    assert len(ok(live.post(COMPLETIONS, asked))["choices"]) == MOST


def test_o02_the_limit_has_a_default_and_a_range() -> None:
    assert ServerConfig().max_request_sequences == 2048
    with pytest.raises(ConfigError, match="--max-request-sequences must be at least 1, not 0"):
        ServerConfig(max_request_sequences=0)
