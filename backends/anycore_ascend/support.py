"""What the Ascend backend can do, as data. Imports no torch: `anycore matrix` reads it in milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from anycore.contract.declare import BackendSpec, Device, Level, Support, Task
from anycore_ascend import costs
from anycore_ascend.probe import probe

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

ALL_TASKS = (Task.GENERATE, Task.EMBED, Task.RERANK)
POOLED = (Task.EMBED, Task.RERANK)
CHIPS = ("910B", "910C")  # Atlas A2 and A3
HEAD_DIMS = (128, 64, 16, 32, 80, 96, 112)  # below 64 or 128 the cache holds zeros up to it
BLOCK_SIZES = (128,)  # others are slower, refused, or wrong without a word, depending on CANN and chip
DTYPES = ("bfloat16", "float16", "float32")
SCHEMES = ("w8a8", "w4a16")  # beside halves; CANN multiplies nothing quantised by float32
PAGED = (
    *("chunked_prefill", "prefix_caching", "sliding_window", "logprobs", "grammars", "token_types", "tensor_parallel"),
)
ENCODERS = ("sliding_window", "softcap", "token_types", "tensor_parallel")

IN_TORCH = "float32, soft caps and other head sizes: attention in plain torch on the device, no graphs"
ONLY_FLOAT16 = "Atlas 300 (310P) has no bfloat16, turns overflow into 65504 and NaN into 0, and lacks these operators"
NOT_TRIED = "Ascend 950 takes other kernels behind the same names; nobody has checked them yet"
TOO_OLD = "Ascend 910 of the first generation lacks the attention operator that this backend is built on"

SUPPORT = (
    Support(ALL_TASKS, "causal", DTYPES[:2], Level.NATIVE, (), HEAD_DIMS, BLOCK_SIZES, PAGED, CHIPS, schemes=SCHEMES),
    Support(ALL_TASKS, "causal", DTYPES, Level.REFERENCE, (), (), BLOCK_SIZES, (*PAGED, "softcap"), CHIPS, IN_TORCH),
    Support(POOLED, "bidirectional", DTYPES[:2], Level.NATIVE, (), (), BLOCK_SIZES, ENCODERS, CHIPS, schemes=SCHEMES),
    Support(POOLED, "bidirectional", DTYPES[2:], Level.NATIVE, (), (), BLOCK_SIZES, ENCODERS, CHIPS),
    *(
        Support(tasks, attention, DTYPES, Level.UNSUPPORTED, chips=(chip,), note=note)
        for chip, note in (("310P", ONLY_FLOAT16), ("950", NOT_TRIED), ("910", TOO_OLD))
        for tasks, attention in ((ALL_TASKS, "causal"), (POOLED, "bidirectional"))
    ),
)


def open_device(index: int) -> Backend:
    """Open one NPU; torch and torch_npu are imported here, not before."""
    from anycore_ascend.backend import AscendBackend

    return AscendBackend(index)


SPEC = BackendSpec(
    name="ascend",
    api=(1, 1),
    support=SUPPORT,
    probe=probe,
    open=open_device,
    priority=90,
    batched_tokens=4096,
    known=(Device(0, "910B-64GB", "910B", int(60.9 * 2**30)),),  # as torch_npu tells it
    runtime=costs.RUNTIME,
    workspace=costs.workspace,
    graphs=costs.graphs,
    evidence=Path(__file__).parent / "evidence",
)
