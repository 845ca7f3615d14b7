"""Rerank and score over HTTP: the contract of the answer, references for each kind of model, lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
import torch
from jinja2 import Environment
from server.answers import error_of, ok
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

QUERY = "What is the capital of France?"
PARIS = "Paris is the capital of France, and London is the capital of England."
DOCUMENTS = ["The quick brown fox", "", PARIS, PARIS]
LONG = "yes no " * 600
RERANKERS = ["ce", "ce-xlmr", "qrr", "cosine"]


def post(api: httpx.Client, model: str, path: str = "/v1/rerank", **body: Any) -> httpx.Response:
    return api.post(path, json={"model": model, "query": QUERY, "documents": DOCUMENTS, **body})


def scores(api: httpx.Client, model: str, documents: list[str], query: str = QUERY, **body: Any) -> list[float]:
    """Scores in the order of the documents."""
    results = ok(post(api, model, query=query, documents=documents, **body))["results"]
    return [result["relevance_score"] for result in sorted(results, key=lambda r: r["index"])]


# --- E12: the contract ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", RERANKERS)
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_e12_sorted_indexed_and_counted(api: httpx.Client, model: str, path: str) -> None:
    answer = ok(post(api, model, path))
    results = answer["results"]
    assert sorted(r["index"] for r in results) == [0, 1, 2, 3]
    order = [(-r["relevance_score"], r["index"]) for r in results]
    assert order == sorted(order)
    by_index = {r["index"]: r["relevance_score"] for r in results}
    assert by_index[2] == pytest.approx(by_index[3], abs=1e-6)
    assert all(set(r) == {"index", "relevance_score"} for r in results)
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
    assert ("meta" in answer) == (path == "/v2/rerank")


def test_e12_top_n(api: httpx.Client) -> None:
    full = ok(post(api, "ce"))["results"]
    assert ok(post(api, "ce", top_n=2))["results"] == full[:2]
    assert ok(post(api, "ce", top_n=9))["results"] == full
    assert ok(post(api, "ce", top_n=None))["results"] == full
    for wrong in (0, -1, "2", 1.5, True):
        error_of(post(api, "ce", top_n=wrong), 400, "top_n")


def test_e12_documents(api: httpx.Client) -> None:
    plain = ok(post(api, "ce", return_documents=True))["results"]
    assert all(r["document"] == {"text": DOCUMENTS[r["index"]]} for r in plain)
    objects = [{"text": text, "title": "x"} for text in DOCUMENTS]
    assert ok(post(api, "ce", documents=objects, return_documents=True))["results"] == plain
    for documents, param in (
        ([], "documents"),
        (["a", 5], "documents[1]"),
        ([{"title": "a"}], "documents[0]"),
        (["a", {"text": 5}], "documents[1]"),
        (5, "documents"),
        (["a"] * 2049, "documents"),
    ):
        error_of(post(api, "ce", documents=documents), 400, param)
    error_of(post(api, "ce", query=""), 400, "query")
    error_of(post(api, "ce", query=["a"]), 400, "query")


def test_e12_usage_counts_pairs(api: httpx.Client, t_ce: Path) -> None:
    reference = AutoTokenizer.from_pretrained(t_ce)
    count = sum(map(len, reference([QUERY] * 4, DOCUMENTS)["input_ids"]))  # lists, so that "" counts as a document
    assert ok(post(api, "ce"))["usage"]["prompt_tokens"] == count


# --- E06: cross-encoders --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "fixture"), [("ce", "t_ce"), ("ce-xlmr", "t_ce_xlmr")])
def test_e06_scores_are_those_of_hugging_face(
    api: httpx.Client, model: str, fixture: str, request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(fixture)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
    query, documents = "capital?", ["yes no", "", "The quick brown fox"]
    with torch.no_grad():
        logits = [float(reference(**tokenizer([query], [d], return_tensors="pt")).logits[0, 0]) for d in documents]
    assert scores(api, model, documents, query, raw_scores=True) == pytest.approx(logits, abs=1e-5)
    sigmoid = [1 / (1 + np.exp(-x)) for x in logits]
    assert scores(api, model, documents, query) == pytest.approx(sigmoid, abs=1e-5)


def test_e06_a_cut_document_keeps_segments_and_separators(api: httpx.Client, t_ce: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(t_ce)
    reference = AutoModelForSequenceClassification.from_pretrained(t_ce, attn_implementation="eager").eval()
    ids = tokenizer("capital", LONG)
    head = ids["token_type_ids"].index(1)
    for side in ("right", "left"):
        kept = ids["input_ids"][head : head + 63 - head] if side == "right" else ids["input_ids"][-(64 - head) : -1]
        tokens = torch.tensor([[*ids["input_ids"][:head], *kept, tokenizer.sep_token_id]])
        types = torch.tensor([[0] * head + [1] * (64 - head)])
        with torch.no_grad():
            expected = float(reference(input_ids=tokens, token_type_ids=types).logits[0, 0])
        got = scores(api, "ce", [LONG], "capital", raw_scores=True, truncate_prompt_tokens=64, truncation_side=side)
        assert got == pytest.approx([expected], abs=1e-5)


# --- E03: yes/no rerankers ------------------------------------------------------------------------------------------


def templated(query: str, document: str, instruction: str | None = None) -> str:
    messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    if instruction is not None:
        messages.insert(0, {"role": "system", "content": instruction})
    return Environment().from_string(tiny.RERANK_TEMPLATE).render(messages=messages)


def test_e03_scores_are_sigmoid_of_yes_minus_no(api: httpx.Client, t_qrr: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(t_qrr)
    reference = AutoModelForCausalLM.from_pretrained(t_qrr, attn_implementation="eager").eval()
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])

    def expected(instruction: str | None) -> list[float]:
        found = []
        for document in DOCUMENTS:
            ids = tokenizer(templated(QUERY, document, instruction), add_special_tokens=False, return_tensors="pt")
            with torch.no_grad():
                logits = reference(ids["input_ids"]).logits[0, -1]
            found.append(float(torch.sigmoid(logits[yes] - logits[no])))
        return found

    assert scores(api, "qrr", DOCUMENTS) == pytest.approx(expected(None), abs=1e-4)
    instruction = "Judge whether the text is about numbers"
    told = scores(api, "qrr", DOCUMENTS, instruction=instruction)
    assert told == pytest.approx(expected(instruction), abs=1e-4)
    assert told != pytest.approx(scores(api, "qrr", DOCUMENTS), abs=1e-4)


def test_e03_text_already_templated(api: httpx.Client) -> None:
    plain = scores(api, "qrr", [PARIS])
    text = templated(QUERY, PARIS)
    cut = text.index(PARIS)
    ready = scores(api, "qrr", [text[cut:]], text[:cut], apply_template=False)
    assert ready == pytest.approx(plain, abs=1e-6)
    assert scores(api, "qrr", [PARIS], raw_scores=True) == pytest.approx([np.log(plain[0] / (1 - plain[0]))], abs=1e-3)


def test_instructions_only_where_they_mean_something(api: httpx.Client) -> None:
    for model in ("ce", "cosine"):
        error_of(post(api, model, instruction="x"), 400, "instruction")
    error_of(post(api, "cosine", apply_template=False), 400, "apply_template")


# --- bi-encoders ----------------------------------------------------------------------------------------------------


def test_cosine_is_that_of_the_embeddings(api: httpx.Client) -> None:
    data = ok(api.post("/v1/embeddings", json={"model": "bert", "input": [QUERY, DOCUMENTS[0], PARIS]}))["data"]
    query, *documents = [np.array(entry["embedding"]) for entry in data]
    got = scores(api, "cosine", [DOCUMENTS[0], PARIS])
    assert got == pytest.approx([float(query @ document) for document in documents], abs=1e-6)


# --- E04, E11 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", RERANKERS)
def test_e04_company_changes_nothing(api: httpx.Client, model: str) -> None:
    documents = ["yes no " * i for i in range(12)] + [PARIS]
    together = scores(api, model, documents)
    assert scores(api, model, documents[::-1])[::-1] == pytest.approx(together, abs=1e-5)
    assert scores(api, model, [PARIS]) == pytest.approx(together[-1:], abs=1e-5)


@pytest.mark.parametrize("model", RERANKERS)
@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/score"])
def test_e11_too_long(api: httpx.Client, model: str, path: str) -> None:
    sides = {"query": "capital", "text_1": "capital"}
    body = {"model": model, "documents": ["yes", LONG], "text_2": ["yes", LONG]}
    name = "documents[1]" if path == "/v1/rerank" else "text_2[1]"
    keep = ("query", "documents") if path == "/v1/rerank" else ("text_1", "text_2")
    body = {key: value for key, value in {**body, **sides}.items() if key in (*keep, "model")}
    error_of(api.post(path, json=body), 400, name, "context_length_exceeded")
    answer = ok(api.post(path, json={**body, "truncate": True}))
    assert answer["usage"]["truncated"] == 1
    short = ok(api.post(path, json={**body, "max_tokens_per_doc": 20}))
    assert short["usage"]["truncated"] == 1
    assert short["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


def test_e11_the_query_is_never_cut(api: httpx.Client) -> None:
    for model in RERANKERS:
        for cut in ({"truncate": True}, {}) if model != "cosine" else ({},):  # whose texts stand alone
            error_of(post(api, model, query=LONG, **cut), 400, "query", "context_length_exceeded")
    score = {"model": "ce", "text_1": ["capital", LONG], "text_2": ["yes", "no"]}
    error_of(api.post("/v1/score", json=score), 400, "text_1[1]", "context_length_exceeded")


# --- score ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", RERANKERS)
def test_score_one_to_many_and_pairwise(api: httpx.Client, model: str) -> None:
    def score(**body: Any) -> list[float]:
        data = ok(api.post("/score", json={"model": model, **body}))["data"]
        assert [entry["index"] for entry in data] == list(range(len(data)))
        return [entry["score"] for entry in data]

    expected = scores(api, model, DOCUMENTS)
    assert score(text_1=QUERY, text_2=DOCUMENTS) == pytest.approx(expected, abs=1e-6)
    assert score(queries=[QUERY], documents=DOCUMENTS) == pytest.approx(expected, abs=1e-6)
    assert score(text_1=[QUERY] * 4, text_2=DOCUMENTS) == pytest.approx(expected, abs=1e-6)
    assert score(text_1=QUERY, text_2=DOCUMENTS[0]) == pytest.approx(expected[:1], abs=1e-6)
    pairs = score(text_1=["yes", QUERY], text_2=["no", PARIS])
    assert pairs[1] == pytest.approx(expected[2], abs=1e-5)


def test_score_forms_that_are_wrong(api: httpx.Client) -> None:
    for body, param in (
        ({"text_1": "a"}, "text_2"),
        ({"text_2": "a"}, "text_1"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        ({"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        ({"text_1": "a", "text_2": []}, "text_2"),
        ({"text_1": 5, "text_2": "a"}, "text_1"),
        ({"queries": ["a", "b"], "documents": ["c"]}, "queries"),
    ):
        error_of(api.post("/v1/score", json={"model": "ce", **body}), 400, param)


def test_h07_a_model_of_another_task(api: httpx.Client) -> None:
    for model in ("lm", "bert"):
        error_of(post(api, model), 400, "model", "task_not_supported")
