"""Tools that the server runs itself, for requests that ask for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from installed import install
from server.answers import error_of, ok
from server.conftest import TOOLS, served
from server.harness import serve_here

PLUGIN = """
from anycore import FunctionTool, hookimpl

WORD = {"type": "object", "properties": {"word": {"enum": ["a", "b"]}}, "required": ["word"]}

@hookimpl
def register_tools():
    return [
        FunctionTool("note", "Note a word.", WORD, lambda word: "noted " + word),
        FunctionTool("hidden", "Not for everyone.", {}, lambda: "secret"),
    ]
"""
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def api(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    site = tmp_path_factory.mktemp("site")
    install(site, "notes", "1.0", "notes", "notes_plugin", PLUGIN)
    template = site / "tools.jinja"
    template.write_text(TOOLS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        model = served(t_lm, "calls", chat_template=str(template))
        with serve_here(model, run_tools=("note",)) as live, live.client() as client:
            yield client


def chat(api: httpx.Client, **more: Any) -> httpx.Response:
    body = {"model": "calls", "messages": HI, "max_tokens": 90, "temperature": 1, "seed": 4, **more}
    return api.post("/v1/chat/completions", json=body)


def test_tools_are_run_until_the_model_answers(api: httpx.Client) -> None:
    """The first turn has to call; after one call the model is shown no tools."""
    got = ok(chat(api, tool_config={"max_tool_calls": 1}, tool_choice="required", parallel_tool_calls=False))
    roles = [message["role"] for message in got["messages"]]
    assert roles == ["assistant", "tool", "assistant"]
    assert got["messages"][1]["content"] in ("noted a", "noted b")
    assert got["messages"][1]["tool_call_id"] == got["messages"][0]["tool_calls"][0]["id"]
    (choice,) = got["choices"]
    assert choice["message"]["content"] == got["messages"][2]["content"]
    assert "tool_calls" not in choice["message"]
    assert got["usage"]["completion_tokens"] > 90 / 2
    assert got["usage"]["prompt_tokens"] > 2 * len("Hi")


WRONG = [
    ({"tool_config": {}, "stream": True}, "stream"),
    ({"tool_config": {}, "n": 2}, "n"),
    ({"tool_config": {}, "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    ({"tool_config": {"tools": ["hidden"]}}, "tool_config"),
    ({"tool_config": {"max_tool_calls": -1}}, "tool_config.max_tool_calls"),
    ({"tool_config": {"tool_timeout": 0}}, "tool_config.tool_timeout"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_go_with_it_is_refused(api: httpx.Client, fields: Any, param: str) -> None:
    error_of(chat(api, **fields), 400, param)


def test_a_server_runs_no_tools_unless_told_to(tools_api: httpx.Client) -> None:
    error_of(chat(tools_api, tool_config={}), 400, "tool_config", "unsupported")


def test_a_tool_that_no_plugin_brings_ends_the_start(t_lm: Path) -> None:
    assert "ANYCORE_PLUGINS" not in os.environ
    with pytest.raises(Exception, match="no plugin brings a tool"), serve_here(served(t_lm, "lm"), run_tools=("no",)):
        pass
