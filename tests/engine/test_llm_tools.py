"""Tools of `LLM.chat`: described ones are returned as calls, functions are run until the model answers."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from server.conftest import TOOLS
from tiny import tiny_lm

from anycore import LLM, FunctionTool, SamplingParams, ToolConfig
from anycore.errors import AnycoreError
from anycore.text.replies.message import Call, Reply
from anycore.toolbox import Turns, run

HI = [{"role": "user", "content": "Hi"}]


def weather(city: str, days: int = 1) -> dict[str, Any]:
    """Tell the weather.

    Args:
        city: where
        days: how far ahead
    """
    return {"city": city, "days": days, "sky": "grau"}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tiny_lm(tmp_path_factory.mktemp("lm"), chat_template=TOOLS)
    return LLM(str(folder), max_num_seqs=8, kv_cache_memory=2**22, threads=1)


def test_a_function_is_described_by_its_hints_and_docstring() -> None:
    tool = FunctionTool.of(weather)
    assert (tool.name, tool.description) == ("weather", "Tell the weather.")
    assert tool.parameters["properties"]["city"] == {"type": "string", "description": "where"}
    assert tool.parameters["required"] == ["city"]
    with pytest.raises(AnycoreError, match="docstring"):
        FunctionTool.of(lambda nothing: nothing)


def test_described_tools_are_returned_as_calls(llm: LLM) -> None:
    tool = FunctionTool.of(weather).shown
    tool["function"]["parameters"] = {
        "type": "object",
        "properties": {"city": {"enum": ["Bonn"]}},
        "required": ["city"],
    }
    output = llm.chat(HI, SamplingParams(max_tokens=100, temperature=0), tools=[tool], tool_choice="required")[0]
    assert output.reply is not None
    assert (output.reply.calls[0].name, json.loads(output.reply.calls[0].arguments)) == ("weather", {"city": "Bonn"})
    assert output.messages[0]["tool_calls"][0]["function"]["name"] == "weather"


def test_functions_are_run_until_the_model_answers(llm: LLM) -> None:
    """The first turn has to call; after as many calls as are allowed the model is shown no tools and answers."""
    seen: list[str] = []

    def note(word: str) -> str:
        """Note a word.

        Args:
            word: any (choices: ["a", "b"])
        """
        seen.append(word)
        return f"noted {word}"

    params = SamplingParams(max_tokens=100, temperature=1, seed=2)
    config = ToolConfig(max_tool_calls=1)
    outputs = llm.chat([HI, HI], params, tools=[note], tool_choice="required", tool_config=config)
    assert len(seen) == 2
    for output in outputs:
        roles = [message["role"] for message in output.messages]
        assert roles[0] == "assistant"
        assert roles[-1] == "assistant"
        assert "tool_calls" not in output.messages[-1]
        first = output.messages[0]["tool_calls"]
        results = [message for message in output.messages if message["role"] == "tool"]
        assert [result["tool_call_id"] for result in results] == [call["id"] for call in first]
        assert results[0]["content"].startswith("noted ")
        assert all(result["content"].startswith("error: not run") for result in results[1:])


def turns(function: Any, **limits: Any) -> Turns:
    return Turns({"f": FunctionTool("f", "", {}, function)}, ToolConfig(**limits))


def result_of(function: Any, arguments: str, name: str = "f", **limits: Any) -> str:
    state = turns(function, **limits)
    assert state.take(Reply(calls=[Call("1", name, arguments)]))
    return str(state.messages[-1]["content"])


def test_whatever_a_function_does_the_model_is_told() -> None:
    def fails(**_: Any) -> None:
        raise OSError("no route")

    def strange() -> Any:
        return {1: {2}}

    assert result_of(fails, "{}") == "error: OSError: no route"
    assert result_of(strange, "{}") == '{"1": "{2}"}'
    assert result_of(strange, '{"x": 1}').startswith("error: TypeError")
    assert result_of(strange, '{"x": ') == "error: the arguments are no JSON object"
    assert result_of(strange, "[1]") == "error: the arguments are no JSON object"
    assert result_of(strange, "{}", name="g") == "error: there is no tool 'g', only f"
    assert result_of(lambda: "x" * 2**17, "{}").endswith("(cut: it has 131072 characters)")


def test_a_function_that_hangs_is_left_to_itself() -> None:
    release = threading.Event()
    tool = FunctionTool("f", "", {}, lambda wait: release.wait(30) if wait else "quick")
    found = run({"f": tool}, [Call("1", "f", '{"wait": true}'), Call("2", "f", '{"wait": false}')], 0.2)
    release.set()
    assert found == ["error: no answer within 0.2 s", "quick"]


@pytest.mark.parametrize("limits", [{"max_tool_calls": -1}, {"tool_timeout": 0}, {"tool_timeout": float("nan")}])
def test_limits_out_of_range_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(AnycoreError, match=next(iter(limits))):
        ToolConfig(**limits)


def test_functions_and_descriptions_are_not_mixed(llm: LLM) -> None:
    with pytest.raises(AnycoreError, match="all functions"):
        llm.chat(HI, tools=[weather, FunctionTool.of(weather).shown])
