"""Whole tasks with quantised weights, for the conformance kit: against transformers with what the weights stand for.

A backend may round activations too, so results are near, not equal: what is chosen must be nearly the best, vectors
and scores nearly the same. A product that is wrong is far from that.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.contract.endtoend import generated, prompts, run, save_decoder, save_encoder, vector
from anycore.contract.formats import Format
from anycore.engine.engine import Engine
from anycore.engine.launch import Prepared, build, prepare
from anycore.models.parameters import canonical
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import Quantization
from anycore.plugins import load

# What a right backend may need that rounds the rows it multiplies: it was written in plain torch and run on random
# models of head sizes 16, 64 and 128 with hundreds of texts. Rows rounded to int8 keep steps of a 127th of their
# largest number, in e4m3 4 bits of each number: some 3 times as much is lost. Scales that went to the wrong rows are
# off by more than is allowed here: tests/backends/test_kit_weights.py holds both to it.

NEAR_BEST = 1.0
"""How far below the best logit a chosen one may be, in standard deviations of a row of logits. Rounding took
0.6, wrong scales 2.7 and more."""

NEAR, NEAR_FP8 = 0.3, 0.6
"""How far scores may be from transformers': the root mean square over texts, as a share of the standard deviation of
transformers' own. int8 took up to 0.21, e4m3 0.50; wrong scales take 0.77 and more."""

COSINE, COSINE_FP8 = 0.995, 0.95
"""Least cosine with transformers' vectors. int8 came down to 0.9966, e4m3 to 0.963; wrong scales stay below 0.89."""

TEXTS = 4
"""Texts of each length that are scored: enough of them for a mean."""

PADDED = 1.25
"""What a backend's layout of small matrices may take, as a multiple of what their formats are counted with."""

BLOCKS = (Format("int4", 32), Format("int8", 32), Format("int8", 16), Format("int4", 16))
"""The formats of a GGUF file, which may mix them in one fused matrix."""


def open_quantised(backend: str, folder: Path, task: Task, dtype: str, scheme: str) -> tuple[Engine, Path]:
    """An engine that holds weights by a scheme, and a folder with the weights that they stand for."""
    asked = "w4a16" if scheme == "gguf" else scheme
    config = ModelConfig(
        model=str(folder), backend=backend, task=task.value, dtype=dtype, quantization=asked, max_model_len=64
    )
    prepared = as_blocks(prepare(replace(config, quantization="none"), load()), config) if scheme == "gguf" else None
    prepared = prepared or prepare(config, load())
    return build(prepared), stood_for(folder, prepared)


def as_blocks(prepared: Prepared, config: ModelConfig) -> Prepared:
    """The same model as if its file had brought blocks of several kinds."""
    from anycore.models.quantization import quantization

    tables = prepared.choice.spec.tables
    every = quantization(prepared.spec, config.quantization, "w4a16", 32, tables)
    assert every is not None
    formats = {name: BLOCKS[number % len(BLOCKS)] for number, name in enumerate(every.formats)}
    return replace(prepared, wish=replace(prepared.wish, quantization=Quantization("gguf", formats)))


def stood_for(folder: Path, prepared: Prepared) -> Path:
    """A copy of a model with its quantised matrices replaced by what they stand for, in float32."""
    from safetensors.torch import load_file, save_file

    assert prepared.wish.quantization is not None
    target = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-stood-for")))
    tensors = load_file(folder / "model.safetensors")
    kind = getattr(torch, prepared.wish.dtype)
    rounded = 0
    for name, tensor in tensors.items():
        wanted = prepared.wish.quantization.formats.get(canonical(name))
        if wanted is not None:
            tensors[name] = replace(quantise(tensor.to(kind), wanted), dtype=torch.float32).dense()
            rounded += 1
    assert rounded, "no matrix of the kit's model was quantised"
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def check_held(engine: Engine) -> None:
    """Weights take what the plan counted for them, as far as the device tells."""
    planned, measured = engine.card["memory"]["weights"], engine.card["memory_measured"].get("weights")
    if measured is not None:
        assert measured <= PADDED * planned, f"weights take {measured} bytes, planned were {planned}"


def check_generate(backend: str, dtype: str, scheme: str, folder: Path, head_dim: int, tied: bool) -> None:
    """Each token that is chosen is nearly the best one, alone and in company."""
    from transformers import AutoModelForCausalLM

    save_decoder(folder, head_dim, hidden_size=256, intermediate_size=512, tie_word_embeddings=tied)
    engine, reference = open_quantised(backend, folder, Task.GENERATE, dtype, scheme)
    check_held(engine)
    model: Any = AutoModelForCausalLM.from_pretrained(reference, dtype=torch.float32, attn_implementation="eager")
    inputs = prompts()
    together = generated(engine, inputs)
    engine.reset_prefix_cache()
    alone = [generated(engine, [tokens])[0] for tokens in inputs]
    for name, found in (("together", together), ("alone", alone)):
        for tokens, ids in zip(inputs, found, strict=True):
            rows = model(torch.tensor([tokens + ids])).logits[0, len(tokens) - 1 : -1].detach().double()
            missed = rows.amax(-1) - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            off = float((missed / rows.std(-1)).max())
            assert off <= NEAR_BEST, f"{name}: a chosen token is {off:.3g} deviations below the best"


def check_embed(backend: str, dtype: str, scheme: str, folder: Path, head_dim: int) -> None:
    """Vectors point where transformers' do."""
    from transformers import AutoModel

    save_encoder(folder, head_dim, Task.EMBED, heads=max(2, 128 // head_dim))
    engine, reference = open_quantised(backend, folder, Task.EMBED, dtype, scheme)
    model: Any = AutoModel.from_pretrained(reference, dtype=torch.float32)
    pooling = engine.spec.pooling
    assert pooling is not None
    for tokens, deltas in zip(prompts(), run(engine, prompts()), strict=True):
        rows = model(torch.tensor([tokens])).last_hidden_state[0].detach()
        exact = torch.nn.functional.normalize(rows[0] if pooling.kind == "cls" else rows.mean(0), dim=0).numpy()
        cosine = float(np.dot(exact, vector(deltas)))
        least = COSINE_FP8 if scheme == "fp8" else COSINE
        assert cosine >= least, f"a vector of {len(tokens)} tokens has cosine {cosine:.5g}"


def check_rerank(backend: str, dtype: str, scheme: str, folder: Path, head_dim: int) -> None:
    """Scores are near transformers'."""
    from transformers import AutoModelForSequenceClassification

    save_encoder(folder, head_dim, Task.RERANK, heads=max(2, 128 // head_dim))
    engine, reference = open_quantised(backend, folder, Task.RERANK, dtype, scheme)
    model: Any = AutoModelForSequenceClassification.from_pretrained(reference, dtype=torch.float32)
    exact = np.array([float(model(torch.tensor([tokens])).logits) for tokens in prompts(TEXTS)])
    found = np.array([(deltas[-1].scores or [np.nan])[0] for deltas in run(engine, prompts(TEXTS))])
    off = float(np.sqrt(np.mean((found - exact) ** 2)) / exact.std())
    allowed = NEAR_FP8 if scheme == "fp8" else NEAR
    assert off <= allowed, f"scores are off by {off:.3g} of their standard deviation; {allowed} is allowed"
