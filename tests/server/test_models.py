"""Which model a request means: names, aliases, tasks; and what /v1/models and /v1/capabilities say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from server.harness import Live, serve_here

from anycore.config import ModelConfig


@pytest.fixture(scope="module")
def live(t_lm: Path, t_bert: Path, t_ce: Path) -> Iterator[Live]:
    models = (
        ModelConfig(model=str(t_lm), served_model_name=("org/lm.v1", "alias"), kv_cache_memory=1 << 20),
        ModelConfig(model=str(t_bert), served_model_name=("bert",)),
        ModelConfig(model=str(t_ce), served_model_name=("ce",)),
    )
    with serve_here(*models) as live:
        yield live


def test_o09_names_and_aliases_work_and_are_echoed(live: Live) -> None:
    for name in ("org/lm.v1", "alias"):
        answer = live.post("/v1/completions", {"model": name, "prompt": "a", "max_tokens": 1})
        assert answer.status_code == 200
        assert answer.json()["model"] == name
    unnamed = live.post("/v1/completions", {"prompt": "a", "max_tokens": 1})  # only one model generates
    assert (unnamed.status_code, unnamed.json()["model"]) == (200, "org/lm.v1")


@pytest.mark.parametrize(
    "name", ["wrong", "", "ALIAS", "alias/", "lm.v1", "x" * 10_000, "../x", "/etc/passwd", "alias\n", "pkg:x"]
)
def test_o09_other_names_are_not_found(live: Live, name: str) -> None:
    answer = live.post("/v1/completions", {"model": name, "prompt": "a"})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "org/lm.v1, alias, bert, ce" in error["message"]
    assert len(error["message"]) < 500


def test_o09_the_folder_is_no_name(live: Live, t_lm: Path) -> None:
    assert live.post("/v1/completions", {"model": str(t_lm), "prompt": "a"}).status_code == 404


def test_models_are_listed_with_what_they_can(live: Live) -> None:
    body = live.get("/v1/models").json()
    assert body["object"] == "list"
    entries = {entry["id"]: entry for entry in body["data"]}
    assert list(entries) == ["org/lm.v1", "alias", "bert", "ce"]
    assert {name: entry["tasks"] for name, entry in entries.items()} == {
        "org/lm.v1": ["generate"],
        "alias": ["generate"],
        "bert": ["embed"],
        "ce": ["rerank"],
    }
    for entry in entries.values():
        assert entry["object"] == "model"
        assert entry["owned_by"] == "anycore"
        assert entry["created"] > 1_600_000_000
        assert entry["phase"] == "ready"
        assert entry["backend"] == "cpu"
        assert entry["level"] in ("native", "reference")
        assert entry["max_model_len"] > 0
        assert entry["dtype"] == "float32"
        assert entry["row"]
        assert entry["evidence"].startswith(("declared", "proven", "stale", "refuted"))
        assert entry["settings"]["dtype"] == {
            "name": "dtype", "value": "float32", "by": "model", "why": "", "adjusted": False, "guessed": False,
        }  # fmt: skip
    assert entries["alias"]["root"] == "org/lm.v1"
    assert entries["alias"]["sampling_defaults"] == {}
    assert entries["bert"]["pooling"]
    assert entries["bert"]["dimensions"] > 0


def test_one_model_is_shown_by_its_name(live: Live) -> None:
    listed = live.get("/v1/models").json()["data"]
    for entry in listed:
        one = live.get("/v1/models/" + entry["id"]).json()
        assert one.pop("seconds") >= entry.pop("seconds")  # in this phase: it went on between the two requests
        assert one == entry
    answer = live.get("/v1/models/wrong")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


CASES = [
    ("/v1/embeddings", {"input": "a"}, "alias", "bert"),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}, "alias", "ce"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, "bert", "org/lm.v1"),
    ("/v1/completions", {"prompt": "a"}, "bert", "org/lm.v1"),
    ("/v1/embeddings", {"input": "a"}, "ce", "bert"),
]


@pytest.mark.parametrize(("path", "body", "model", "other"), CASES)
def test_h07_a_model_of_another_task(live: Live, path: str, body: dict[str, object], model: str, other: str) -> None:
    answer = live.post(path, {"model": model, **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "task_not_supported", "model")
    served = {"alias": "generate", "bert": "embed", "ce": "rerank"}[model]
    assert f"served for {served}" in error["message"]
    assert other in error["message"]
    assert "--task" in error["message"]
    assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_capabilities_are_those_of_the_backends_found(live: Live) -> None:
    body = live.get("/v1/capabilities").json()
    cpu = {entry["name"]: entry for entry in body["backends"]}["cpu"]
    assert cpu["available"]
    assert cpu["probe"]["devices"]
    assert {"generate", "embed", "rerank"} <= {task for row in cpu["support"] for task in row["tasks"]}
    assert isinstance(body["failures"], list)


def test_h08_a_served_model_is_asked_about_as_on_the_command_line(live: Live) -> None:
    found = live.get("/v1/capabilities?model=bert&backend=ascend&chip=910B&task=rerank").json()["check"]
    assert found["supported"] is True
    assert found["answers"][0]["row"]["attention"] == "bidirectional"
    found = live.get("/v1/capabilities?model=ce&task=embed").json()["check"]
    assert found["supported"] is False
    told = live.post("/v1/embeddings", {"model": "ce", "input": "a"}).json()["error"]["message"]
    for answer in found["answers"]:
        assert answer["reasons"][0][1] in told  # the same sentence
        assert answer["alternatives"][0]["changes"] == ["--task rerank"]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("model=/etc/passwd", 404, "there is no model '/etc/passwd' here"),
        ("model=bert&features=telepathy", 400, "there is no feature 'telepathy'"),
        ("model=bert&backend=cup", 400, "Did you mean cpu?"),
        ("model=bert&dtype=int3", 400, "--dtype must be one of"),
        ("model=bert&task=paint", 400, "task"),
    ],
)
def test_wrong_questions_are_answered_with_what_is_wrong(live: Live, query: str, status: int, words: str) -> None:
    answer = live.get(f"/v1/capabilities?{query}")
    assert answer.status_code == status
    assert words in answer.json()["error"]["message"]
