"""The ONNX Runtime backend: what it declares, and which execution providers it sees. No torch here.

An execution provider is a device: `--device 0` is the one ONNX Runtime ranks first, or ANYCORE_ONNX_PROVIDERS does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from anycore import hookimpl
from anycore.contract.costs import StepShape, activation_bytes
from anycore.contract.declare import BackendSpec, Device, Level, Probe, Support, Task
from anycore.contract.host import memory_total

if TYPE_CHECKING:
    from anycore.contract.backend import Backend

SUFFIX = "ExecutionProvider"
REMOTE = ("AzureExecutionProvider",)
"""Providers that send data to other machines: never taken."""

ON_HOST = ("CPUExecutionProvider", "DnnlExecutionProvider", "OpenVINOExecutionProvider", "XnnpackExecutionProvider")
"""Providers that compute in the host's memory."""

SCORES = 1 << 20
"""Attention scores a head that one run of the graph may hold, unless a single request needs more."""

ENCODERS = (
    "BertModel",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "RobertaModel",
    "RobertaForMaskedLM",
    "RobertaForSequenceClassification",
    "XLMRobertaModel",
    "XLMRobertaForMaskedLM",
    "XLMRobertaForSequenceClassification",
)

SUPPORT = (
    Support(
        tasks=(Task.EMBED, Task.RERANK),
        attention="bidirectional",
        architectures=ENCODERS,
        weights=("float32",),
        level=Level.NATIVE,
        features=("token_types",),
    ),
    Support(
        tasks=(Task.EMBED, Task.RERANK),
        attention="bidirectional",
        weights=("bfloat16", "float16"),
        level=Level.UNSUPPORTED,
        note="graphs compute in float32 here: take --dtype float32, or another backend",
    ),
    Support(
        tasks=tuple(Task),
        attention="causal",
        weights=("float32", "bfloat16", "float16"),
        level=Level.UNSUPPORTED,
        note="an ONNX graph has no paged KV cache, which decoders are served with: take another backend",
    ),
)


def providers(available: list[str], environ: Mapping[str, str]) -> list[str]:
    """Full names of the providers to offer, best first: those of ANYCORE_ONNX_PROVIDERS, else all.

    Raises:
        ValueError: one that is asked for is not in this build of ONNX Runtime; names those that are.
    """
    local = [name for name in available if name not in REMOTE]
    asked = [word.strip() for word in environ.get("ANYCORE_ONNX_PROVIDERS", "").split(",") if word.strip()]
    if not asked:
        return local
    known = {short(name): name for name in local}
    missing = [word for word in asked if short(word) not in known]
    if missing:
        raise ValueError(f"ANYCORE_ONNX_PROVIDERS names {missing[0]}, this ONNX Runtime has {', '.join(known)}")
    return [known[short(word)] for word in asked]


def short(provider: str) -> str:
    """`CPUExecutionProvider` → `cpu`."""
    return provider.removesuffix(SUFFIX).lower()


def probe() -> Probe:
    """Ask ONNX Runtime for its providers. Whether the device behind one answers shows when a model is loaded."""
    builds = "Install the build for your device: pip install onnxruntime (CPU), onnxruntime-gpu, onnxruntime-openvino"
    try:
        import onnxruntime

        found = providers(onnxruntime.get_available_providers(), os.environ)
    except ImportError as error:
        return Probe(reason=f"ImportError: {error}", advice=f"{builds}.")
    except ValueError as error:
        return Probe(reason=str(error), advice=f"Correct the setting. {builds}.")
    devices = [
        Device(i, f"ONNX Runtime {name}", short(name), memory_total() if name in ON_HOST else None)
        for i, name in enumerate(found)
    ]
    return Probe(devices=tuple(devices), versions={"onnxruntime": onnxruntime.__version__})


def open_device(index: int) -> Backend:
    """Open one provider. torch is imported here."""
    from anycore_onnx.device import OnnxBackend

    return OnnxBackend(index)


def workspace(shape: StepShape) -> int:
    """Graphs hold the scores of a run three times (product, mask added, softmax), and padded activations."""
    scores = min(max(shape.longest**2, SCORES), shape.rows * shape.longest)
    return 12 * shape.heads * scores + activation_bytes(shape)


SPEC = BackendSpec(
    name="onnx",
    api=(1, 1),
    support=SUPPORT,
    probe=probe,
    open=open_device,
    priority=-10,  # below the CPU backend, which is faster where both compute on the host
    memory_utilization=0.5,
    workspace=workspace,
)


@hookimpl
def register_backends() -> list[BackendSpec]:
    return [SPEC]
