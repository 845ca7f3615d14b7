"""Whole tasks on tiny random models, for the conformance kit: engine, model and backend together, against transformers.

The only place under `contract/` that looks up to the engine and the models; no backend imports it.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anycore.config import ModelConfig
from anycore.contract.checks import COMPANY_TOLERANCE
from anycore.contract.declare import Task
from anycore.engine.engine import Engine
from anycore.engine.launch import build, prepare
from anycore.engine.request import Delta, NewRequest, PoolingParams, SamplingParams
from anycore.plugins import load

VOCAB = 128
NEW_TOKENS = 12
LENGTHS = (3, 40, 17, 16, 33, 17, 1)
"""Prompts shorter and longer than a block, equal ones, and the shortest."""

SCORE_TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "float16": 1e-2}
"""How far scores may be from transformers' in float32, absolutely, by dtype."""


SIZES: dict[str, Any] = {"intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": VOCAB, "initializer_range": 0.2}
"""Weights wide enough for greedy decoding to have clear winners."""


def save_decoder(folder: Path, head_dim: int, **changes: Any) -> None:
    """Write a random Llama with grouped heads; `changes` are to its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    settings = {**SIZES, **shape, "head_dim": head_dim, "max_position_embeddings": 128, **changes}
    config = LlamaConfig(**settings)
    model: Any = LlamaForCausalLM(config)
    model.save_pretrained(folder)


def save_encoder(folder: Path, head_dim: int, task: Task, heads: int = 2) -> None:
    """Write a random BERT, with one label for reranking."""
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    shape: dict[str, Any] = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "num_labels": 1}
    torch.manual_seed(0)
    config = BertConfig(**SIZES, **shape, max_position_embeddings=64)
    kind: Any = BertForSequenceClassification if task is Task.RERANK else BertModel
    kind(config).save_pretrained(folder)


def open_engine(backend: str, folder: Path, task: Task, dtype: str, **settings: Any) -> Engine:
    config = ModelConfig(model=str(folder), backend=backend, task=task.value, dtype=dtype, **settings)
    return build(prepare(config, load()))


def prompts(times: int = 1) -> list[list[int]]:
    """So many of each length, each of its own."""
    chosen = random.Random(0)
    return [[chosen.randrange(3, VOCAB) for _ in range(length)] for length in times * LENGTHS]


def run(engine: Engine, inputs: list[list[int]]) -> list[list[Delta]]:
    """Let the inputs run together; the deltas of each, in order."""
    for number, tokens in enumerate(inputs):
        engine.add(request(engine.task, str(number), tokens))
    found: dict[str, list[Delta]] = {str(number): [] for number in range(len(inputs))}
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
            found[delta.id].append(delta)
    return list(found.values())


def request(task: Task, name: str, tokens: list[int]) -> NewRequest:
    if task is Task.GENERATE:
        greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
        return NewRequest(id=name, task=task, token_ids=tokens, sampling=greedy)
    return NewRequest(id=name, task=task, token_ids=tokens, pooling=PoolingParams(raw_scores=True))


def generated(engine: Engine, inputs: list[list[int]]) -> list[list[int]]:
    return [[i for delta in deltas for i in delta.token_ids] for deltas in run(engine, inputs)]


def check_generate(backend: str, dtype: str, folder: Path) -> None:
    """Alone, together, in chunks and from the prefix cache: the same ids, and transformers' in float32."""
    inputs = prompts()
    engine = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=64)
    alone = [generated(engine, [tokens])[0] for tokens in inputs]
    assert [len(ids) for ids in alone] == [NEW_TOKENS] * len(inputs)
    cached = [generated(engine, [tokens])[0] for tokens in inputs]
    engine.reset_prefix_cache()
    together = generated(engine, inputs)
    chunked = generated(
        open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=64, max_num_batched_tokens=16), inputs
    )
    if dtype != "float32":
        return  # rounding decides between near ties, and legitimately differs; that it ran is what was checked
    exact = [transformers_ids(folder, tokens) for tokens in inputs]
    for name, found in (("alone", alone), ("cached", cached), ("together", together), ("in chunks", chunked)):
        assert found == exact, f"{name}: ids {found} differ from transformers' {exact}"


def transformers_ids(folder: Path, tokens: list[int]) -> list[int]:
    """Greedy ids by the plainest loop there is: no cache."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = list(tokens)
    for _ in range(NEW_TOKENS):
        ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(tokens) :]


def check_embed(backend: str, dtype: str, folder: Path) -> None:
    """Vectors of length 1, transformers', and the same alone and in company."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype=torch.float32)
    inputs = prompts()
    engine = open_engine(backend, folder, Task.EMBED, dtype)
    together = [vector(deltas) for deltas in run(engine, inputs)]
    pooling = engine.spec.pooling
    assert pooling is not None
    for tokens, found in zip(inputs, together, strict=True):
        rows = model(torch.tensor([tokens])).last_hidden_state[0]
        pooled = rows[0] if pooling.kind == "cls" else rows.mean(0)
        off = float(np.abs(torch.nn.functional.normalize(pooled, dim=0).detach().numpy() - found).max())
        assert off <= SCORE_TOLERANCE[dtype], f"a vector of {len(tokens)} tokens is off by {off:.3g}"
        alone = vector(run(engine, [tokens])[0])
        assert abs(float(np.linalg.norm(alone)) - 1) < 1e-5, f"a vector of length {np.linalg.norm(alone)}"
        moved = float(np.abs(alone - found).max())
        assert moved <= COMPANY_TOLERANCE[dtype], f"batch mates moved a vector by {moved:.3g}"


def vector(deltas: list[Delta]) -> Any:
    assert deltas[-1].vector is not None
    return np.frombuffer(deltas[-1].vector, dtype="<f4")


def check_rerank(backend: str, dtype: str, folder: Path) -> None:
    """Scores in company are transformers', alone."""
    from transformers import AutoModelForSequenceClassification

    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    inputs = prompts()
    engine = open_engine(backend, folder, Task.RERANK, dtype)
    for tokens, deltas in zip(inputs, run(engine, inputs), strict=True):
        exact = float(model(torch.tensor([tokens])).logits)
        assert deltas[-1].scores is not None
        off = abs(deltas[-1].scores[0] - exact)
        assert off <= SCORE_TOLERANCE[dtype] * max(1.0, abs(exact)), f"a score of {exact:.4g} is off by {off:.3g}"
