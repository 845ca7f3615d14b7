"""Whole tasks on a rounded KV cache, for the conformance kit: the same tokens however a prompt came into the cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from anycore.contract.declare import DTYPES, Task
from anycore.contract.endtoend import NEW_TOKENS, generated, open_engine, prompts

NEAR_BEST = {"int8": 0.3, "fp8": 0.6}
"""How far below transformers' best logit a chosen one may be, in standard deviations of a row of logits."""


def check_generate(backend: str, dtype: str, kind: str, folder: Path) -> None:
    """Alone, together, in chunks and from the prefix cache: the same ids in float32, each nearly the best by
    transformers, whose cache is exact; and a token takes in the cache what the plan says.
    """
    from transformers import AutoModelForCausalLM

    inputs = prompts()
    engine = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=64, kv_cache_dtype=kind)
    token, wide = engine.card["memory"]["kv_bytes_per_token"], engine.spec.kv(1, dtype).bytes_per_token
    assert token < wide / DTYPES[dtype] * 1.2, f"a token takes {token} bytes of a rounded cache, {wide} of another"

    found = {"alone": [generated(engine, [tokens])[0] for tokens in inputs]}
    found["cached"] = [generated(engine, [tokens])[0] for tokens in inputs]
    engine.reset_prefix_cache()
    found["together"] = generated(engine, inputs)
    chunked: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 16, "kv_cache_dtype": kind}
    found["in chunks"] = generated(open_engine(backend, folder, Task.GENERATE, dtype, **chunked), inputs)

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    for name, answers in found.items():
        assert dtype != "float32" or answers == found["alone"], f"{name}: {answers}, alone {found['alone']}"
        for tokens, ids in zip(inputs, answers, strict=True):
            assert len(ids) == NEW_TOKENS
            rows = model(torch.tensor([tokens + ids])).logits[0, len(tokens) - 1 : -1].detach().double()
            missed = rows.amax(-1) - rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
            off = float((missed / rows.std(-1)).max())
            assert off <= NEAR_BEST[kind], f"{name}: a chosen token is {off:.3g} deviations below the best"
