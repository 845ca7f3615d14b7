"""A model and a device as numbers, for plans of memory. Nothing heavy is imported: some processes need no more."""

from __future__ import annotations

from pathlib import Path

from anycore.contract.declare import Task
from anycore.engine.memory import MemoryPlan, Room, Wish, plan
from anycore.models.spec import ModelSpec

GIB = 2**30

QWEN = ModelSpec(
    architecture="Qwen3ForCausalLM",
    family="decoder",
    attention="causal",
    tasks=(Task.GENERATE,),
    hidden_size=2048,
    intermediate_size=6144,
    layers=28,
    heads=16,
    kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    norm_eps=1e-6,
    activation="silu",
    qk_norm=True,
    tied=True,
    head="lm",
)
WISH = Wish(dtype="bfloat16", block_size=128, utilization=0.9, paged=True)


def device_plan(used: Path, reserved: int) -> MemoryPlan:
    """A plan on a device of 100 GiB, of which a file tells how much is taken."""
    free = 100 * GIB - int(used.read_text())
    return plan(QWEN, WISH, Room("fake", 100 * GIB, free - reserved))
