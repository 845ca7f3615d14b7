"""Two servers for all tests of the API in a session: tiny models of every kind, and engines that say what they read."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import tiny
from server.echo_engine import launch_echo
from server.harness import Live, serve_here
from tokenizers import AddedToken, Tokenizer

from anycore.config import ModelConfig

MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")
TOOLS = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\nCall tools as <tool_call>…</tool_call>:"
    "{% for tool in tools %}{{ tool.function.name }} {% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = TOOLS.replace("assistant\n{% endif", "assistant\n{% if enable_thinking is not false %}<think>\n{% else %}"
                       "<think>\n\n</think>\n\n{% endif %}{% endif")  # fmt: skip
SAID = "{{ bos_token }}{# <tool_call> <think> </think> #}{{ messages[-1].content }}"


def served(folder: Path, name: str, **settings: object) -> ModelConfig:
    given = {"backend": "cpu", "dtype": "float32", "kv_cache_memory": 8 << 20, **settings}
    return ModelConfig(model=str(folder), served_model_name=(name,), **given)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def api(
    t_lm: Path,
    t_bert: Path,
    t_xlmr: Path,
    t_qemb: Path,
    t_ce: Path,
    t_ce_xlmr: Path,
    t_qrr: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[httpx.Client]:
    """A client of a server that holds one model of each kind, by the names below."""
    with_defaults = tiny.tiny_lm(tmp_path_factory.mktemp("defaults"))
    (with_defaults / "generation_config.json").write_text(json.dumps({"temperature": 0.3, "top_k": 1}))
    models = (
        served(t_lm, "lm"),
        served(t_lm, "short", max_model_len=96),
        served(with_defaults, "lm-file"),
        served(with_defaults, "lm-none", generation_config="none"),
        served(with_defaults, "lm-flag", override_generation_config='{"top_k": 0, "temperature": 0, "max_tokens": 3}'),
        served(t_bert, "bert"),
        served(t_xlmr, "xlmr"),
        served(t_qemb, "qemb"),
        served(t_ce, "ce"),
        served(t_ce_xlmr, "ce-xlmr"),
        served(t_qrr, "qrr"),
        served(t_bert, "cosine", task="rerank"),
    )
    with serve_here(*models) as live, live.client() as client:
        yield client


@pytest.fixture(scope="session")
def echo(t_lm: Path, t_bert: Path) -> Iterator[Live]:
    """A server whose engines say their prompt: `say` generates, `vector` embeds."""
    with serve_here(served(t_lm, "say"), served(t_bert, "vector"), launch=launch_echo) as live:
        yield live


def with_marks(folder: Path) -> Path:
    """A model whose tokenizer has the marks as tokens, which are not special, as Qwen's are."""
    tiny.tiny_lm(folder, chat_template=THINKS, vocab_size=456)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def tools_api(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """`calls` calls tools; `thinks` reasons too, and has tokens for the marks."""
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TOOLS)
    marks = with_marks(tmp_path_factory.mktemp("marks"))
    models = served(t_lm, "calls", chat_template=str(template)), served(marks, "thinks")
    with serve_here(*models) as live, live.client() as client:
        yield client


@pytest.fixture(scope="session")
def tools_echo(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A model that says the last message."""
    template = tmp_path_factory.mktemp("said") / "said.jinja"
    template.write_text(SAID)
    model = served(t_lm, "say", chat_template=str(template))
    with serve_here(model, launch=launch_echo) as live, live.client() as client:
        yield client
