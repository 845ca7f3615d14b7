"""What the CPU backend can do, as data. Imports no torch: `anycore matrix` reads it in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anycore.contract.declare import BackendSpec, Level, Support, Task
from anycore_cpu.costs import recorded, workspace
from anycore_cpu.probe import BF16_CHIPS, OTHER_CHIPS, plain, probe

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

ALL_TASKS = (Task.GENERATE, Task.EMBED, Task.RERANK)
BLOCK_SIZES = (16, 1, 2, 4, 8, 32, 64, 128)  # 16 places of 64 bfloat16 elements: 2 KiB runs, little waste

CAUSAL = Support(
    tasks=ALL_TASKS,
    attention="causal",
    weights=("float32",),
    level=Level.NATIVE,
    block_sizes=BLOCK_SIZES,
    features=(
        "chunked_prefill",
        "prefix_caching",
        "sliding_window",
        "softcap",
        "logprobs",
        "grammars",
        "token_types",
        "tensor_parallel",
    ),
)
BIDIRECTIONAL = Support(
    tasks=(Task.EMBED, Task.RERANK),
    attention="bidirectional",
    weights=("float32",),
    level=Level.NATIVE,
    block_sizes=BLOCK_SIZES,
    features=("sliding_window", "softcap", "token_types", "tensor_parallel"),
)
SLOW_BF16 = "this processor has no bfloat16 instructions: right, but slower than float32"
PLAIN = "without kernels of our own plain torch computes, right but slower: anycore doctor says why there are none"
NO_FLOAT16 = "processors compute float16 through float32, at half the range: take --dtype bfloat16 or float32"


ROUNDED = "rows that quantised weights multiply are rounded to int8, with a scale for each group of the weights"
SCHEMES = ("w8a8", "w4a16", "gguf")
KV_CACHES = ("int8", "fp8")


def rows(shape: Support) -> tuple[Support, ...]:
    """The lines of one kind of attention, better ones first. Where our own kernels run, quantised weights are kept."""
    shape = replace(shape, kv_caches=KV_CACHES if shape.attention == "causal" else ())
    narrow = replace(shape, weights=("bfloat16",), schemes=SCHEMES)
    slow = replace(shape, level=Level.REFERENCE)
    slow_narrow = replace(slow, weights=("bfloat16",))
    return (
        replace(shape, chips=BF16_CHIPS + OTHER_CHIPS),
        replace(narrow, chips=BF16_CHIPS, note=ROUNDED),
        replace(slow_narrow, chips=OTHER_CHIPS, schemes=SCHEMES, note=f"{SLOW_BF16}; {ROUNDED}"),
        replace(slow_narrow, chips=plain(BF16_CHIPS), note=PLAIN),
        replace(slow, note=PLAIN),
        replace(slow_narrow, note=f"{PLAIN}; {SLOW_BF16}"),
        replace(shape, weights=("float16",), level=Level.UNSUPPORTED, note=NO_FLOAT16),
    )


def open_device(index: int) -> Backend:
    """Open the processor; torch is imported here, not before."""
    from anycore_cpu.backend import CpuBackend

    return CpuBackend(index)


SPEC = BackendSpec(
    name="cpu",
    api=(1, 1),
    support=(*rows(CAUSAL), *rows(BIDIRECTIONAL)),
    probe=probe,
    open=open_device,
    priority=0,
    evidence=Path(__file__).parent / "evidence",
    copied_dtypes=("float32", "bfloat16"),
    tables=True,
    groups=True,
    shared_device=True,
    workspace=workspace,
    graphs=recorded,
    memory_utilization=0.5,  # the rest of the machine's memory is not ours alone
)
