"""What the CUDA backend can do, as data. Imports no torch: `anycore matrix` reads it in milliseconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from anycore.contract.declare import BackendSpec, Device, Level, Support, Task
from anycore_cuda import costs
from anycore_cuda.probe import probe

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

ALL_TASKS = (Task.GENERATE, Task.EMBED, Task.RERANK)
DTYPES = ("bfloat16", "float16", "float32")
CHIPS = ("sm80", "sm86", "sm87", "sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
E4M3 = CHIPS.index("sm89")  # from there on chips have instructions that turn numbers to e4m3 and back
OLD_CHIPS = ("sm50", "sm52", "sm60", "sm61", "sm62", "sm70", "sm72", "sm75")
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32, 64)  # 16 places of one head of 64 bfloat16 elements: 2 KiB runs, little waste

KNOWN = tuple(
    Device(0, name, chip, int(gib * 2**30))
    for name, chip, gib in (
        ("H200", "sm90", 139.8),
        ("H100", "sm90", 79.1),
        ("A100-80GB", "sm80", 79.1),
        ("A100-40GB", "sm80", 39.3),
        ("L40S", "sm89", 44.4),
        ("4090", "sm89", 23.5),
    )
)
"""Memory as CUDA tells it, which is a little less than what is printed on the box."""

SCHEMES = ("w8a8", "w4a16", "fp8", "gguf")
ROUNDED = (
    "w8a8 rounds what it multiplies to int8, a scale a token; w4a16 and gguf multiply it as it is, and so does fp8 "
    "before sm89, which from there on rounds it to e4m3; a single row meets 4-bit weights in 16 bits of fixed point"
)

TOO_OLD = "the kernels need compute capability 8.0 (Ampere) or newer"

CAUSAL = Support(
    tasks=ALL_TASKS,
    attention="causal",
    weights=DTYPES,
    level=Level.NATIVE,
    head_dims=HEAD_DIMS,
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
    schemes=SCHEMES,
    note=ROUNDED,
)

SUPPORT = (
    replace(CAUSAL, chips=CHIPS[E4M3:], kv_caches=("int8", "fp8")),
    replace(CAUSAL, chips=CHIPS[:E4M3], kv_caches=("int8",)),
    Support(
        tasks=(Task.EMBED, Task.RERANK),
        attention="bidirectional",
        weights=DTYPES,
        level=Level.NATIVE,
        head_dims=HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        features=("sliding_window", "softcap", "token_types", "tensor_parallel"),
        chips=CHIPS,
        schemes=SCHEMES,
        note=ROUNDED,
    ),
    Support(ALL_TASKS, "causal", DTYPES, Level.UNSUPPORTED, chips=OLD_CHIPS, note=TOO_OLD),
    Support((Task.EMBED, Task.RERANK), "bidirectional", DTYPES, Level.UNSUPPORTED, chips=OLD_CHIPS, note=TOO_OLD),
)


def open_device(index: int) -> Backend:
    """Open one GPU; torch and Triton are imported here, not before."""
    from anycore_cuda.backend import CudaBackend

    return CudaBackend(index)


SPEC = BackendSpec(
    name="cuda",
    api=(1, 1),
    support=SUPPORT,
    probe=probe,
    open=open_device,
    priority=100,
    batched_tokens=8192,
    tables=True,
    known=KNOWN,
    runtime=costs.RUNTIME,
    workspace=costs.workspace,
    graphs=costs.graphs,
    evidence=Path(__file__).parent / "evidence",
)
