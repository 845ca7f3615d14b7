"""Models as sentence-transformers saves them today give its vectors and scores: lengths, prompts, templates, sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.models import Normalize, Pooling, Transformer

from anycore import LLM
from anycore.errors import BadRequest, ConfigError, Unsupported

LONG = "Paris is the capital of France, and London is the capital of England. "
TEXTS = ["yes", "The quick brown fox jumps over the lazy dog near the river bank.", LONG * 3]
DOCUMENTS = ["Paris is it.", "London", "", LONG * 3]
QUERY = "what is the capital of France?"
OTHER_PROMPT = (
    "<|im_start|>system\n{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %} {Answer} yes or no"
    "<|im_end|>\n{% for m in messages if m.role == 'document' %}<|im_start|>user\nD {{ m.content }}{% endfor %}"
    "{% for m in messages if m.role == 'query' %} Q {{ m.content }}{% endfor %}<|im_end|>\n<|im_start|>assistant\n"
)
"""A yes/no reranker's, with the query after the document and an instruction that is empty by default."""


def opened(folder: Path, task: str) -> LLM:
    return LLM(str(folder), task=task, backend="cpu", dtype="float32", kv_cache_memory=8 << 20, threads=1)


def saved(base: Path, folder: Path, pooling: str, length: int | None = None, **settings: Any) -> Path:
    """Have sentence-transformers write an embedder."""
    transformer = Transformer(str(base))
    modules = [transformer, Pooling(transformer.get_embedding_dimension(), pooling_mode=pooling), Normalize()]
    model = SentenceTransformer(modules=modules, device="cpu", **settings)
    if length is not None:
        model.max_seq_length = length
    model.save(str(folder))
    return folder


def resaved(base: Path, folder: Path, **settings: Any) -> Path:
    """Have sentence-transformers write a cross-encoder."""
    CrossEncoder(str(base), device="cpu", **settings).save(str(folder))
    return folder


def query_is_given(base: Path) -> dict[str, Any]:
    return {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": "query"}


EMBEDDERS: dict[str, Callable[[Path, Path], Path]] = {
    "bert": lambda base, to: saved(tiny.tiny_bert(base, layout=None), to, "mean"),
    "cut": lambda base, to: saved(tiny.tiny_bert(base, layout=None), to, "cls", length=16),
    "prompt": lambda base, to: saved(tiny.tiny_bert(base, layout=None), to, "mean", **query_is_given(base)),
    "template": lambda base, to: saved(tiny.tiny_lm(base), to, "lasttoken", length=24, **query_is_given(base)),
    "window": lambda base, to: saved(tiny.tiny_lm(base, family="mistral", window=8), to, "lasttoken"),
    "both ways": lambda base, to: saved(
        tiny.tiny_lm(base, family="gemma3", window=8, use_bidirectional_attention=True), to, "mean"
    ),
}


@pytest.mark.parametrize("name", EMBEDDERS)
def test_e01_vectors(name: str, tmp_path: Path) -> None:
    """What a text becomes: cut to the length that the files name, after their default prompt, in the chat template
    where they say that texts are messages."""
    folder = EMBEDDERS[name](tmp_path / "base", tmp_path / "saved")
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    ours = opened(folder, "embed").embed(TEXTS, truncate=True)
    assert np.abs(np.array(ours) - expected).max() < 1e-5


def test_e01_vectors_have_the_dimensions_that_the_files_name(tmp_path: Path) -> None:
    folder = saved(tiny.tiny_bert(tmp_path / "base", layout=None), tmp_path / "saved", "mean", truncate_dim=16)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS, normalize_embeddings=True)
    llm = opened(folder, "embed")
    assert np.abs(np.array(llm.embed(TEXTS)) - expected).max() < 1e-5
    assert len(llm.embed(TEXTS, dimensions=32)[0]) == 32
    tiny.edit_json(folder / "config_sentence_transformers.json", truncate_dim=65)
    with pytest.raises(ConfigError, match="truncate_dim is 65, but vectors have 64"):
        opened(folder, "embed")


@pytest.mark.parametrize("kind", ["cosine", "dot", "euclidean", "manhattan"])
def test_a_bi_encoder_ranks_by_the_similarity_of_its_files(kind: str, tmp_path: Path) -> None:
    base = tiny.tiny_bert(tmp_path / "base", layout=None)
    transformer = Transformer(str(base))
    theirs = SentenceTransformer(modules=[transformer, Pooling(64)], device="cpu", similarity_fn_name=kind)
    theirs.save(str(tmp_path / "saved"))
    expected = theirs.similarity(theirs.encode([QUERY]), theirs.encode(DOCUMENTS))[0].numpy()
    ours = opened(tmp_path / "saved", "rerank").score(QUERY, DOCUMENTS)
    assert np.abs(np.array(ours) - expected).max() < 1e-4


def test_what_is_given_to_the_tokenizer_beside_the_template_is_refused(tmp_path: Path) -> None:
    folder = saved(tiny.tiny_lm(tmp_path / "base"), tmp_path / "saved", "lasttoken")
    tiny.edit_json(folder / "sentence_bert_config.json", processing_kwargs={"text": {"padding": "max_length"}})
    with pytest.raises(Unsupported, match="processing_kwargs set text"):
        opened(folder, "embed")
    begun = {"chat_template": {"add_generation_prompt": True}}
    tiny.edit_json(folder / "sentence_bert_config.json", processing_kwargs=begun)
    expected = SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    assert np.abs(np.array(opened(folder, "embed").embed(TEXTS)) - expected).max() < 1e-5


def with_template(base: Path, template: str) -> Path:
    tiny.tiny_reranker(base)
    (base / "chat_template.jinja").write_text(template)
    return base


INSTRUCTED: dict[str, Any] = {"prompts": {"web": "Find dogs."}, "default_prompt_name": "web"}
RERANKERS: dict[str, Callable[[Path, Path], Path]] = {
    "bert": lambda base, to: resaved(tiny.tiny_cross_encoder(base), to, activation_fn=torch.nn.Identity()),
    "cut": lambda base, to: resaved(tiny.tiny_cross_encoder(base), to, max_length=24),
    "prompt": lambda base, to: resaved(tiny.tiny_cross_encoder(base, "xlmr"), to, **INSTRUCTED),
    "yes or no": lambda base, to: resaved(tiny.tiny_reranker(base), to),
    "its instruction": lambda base, to: resaved(tiny.tiny_reranker(base), to, **INSTRUCTED),
    "its template": lambda base, to: resaved(with_template(base, OTHER_PROMPT), to, **INSTRUCTED),
    "no instruction": lambda base, to: with_template(base, OTHER_PROMPT),
    "logits": lambda base, to: resaved(tiny.tiny_reranker(base), to, activation_fn=torch.nn.Identity()),
}


@pytest.mark.parametrize("name", RERANKERS)
def test_e03_e06_scores(name: str, tmp_path: Path) -> None:
    """How a pair is put into words, where it is cut, and what becomes of the logits."""
    folder = RERANKERS[name](tmp_path / "base", tmp_path / "saved")
    expected = CrossEncoder(str(folder), device="cpu").predict([(QUERY, text) for text in DOCUMENTS])
    ours = opened(folder, "rerank").score(QUERY, DOCUMENTS, truncate=True)
    assert np.abs(np.array(ours) - np.array(expected)).max() < 1e-5


def test_e03_a_template_without_an_instruction_takes_none(tmp_path: Path) -> None:
    bare = OTHER_PROMPT.replace("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}", "")
    llm = opened(with_template(tmp_path, bare), "rerank")
    assert len(llm.score(QUERY, DOCUMENTS)) == 4
    with pytest.raises(BadRequest, match="takes no instruction"):
        llm.score(QUERY, DOCUMENTS, instruction="Find dogs.")


def test_e03_a_template_that_shows_no_document_is_refused(tmp_path: Path) -> None:
    folder = with_template(tmp_path, OTHER_PROMPT.replace("D {{ m.content }}", "D"))
    with pytest.raises(Unsupported, match="does not show a query, and a document once"):
        opened(folder, "rerank")
