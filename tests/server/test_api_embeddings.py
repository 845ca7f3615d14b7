"""/v1/embeddings over HTTP: pooling, references, forms of input, encodings, lengths, batches, numbers that are none."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from server.answers import error_of, ok
from server.conftest import served
from server.harness import Live, serve_here
from transformers import AutoModel, AutoTokenizer

TEXT = "The quick brown fox jumps over the lazy dog near the river bank."
LONG = "yes no " * 200


def post(api: httpx.Client, model: str, given: Any, **body: Any) -> httpx.Response:
    return api.post("/v1/embeddings", json={"model": model, "input": given, **body})


def vectors(api: httpx.Client, model: str, given: Any, **body: Any) -> np.ndarray[Any, Any]:
    data = ok(post(api, model, given, **body))["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return np.array([entry["embedding"] for entry in data], dtype=np.float64)


def hidden(folder: Path, text: str) -> torch.Tensor:
    """Hugging Face's last hidden states of one text [tokens, width]."""
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    with torch.no_grad():
        states: torch.Tensor = (
            AutoModel.from_pretrained(folder, attn_implementation="eager").eval()(**ids).last_hidden_state
        )
    return states[0]


def unit(vector: torch.Tensor) -> np.ndarray[Any, Any]:
    return (vector / vector.norm()).double().numpy()


# --- E01, E02, E04: the right vectors, whatever the company ---------------------------------------------------------


def test_e01_pooling_is_the_models_own(tmp_path: Path) -> None:
    ways = {"cls": lambda h: h[0], "mean": lambda h: h.mean(0), "max": lambda h: h.amax(0), "last": lambda h: h[-1]}
    folders = {kind: tiny.tiny_bert(tmp_path / kind, kind, "new" if kind == "mean" else "old") for kind in ways}
    folders["none"] = tiny.tiny_bert(tmp_path / "none", layout=None)
    with serve_here(*(served(folder, name) for name, folder in folders.items())) as live, live.client() as api:
        for kind, way in ways.items():
            got = vectors(api, kind, [TEXT, "yes"])
            assert np.abs(got[0] - unit(way(hidden(folders[kind], TEXT)))).max() <= 1e-5
        card = ok(api.get("/v1/models/none"))
        assert card["pooling"] in ways
        assert card["pooling_source"] == "default"
        assert np.abs(vectors(api, "none", TEXT)[0] - vectors(api, card["pooling"], TEXT)[0]).max() <= 1e-6


def test_e02_causal_embedder(api: httpx.Client, t_qemb: Path) -> None:
    texts = ["yes", "What is the capital of France", TEXT, " ".join(["token model"] * 10)]
    alone = np.concatenate([vectors(api, "qemb", text) for text in texts])
    for got, text in zip(alone, texts, strict=True):
        assert np.abs(got - unit(hidden(t_qemb, text)[-1])).max() <= 1e-5
        assert abs(np.linalg.norm(got) - 1) <= 1e-5
    assert np.abs(vectors(api, "qemb", texts) - alone).max() <= 1e-5
    for _ in range(3):
        assert np.abs(vectors(api, "qemb", texts[::-1])[::-1] - alone).max() <= 1e-5


@pytest.mark.parametrize("model", ["bert", "qemb"])
def test_e04_company_and_order_change_nothing(api: httpx.Client, model: str) -> None:
    alone = vectors(api, model, TEXT)[0]
    batch = ["yes no " * (1 + i) for i in range(32)]
    for place in (0, 7, 31):
        batch[place] = TEXT
    got = vectors(api, model, batch)
    for place in (0, 7, 31):
        assert np.abs(got[place] - alone).max() <= 1e-5
    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(lambda i: vectors(api, model, [f"text {i}", TEXT]), range(16)):
            assert np.abs(found[1] - alone).max() <= 1e-5


def test_m05_a_repeat_is_the_same(api: httpx.Client) -> None:
    text = "Numbers such as 1, 22, 333, 4096 stand in many texts. " * 3
    answers = [ok(post(api, "qemb", text)) for _ in range(3)]
    first, *rest = [np.array(answer["data"][0]["embedding"]) for answer in answers]
    assert all(first @ other >= 0.99999 for other in rest)
    assert answers[2]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    longer = text + "And one more."
    warm = vectors(api, "qemb", longer)[0]
    cold = vectors(api, "qemb", longer, cache_salt="cold")[0]
    assert np.abs(warm - cold).max() <= 1e-5
    for _ in range(2):
        used = ok(post(api, "bert", TEXT))["usage"]
    assert used["prompt_tokens_details"]["cached_tokens"] == 0


# --- E07: numbers that are none -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A BERT that overflows on the word "fox" alone."""
    folder = tiny.tiny_bert(tmp_path_factory.mktemp("broken"))
    weights = load_file(folder / "model.safetensors")
    name = next(key for key in weights if key.endswith("word_embeddings.weight"))
    ids = AutoTokenizer.from_pretrained(folder)("fox", add_special_tokens=False)["input_ids"]
    weights[name][ids] = 3e38
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with serve_here(served(folder, "broken")) as live, live.client() as client:
        yield client


def test_e07_an_overflow_names_its_input(broken: httpx.Client) -> None:
    before = vectors(broken, "broken", ["yes", "no"])
    error = error_of(post(broken, "broken", ["yes", "the fox", "no"]), 500, "input[1]", "non_finite_output")
    assert "input[1]" in error["message"]
    assert np.isfinite(before).all()
    assert np.array_equal(vectors(broken, "broken", ["yes", "no"]), before)


def test_e07_nothing_infinite_passes_even_if_the_engine_lets_it(echo: Live) -> None:
    asked = {"model": "vector", "input": ["yes", "yes no yes no", "no"], "cache_salt": "wide"}
    error_of(echo.post("/v1/embeddings", asked), 500, "input[1]", "non_finite_output")


# --- E09: encodings -------------------------------------------------------------------------------------------------


def test_e09_base64_is_float32_little_endian(api: httpx.Client, echo: Live) -> None:
    data = ok(echo.post("/v1/embeddings", {"model": "vector", "input": "a", "encoding_format": "base64"}))["data"]
    assert data[0]["embedding"] == "AACAPwAAAMAAAAA/"
    data = ok(echo.post("/v1/embeddings", {"model": "vector", "input": "a"}))["data"]
    assert data[0]["embedding"] == [1.0, -2.0, 0.5]
    raw = base64.b64decode(ok(post(api, "bert", TEXT, encoding_format="base64"))["data"][0]["embedding"])
    assert (
        list(struct.unpack(f"<{len(raw) // 4}f", raw))
        == vectors(api, "bert", TEXT, encoding_format="float")[0].tolist()
    )
    for wrong in ("hex", 5, "FLOAT"):
        error_of(post(api, "bert", TEXT, encoding_format=wrong), 400, "encoding_format")


# --- E10: forms of input --------------------------------------------------------------------------------------------


def test_e10_forms_of_input(api: httpx.Client) -> None:
    before = vectors(api, "bert", "a")
    assert len(vectors(api, "bert", ["a", "b"])) == 2
    assert len(vectors(api, "bert", [[5, 6], [7]])) == 2
    assert ok(post(api, "bert", [5, 6]))["usage"]["prompt_tokens"] == 2  # used as they are: nothing is added
    assert np.isfinite(vectors(api, "bert", " ")).all()
    for given, param in (
        ("", "input"),
        (["a", ""], "input[1]"),
        ([], "input"),
        ([[]], "input[0]"),
        ([[5], []], "input[1]"),
        (["a", [5]], "input[1]"),
        ([[5], "a"], "input[1]"),
        ([10**9], "input"),
        ([[5], [10**9]], "input[1]"),
        ([-1], "input[0]"),
        ([5, "a"], "input[1]"),
        ([None], "input[0]"),
        ({"text": "a"}, "input"),
        (["a"] * 2049, "input"),
    ):
        error_of(post(api, "bert", given), 400, param)
    error_of(api.post("/v1/embeddings", json={"model": "bert"}), 400, "input", "missing_required_parameter")
    assert np.array_equal(vectors(api, "bert", "a"), before)


def test_e10_as_many_inputs_as_are_allowed(api: httpx.Client) -> None:
    got = vectors(api, "bert", ["yes no", "no yes"] * 1024)
    assert got.shape[0] == 2048
    assert np.abs(got - np.tile(vectors(api, "bert", ["yes no", "no yes"]), (1024, 1))).max() <= 1e-5


# --- E11: too long --------------------------------------------------------------------------------------------------


def test_e11_too_long_is_refused_with_both_numbers(api: httpx.Client) -> None:
    error = error_of(post(api, "xlmr", ["yes", LONG]), 400, "input[1]", "context_length_exceeded")
    assert "64" in error["message"]
    error_of(post(api, "xlmr", "x" * 10**6), 400, "input", "context_length_exceeded")


def test_e11_truncation(api: httpx.Client, t_xlmr: Path) -> None:
    reference = AutoTokenizer.from_pretrained(t_xlmr)
    ids = reference(LONG)["input_ids"]
    assert len(ids) > 64
    right = [*ids[:63], ids[-1]]
    left = [ids[0], *ids[-63:]]
    for body, expected in (
        ({"truncate": True}, right),
        ({"truncate": "END"}, right),
        ({"truncate": "end"}, right),
        ({"truncate": "START"}, left),
        ({"truncate_prompt_tokens": -1}, right),
        ({"truncate_prompt_tokens": 64, "truncation_side": "left"}, left),
        ({"truncate_prompt_tokens": 10}, [*ids[:9], ids[-1]]),
    ):
        answer = ok(post(api, "xlmr", [LONG, "yes"], **body))
        assert answer["usage"]["truncated"] == 1
        got = np.array(answer["data"][0]["embedding"])
        assert np.abs(got - vectors(api, "xlmr", expected)[0]).max() <= 1e-6, body
    error_of(post(api, "xlmr", LONG, truncate="NONE"), 400, "input", "context_length_exceeded")
    for wrong in ("MIDDLE", 1, []):
        error_of(post(api, "xlmr", LONG, truncate=wrong), 400, "truncate")
    for wrong in (0, -2, 65, "5"):
        error_of(post(api, "xlmr", LONG, truncate_prompt_tokens=wrong), 400, "truncate_prompt_tokens")


# --- dimensions, prompts, normalising -------------------------------------------------------------------------------


def test_dimensions(api: httpx.Client) -> None:
    whole = vectors(api, "qemb", TEXT)[0]
    for count in (1, 32, len(whole)):
        cut = whole[:count] / np.linalg.norm(whole[:count])
        assert np.abs(vectors(api, "qemb", TEXT, dimensions=count)[0] - cut).max() <= 1e-6
    for wrong in (0, -1, len(whole) + 1, 10**9, "32", 1.5):
        error_of(post(api, "qemb", TEXT, dimensions=wrong), 400, "dimensions")


def test_prompts(api: httpx.Client, t_qemb: Path) -> None:
    text = "What is the capital of France?"
    prompt = "Instruct: Given a web search query, retrieve relevant passages\nQuery:"
    expected = unit(hidden(t_qemb, prompt + text)[-1])
    for name in ("prompt_name", "input_type"):
        assert np.abs(vectors(api, "qemb", text, **{name: "query"})[0] - expected).max() <= 1e-5
    assert np.abs(vectors(api, "qemb", text)[0] - expected).max() > 1e-3
    assert "document" in error_of(post(api, "qemb", text, prompt_name="no"), 400, "prompt_name")["message"]
    error_of(post(api, "qemb", [5, 6], prompt_name="query"), 400, "prompt_name")


def test_normalize(api: httpx.Client, t_bert: Path) -> None:
    raw = vectors(api, "bert", TEXT, normalize=False)[0]
    assert np.abs(raw - hidden(t_bert, TEXT).mean(0).double().numpy()).max() <= 1e-5
    assert np.abs(vectors(api, "bert", TEXT, normalize=True)[0] - raw / np.linalg.norm(raw)).max() <= 1e-6


def test_the_answer_says_what_it_cost(api: httpx.Client, t_bert: Path) -> None:
    reference = AutoTokenizer.from_pretrained(t_bert)
    answer = ok(post(api, "bert", [TEXT, "yes"], request_id="mine", user="me"))
    count = sum(len(reference(text)["input_ids"]) for text in (TEXT, "yes"))
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] == count
    assert (answer["object"], answer["model"], answer["id"]) == ("list", "bert", "embd-mine")


def test_h07_a_model_of_another_task(api: httpx.Client) -> None:
    for model in ("lm", "ce"):
        error_of(post(api, model, "a"), 400, "model", "task_not_supported")
    error_of(post(api, "nothing", "a"), 404, "model", "model_not_found")


# --- messages -------------------------------------------------------------------------------------------------------


def test_a13_messages_are_embedded_as_their_chat_template_writes_them(
    api: httpx.Client, t_qemb: Path, tmp_path: Path
) -> None:
    """As vLLM's embeddings of chats: the template's text without further special tokens, cut like any input."""
    template = tmp_path / "chat.jinja"
    template.write_text(tiny.CHAT_TEMPLATE.replace("{{ bos_token }}", "{{ style }}"))
    messages = [{"role": "system", "content": "Represent it."}, {"role": "user", "content": TEXT}]
    chat = {"model": "chat", "messages": messages}
    with serve_here(served(t_qemb, "chat", chat_template=str(template))) as live, live.client() as client:

        def embedded(**body: Any) -> dict[str, Any]:
            return dict(ok(client.post("/v1/embeddings", json={**chat, **body})))

        def ids(**body: Any) -> list[int]:
            return list(ok(client.post("/tokenize", json={"add_generation_prompt": False, **chat, **body}))["tokens"])

        for options in (
            {},
            {"add_generation_prompt": True},
            {"add_special_tokens": True},
            {"chat_template_kwargs": {"style": "x"}},
        ):
            expected, tokens = vectors(client, "chat", ids(**options))[0], ids(**options)
            answer = embedded(**options)
            assert np.allclose(answer["data"][0]["embedding"], expected, atol=1e-6), options
            assert answer["usage"]["prompt_tokens"] == len(tokens)
        cut = embedded(truncate_prompt_tokens=8)
        assert (cut["usage"]["prompt_tokens"], cut["usage"]["truncated"]) == (8, 1)
        for field, more in (
            ("input", {"input": "a"}),
            ("prompt_name", {"prompt_name": "query"}),
            ("messages", {"messages": [{"role": "user", "content": LONG * 3}]}),
            ("messages[0].content", {"messages": [{"role": "user", "content": None}]}),
            ("chat_template", {"chat_template": "x"}),
            ("chat_template_kwargs.messages", {"chat_template_kwargs": {"messages": []}}),
        ):
            error_of(client.post("/v1/embeddings", json={**chat, **more}), 400, field)
        text = {"model": "chat", "input": "a"}
        for name, value in {"chat_template_kwargs": {"style": "x"}, "add_special_tokens": False}.items():
            error_of(client.post("/v1/embeddings", json={**text, name: value}), 400, name)
        usual = {"add_special_tokens": True, "add_generation_prompt": False, "chat_template": None}
        ok(client.post("/v1/embeddings", json={**text, **usual}))  # as vLLM's clients write them
    error_of(api.post("/v1/embeddings", json={**chat, "model": "bert"}), 400, "messages")
    error_of(api.post("/v1/embeddings", json={"model": "bert"}), 400, "input", "missing_required_parameter")
