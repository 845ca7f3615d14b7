"""A model of two ranks, for the conformance kit: this process and another one, on two devices or on a shared one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from anycore.config import ModelConfig
from anycore.contract.declare import BackendSpec, Support, Task
from anycore.contract.endtoend import NEW_TOKENS, generated, prompts
from anycore.engine.launch import build, prepare
from anycore.plugins import load
from anycore.ranks.engines import LeadingEngine
from anycore.ranks.leader import open_model

RANKS = 2
FEATURE = "tensor_parallel"


def claimed(rows: list[Support]) -> str | None:
    """The data type to try: float32 where it is claimed, for then ids have to be equal."""
    dtypes = [d for row in rows if FEATURE in row.features and Task.GENERATE in row.tasks for d in row.weights]
    return "float32" if "float32" in dtypes else next(iter(dtypes), None)


def places(spec: BackendSpec) -> int:
    """How many ranks there is room for here."""
    return RANKS if spec.shared_device else len(spec.probe().devices)


def check_ranks(backend: str, dtype: str, folder: Path) -> None:
    """Two ranks give the ids that one gives, in float32; alone, together, and again after what they have cached."""
    config = ModelConfig(model=str(folder), backend=backend, task="generate", dtype=dtype, max_model_len=64)
    inputs = prompts()
    expected = generated(build(prepare(config, load())), inputs)
    engine = open_model(prepare(replace(config, tensor_parallel_size=RANKS), load()))
    assert isinstance(engine, LeadingEngine)
    try:
        alone = [generated(engine, [tokens])[0] for tokens in inputs]
        cached = generated(engine, inputs)
        engine.reset_prefix_cache()
        together = generated(engine, inputs)
    finally:
        engine.close()
    for name, found in (("alone", alone), ("cached", cached), ("together", together)):
        assert [len(ids) for ids in found] == [NEW_TOKENS] * len(inputs)
        if dtype == "float32":  # elsewhere rounding decides between near ties
            assert found == expected, f"{name}: {RANKS} ranks give ids {found}, one gives {expected}"
