"""Embedding, rerank and classification in the shapes of other servers: the figures are those of our own routes."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import huggingface_hub
import numpy as np
import pytest
import tiny
import torch
from server.answers import error_of, ok
from server.conftest import served
from server.harness import serve_here
from transformers import AutoModelForSequenceClassification, AutoTokenizer, TextClassificationPipeline

TEXTS = ["The quick brown fox", "What is the capital of France?"]
PROMPTS = {"query": "yes no ", "search_document": "the river ", "clustering": "token "}
LONG = "yes no " * 600


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two labels, with names."""
    folder = tiny.tiny_cross_encoder(tmp_path_factory.mktemp("classes"), labels=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "id2label": {"0": "bad", "1": "good"}}))
    return folder


@pytest.fixture(scope="module")
def tags(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five labels that do not exclude one another; what sentence-transformers says of scores is not of them."""
    folder = tiny.tiny_cross_encoder(tmp_path_factory.mktemp("tags"), "xlmr", labels=5)
    config = json.loads((folder / "config.json").read_text())
    more = {
        "problem_type": "multi_label_classification",
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"},
    }
    (folder / "config.json").write_text(json.dumps({**config, **more}))
    return folder


@pytest.fixture(scope="module")
def shapes(classifier: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """`prompted`, an embedder with prompts, and `classes`, the classifier."""
    prompted = tiny.tiny_bert(tmp_path_factory.mktemp("prompted"), prompts=PROMPTS)
    with serve_here(served(prompted, "prompted"), served(classifier, "classes")) as live, live.client() as client:
        yield client


@pytest.fixture(scope="module")
def tagged(tags: Path) -> Iterator[httpx.Client]:
    with serve_here(served(tags, "tags")) as live, live.client() as client:
        yield client


def ours(api: httpx.Client, model: str, texts: list[str], **body: Any) -> list[Any]:
    data = ok(api.post("/v1/embeddings", json={"model": model, "input": texts, **body}))["data"]
    return [entry["embedding"] for entry in data]


def cohere(api: httpx.Client, **body: Any) -> Any:
    return ok(api.post("/v2/embed", json={"model": "bert", **body}))


# --- /v2/embed ------------------------------------------------------------------------------------------------------


def test_vectors_by_type(api: httpx.Client) -> None:
    expected = np.array(ours(api, "bert", TEXTS), dtype=np.float32)
    answer = cohere(api, texts=TEXTS, embedding_types=["float", "base64", "binary", "ubinary"])
    assert set(answer) == {"id", "response_type", "embeddings", "texts", "meta"}
    assert answer["texts"] == TEXTS
    assert answer["meta"]["api_version"] == {"version": "2"}
    by_type = answer["embeddings"]
    assert np.array(by_type["float"], dtype=np.float32) == pytest.approx(expected, abs=1e-6)
    for i, vector in enumerate(expected):
        assert np.frombuffer(base64.b64decode(by_type["base64"][i]), "<f4") == pytest.approx(vector, abs=1e-6)
        bits = [int(value > 0) for value in vector]
        whole = [int("".join(map(str, bits[at : at + 8])), 2) for at in range(0, len(bits), 8)]
        assert by_type["ubinary"][i] == whole
        assert by_type["binary"][i] == [byte - 128 for byte in whole]


def test_only_the_types_that_are_asked_for(api: httpx.Client) -> None:
    assert set(cohere(api, texts=TEXTS)["embeddings"]) == {"float"}
    assert set(cohere(api, texts=TEXTS, embedding_types=["ubinary"])["embeddings"]) == {"ubinary"}
    cut = cohere(api, texts=TEXTS, output_dimension=16)["embeddings"]["float"]
    assert cut == ours(api, "bert", TEXTS, dimensions=16)


def test_the_first_version_gives_a_list_unless_types_are_asked_for(api: httpx.Client) -> None:
    answer = ok(api.post("/v1/embed", json={"model": "bert", "texts": TEXTS}))
    assert answer["response_type"] == "embeddings_floats"
    assert answer["embeddings"] == ours(api, "bert", TEXTS)
    typed = ok(api.post("/v1/embed", json={"model": "bert", "texts": TEXTS, "embedding_types": ["ubinary"]}))
    assert typed["response_type"] == "embeddings_by_type"
    assert typed["embeddings"] == cohere(api, texts=TEXTS, embedding_types=["ubinary"])["embeddings"]
    assert typed["meta"]["api_version"] == {"version": "1"}


def test_inputs_of_one_part_are_texts(api: httpx.Client) -> None:
    inputs = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
    plain = cohere(api, texts=TEXTS)
    assert cohere(api, inputs=inputs)["embeddings"] == plain["embeddings"]
    used = ok(api.post("/v1/embeddings", json={"model": "bert", "input": TEXTS}))["usage"]
    assert plain["meta"]["billed_units"] == {"input_tokens": used["prompt_tokens"]}


@pytest.mark.parametrize(
    ("kind", "prompt"),
    [
        ("search_query", "query"),
        ("search_document", "search_document"),
        ("clustering", "clustering"),
        ("classification", None),
        ("query", "query"),
        (None, None),
    ],
)
def test_input_types_are_the_models_prompts(shapes: httpx.Client, kind: str | None, prompt: str | None) -> None:
    got = cohere(shapes, model="prompted", texts=TEXTS, input_type=kind)["embeddings"]["float"]
    assert got == ours(shapes, "prompted", TEXTS, prompt_name=prompt)
    assert (got == ours(shapes, "prompted", TEXTS)) == (prompt is None)


def test_e11_texts_are_cut_unless_they_may_not_be(api: httpx.Client) -> None:
    for side, ending in (("END", "right"), ("start", "left")):
        got = cohere(api, texts=[LONG], truncate=side)["embeddings"]["float"]
        assert got == ours(api, "bert", [LONG], truncate=True, truncation_side=ending)
    assert cohere(api, texts=[LONG])["embeddings"] == cohere(api, texts=[LONG], truncate="END")["embeddings"]
    eight = ours(api, "bert", [LONG], truncate_prompt_tokens=8)
    assert cohere(api, texts=[LONG], max_tokens=8)["embeddings"]["float"] == eight
    assert cohere(api, texts=[LONG], max_tokens=10**6)["embeddings"] == cohere(api, texts=[LONG])["embeddings"]
    error_of(api.post("/v2/embed", json={"model": "bert", "texts": [LONG], "truncate": "NONE"}), 400, "texts")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "texts"),
        ({"texts": ["a"], "inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", ""]}, "texts[1]"),
        ({"texts": ["a"] * 2049}, "texts"),
        ({"texts": [[5, 6]]}, "texts[0]"),
        ({"texts": ["a"], "images": ["data:image/png;base64,AA=="]}, "images"),
        ({"inputs": [{"content": [{"type": "image_url", "text": "a"}]}]}, "inputs[0].content[0].type"),
        ({"texts": ["a"], "embedding_types": ["int8"]}, "embedding_types[0]"),
        ({"texts": ["a"], "embedding_types": []}, "embedding_types"),
        ({"texts": ["a"], "truncate": "MIDDLE"}, "truncate"),
        ({"texts": ["a"], "input_type": "poem"}, "input_type"),
        ({"texts": ["a"], "output_dimension": 10**4}, "output_dimension"),
        ({"texts": ["a"], "dimensions": 8}, "dimensions"),
        ({"texts": ["a"], "max_tokens": 5, "truncate": "NONE"}, "max_tokens"),
        ({"texts": ["a"], "max_tokens": 5, "truncate_prompt_tokens": 5}, "max_tokens"),
    ],
)
def test_e10_what_cannot_be_embedded_is_named(api: httpx.Client, body: dict[str, Any], param: str) -> None:
    error_of(api.post("/v2/embed", json={"model": "bert", **body}), 400, param)


# --- /embed and /rerank of text-embeddings-inference ----------------------------------------------------------------


def test_a_bare_list_of_vectors(api: httpx.Client) -> None:
    for inputs, texts in ((TEXTS, TEXTS), (TEXTS[0], TEXTS[:1])):
        assert ok(api.post("/embed", json={"model": "bert", "inputs": inputs})) == ours(api, "bert", texts)
    ids = ok(api.post("/embed", json={"model": "bert", "inputs": [[5, 6], [7]]}))
    assert len(ids) == 2
    (raw,) = ok(api.post("/embed", json={"model": "bert", "inputs": "a", "normalize": False, "dimensions": 16}))
    assert [raw] == ours(api, "bert", ["a"], normalize=False, dimensions=16)


def test_e11_directions(api: httpx.Client) -> None:
    body = {"model": "bert", "inputs": LONG}
    error_of(api.post("/embed", json=body), 400, "inputs")
    for direction in ("Left", "right"):
        got = ok(api.post("/embed", json={**body, "truncate": True, "truncation_direction": direction}))
        assert got == ours(api, "bert", [LONG], truncate=True, truncation_side=direction.lower())
    crossed = {**body, "truncate": "START", "truncation_direction": "Right"}
    error_of(api.post("/embed", json=crossed), 400, "truncation_direction")


def test_cosines_with_one_text(api: httpx.Client) -> None:
    inputs = {"source_sentence": "yes", "sentences": [*TEXTS, "yes"]}
    found = ok(api.post("/similarity", json={"model": "bert", "inputs": inputs}))
    source, *others = np.array(ours(api, "bert", ["yes", *TEXTS, "yes"]))
    assert found == pytest.approx([float(source @ other) for other in others], abs=1e-6)
    assert found[2] == pytest.approx(1, abs=1e-6)
    for wrong, param in (({**inputs, "sentences": []}, "inputs.sentences"), (["a"], "inputs")):
        error_of(api.post("/similarity", json={"model": "bert", "inputs": wrong}), 400, param)
    inputs["sentences"].append(LONG)
    error_of(api.post("/similarity", json={"model": "bert", "inputs": inputs}), 400, "inputs.sentences[3]")


def test_the_only_model_needs_no_name(shapes: httpx.Client) -> None:
    assert len(ok(shapes.post("/embed", json={"inputs": TEXTS}))) == 2
    assert len(ok(shapes.post("/rerank", json={"query": "a", "texts": TEXTS}))) == 2


def test_r_hugging_face_s_client(shapes: httpx.Client) -> None:
    client = huggingface_hub.InferenceClient(model=f"{shapes.base_url}/embed")
    (expected,) = ours(shapes, "prompted", [TEXTS[0]], prompt_name="query")
    found = client.feature_extraction(TEXTS[0], prompt_name="query", normalize=True)
    assert found[0] == pytest.approx(np.array(expected), abs=1e-6)
    cut = client.feature_extraction(LONG, truncate=True, truncation_direction="left")
    assert cut.tolist() == ours(shapes, "prompted", [LONG], truncate="START")


@pytest.mark.parametrize("raw", [False, True])
def test_e12_texts_give_a_bare_list(api: httpx.Client, raw: bool) -> None:
    body = {"model": "ce", "query": "yes", "raw_scores": raw}
    results = ok(api.post("/v1/rerank", json={**body, "documents": TEXTS}))["results"]
    got = ok(api.post("/rerank", json={**body, "texts": TEXTS, "return_text": True}))
    assert [(each["index"], each["score"]) for each in got] == [(r["index"], r["relevance_score"]) for r in results]
    assert [each["text"] for each in got] == [TEXTS[each["index"]] for each in got]
    assert set(ok(api.post("/rerank", json={**body, "texts": TEXTS}))[0]) == {"index", "score"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "documents"),
        ({"texts": TEXTS, "documents": TEXTS}, "documents"),
        ({"texts": []}, "texts"),
        ({"texts": ["a", 5]}, "texts[1]"),
        ({"texts": ["a", LONG]}, "texts[1]"),
        ({"texts": TEXTS, "return_documents": True}, "return_documents"),
        ({"documents": TEXTS, "return_text": True}, "return_text"),
    ],
)
def test_e12_texts_or_documents(api: httpx.Client, body: dict[str, Any], param: str) -> None:
    error_of(api.post("/rerank", json={"model": "ce", "query": "yes", **body}), 400, param)


# --- /classify ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_labels_and_their_probabilities(shapes: httpx.Client, classifier: Path, path: str) -> None:
    answer = ok(shapes.post(path, json={"model": "classes", "input": TEXTS}))
    tokenizer = AutoTokenizer.from_pretrained(classifier)
    reference = AutoModelForSequenceClassification.from_pretrained(classifier, attn_implementation="eager").eval()
    with torch.no_grad():
        logits = [reference(**tokenizer(text, return_tensors="pt")).logits[0] for text in TEXTS]
    for i, entry in enumerate(answer["data"]):
        probs = logits[i].softmax(-1)
        assert entry["index"] == i
        assert entry["probs"] == pytest.approx(probs.tolist(), abs=1e-5)
        assert entry["label"] == ("bad", "good")[int(probs.argmax())]
        assert entry["num_classes"] == 2
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    raw = ok(shapes.post(path, json={"model": "classes", "input": TEXTS, "use_activation": False}))["data"]
    assert [entry["probs"] for entry in raw] == [pytest.approx(each.tolist(), abs=1e-5) for each in logits]


@pytest.mark.parametrize("path", ["/classify", "/predict"])
def test_as_many_labels_as_there_are(tagged: httpx.Client, tags: Path, path: str) -> None:
    pipe = TextClassificationPipeline(
        model=AutoModelForSequenceClassification.from_pretrained(tags, attn_implementation="eager").eval(),
        tokenizer=AutoTokenizer.from_pretrained(tags),
    )
    expected = {each["label"]: each["score"] for each in pipe(TEXTS[0], top_k=None)}
    if path == "/predict":
        answer = ok(tagged.post(path, json={"model": "tags", "inputs": TEXTS[0]}))
        assert [each["score"] for each in answer] == sorted((each["score"] for each in answer), reverse=True)
        assert {each["label"]: each["score"] for each in answer} == pytest.approx(expected, abs=1e-5)
        return
    (entry,) = ok(tagged.post(path, json={"model": "tags", "input": TEXTS[0]}))["data"]
    assert entry["num_classes"] == 5
    assert entry["probs"] == pytest.approx([expected[f"LABEL_{i}"] for i in range(5)], abs=1e-5)
    assert entry["label"] == max(expected, key=lambda label: expected[label])


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/score"])
def test_h07_many_labels_are_no_score(tagged: httpx.Client, path: str) -> None:
    body = {"query": "a", "documents": ["b"]} if path.endswith("rerank") else {"text_1": "a", "text_2": "b"}
    error = error_of(tagged.post(path, json={"model": "tags", **body}), 400, "model", "task_not_supported")
    assert "5 labels" in error["message"]


def test_a_score_is_one_label(api: httpx.Client) -> None:
    (entry,) = ok(api.post("/classify", json={"model": "ce", "input": "yes"}))["data"]
    assert (entry["label"], entry["num_classes"], len(entry["probs"])) == ("LABEL_0", 1, 1)


def test_h07_what_has_no_labels(api: httpx.Client) -> None:
    for model in ("lm", "bert", "qrr", "cosine"):
        error_of(api.post("/classify", json={"model": model, "input": "a"}), 400, "model", "task_not_supported")
    error_of(api.post("/classify", json={"model": "ce", "input": ["a", ""]}), 400, "input[1]")
    error_of(api.post("/classify", json={"model": "ce", "input": LONG}), 400, "input")


def test_predictions_are_sorted_and_pairs_are_one_input(shapes: httpx.Client) -> None:
    def predict(inputs: Any, **more: Any) -> Any:
        return ok(shapes.post("/predict", json={"model": "classes", "inputs": inputs, **more}))

    first, second = ok(shapes.post("/classify", json={"model": "classes", "input": TEXTS}))["data"]
    alone = predict(TEXTS[0])
    assert [each["score"] for each in alone] == sorted(first["probs"], reverse=True)
    assert alone[0]["label"] == first["label"]
    assert {each["label"] for each in alone} == {"bad", "good"}
    pair = predict(TEXTS)
    (score,) = ok(shapes.post("/v1/score", json={"model": "classes", "text_1": TEXTS[0], "text_2": TEXTS[1]}))["data"]
    assert {each["label"]: each["score"] for each in pair}["good"] == pytest.approx(score["score"], abs=1e-6)
    batch = predict([TEXTS[:1], TEXTS, [TEXTS[1]]])
    assert [len(each) for each in batch] == [2, 2, 2]
    scores = [each["score"] for found in (alone, pair) for each in found]
    assert [each["score"] for found in batch[:2] for each in found] == pytest.approx(scores, abs=1e-6)
    assert batch[2][0]["label"] == second["label"]
    assert sum(each["score"] for each in predict("a", raw_scores=True)) != pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize(
    ("inputs", "param"),
    [
        ([], "inputs"),
        ("", "inputs"),
        (["a", "b", "c"], "inputs"),
        ([["a"], "b"], "inputs[1]"),
        ([["a"], ["b", ""]], "inputs[1]"),
        ([["a"], []], "inputs[1]"),
        ([["a"], [LONG]], "inputs[1]"),
        ([["a"]] * 2049, "inputs"),
        ({"a": 1}, "inputs"),
        (5, "inputs"),
    ],
)
def test_e10_what_cannot_be_predicted_is_named(api: httpx.Client, inputs: Any, param: str) -> None:
    error_of(api.post("/predict", json={"model": "ce", "inputs": inputs}), 400, param)


# --- /load ----------------------------------------------------------------------------------------------------------


def test_load_of_an_idle_server(shapes: httpx.Client) -> None:
    idle = {"requests": 0, "running": 0, "waiting": 0}
    assert ok(shapes.get("/load")) == {
        "server_load": 0,
        "models": [{"id": "prompted", **idle}, {"id": "classes", **idle}],
    }
