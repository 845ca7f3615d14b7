"""Puts the references behind the schemas that torch_npu registered, and counts the calls.

A call with a wrong name, type or arity fails before it comes here. torch_npu's own C++ runs first, over operators that
do nothing: its checks are the real ones, and what the reference fills is the tensor that it allocated.
"""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rig import aten, attention, cache, layers, quant
from rig.capture import RECORDER
from rig.host import host, scribble
from rig.limits import LimitError, need

NPU = "PrivateUse1"

CALLS: Counter[str] = Counter()
"""Calls of each operator since the process began; tests take differences."""

REFERENCES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "npu::npu_fused_infer_attention_score": attention.fused_infer_attention,
    "npu::npu_fused_infer_attention_score.out": attention.fused_infer_attention,
    "npu::npu_fused_infer_attention_score_v2": attention.fused_infer_attention,
    "npu::npu_fused_infer_attention_score_v2.out": attention.fused_infer_attention,
    "npu::_npu_fused_infer_attention_score_get_max_workspace": attention.workspace,
    "npu::_npu_fused_infer_attention_score_infer_output": attention.infer_output,
    "npu::npu_fusion_attention": attention.fusion_attention,
    "npu::npu_scatter_pa_kv_cache": cache.scatter,
    "npu::npu_gather_pa_kv_cache": cache.gather,
    "npu::npu_scatter_nd_update_": cache.scatter_nd,
    "npu::npu_rms_norm": layers.rms_norm,
    "npu::npu_add_rms_norm": layers.add_rms_norm,
    "npu::npu_swiglu": layers.swiglu,
    "npu::npu_rotary_mul": layers.rotary_mul,
    "npu::npu_apply_rotary_pos_emb": layers.apply_rotary,
    "npu::npu_dynamic_quant": quant.dynamic_quant,
    "npu::npu_quant_matmul": quant.quant_matmul,
    "npu::npu_weight_quant_batchmatmul": quant.weight_quant_matmul,
    "npu::npu_convert_weight_to_int4pack": quant.to_int4,
    "atb::_npu_reshape_and_cache": cache.reshape_and_cache,
}

WITHOUT_HOST_CODE = (
    "npu::_npu_fused_infer_attention_score_get_max_workspace",
    "npu::_npu_fused_infer_attention_score_infer_output",
    "npu::npu_convert_weight_to_int4pack",
)
"""Operators whose own C++ is not run: it would want more of CANN than its names."""

HOST_ONLY = (
    *("npu::get_npu_format", "npu::empty_with_format", "npu::unsafe_empty_with_format", "npu::npu_change_data_ptr"),
    *("npu::npu_format_cast", "npu::_npu_format_cast"),  # formats other than plain are switched off on these chips
)
"""Operators that touch no device: torch_npu's own code is all there is to them."""


class Rig:
    """Keeps alive what C and the dispatcher point to."""

    def __init__(self) -> None:
        need(os.environ.get("TASK_QUEUE_ENABLE") == "0", "set TASK_QUEUE_ENABLE=0: launches must be synchronous here")
        runtime = ctypes.CDLL("libascendcl.so")
        self.listener = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.c_size_t)(RECORDER.listen)
        runtime.standin_listen(self.listener)
        self.libraries = {space: torch.library.Library(space, "IMPL") for space in ("aten", "npu", "atb")}
        for name, kernel in list(aten.kernels(count)):
            self.libraries["aten"].impl(name, kernel, NPU, allow_override=True)
        for name, reference in REFERENCES.items():
            self.replace(name, reference)
        for name in others():
            self.refuse(name)

    def replace(self, name: str, reference: Callable[[dict[str, Any]], Any]) -> None:
        operator = operator_of(name)
        own_code = name.startswith("npu::") and name not in WITHOUT_HOST_CODE
        original = torch.library.get_kernel(operator, NPU) if own_code else None
        space, _, rest = name.partition("::")
        self.libraries[space].impl(rest, kernel(name, operator, reference, original), NPU, allow_override=True)

    def refuse(self, name: str) -> None:
        space, _, rest = name.partition("::")

        def refused(*args: Any, **kwargs: Any) -> Any:
            raise LimitError(f"{name} has no reference in the rig: write one with its documented limits, or leave it")

        self.libraries[space].impl(rest, refused, NPU, allow_override=True)


def others() -> list[str]:
    """Operators of torch_npu that have a device kernel and no reference."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = {*REFERENCES, *HOST_ONLY}
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("npu::", "atb::"))]
    return [name for name in names if name not in known and has(name, NPU) and has_schema(name)]


def has_schema(name: str) -> bool:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return hasattr(getattr(getattr(torch.ops, space), packet, None), overload or "default")


def operator_of(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def count(name: str) -> None:
    CALLS[name] += 1


def kernel(name: str, operator: Any, reference: Callable[[dict[str, Any]], Any], original: Any) -> Callable[..., Any]:
    """The kernel of one operator: torch_npu's host code, then the reference on its output."""
    schema = operator._schema
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    in_place = any(argument.alias_info and argument.alias_info.is_write for argument in schema.arguments)
    defaults = {argument.name: argument.default_value for argument in schema.arguments}  # as the wheel registered them

    def run(*args: Any, **kwargs: Any) -> Any:
        count(name)
        given = {**defaults, **dict(zip(defaults, args, strict=False)), **kwargs}
        there = {key: host(value) for key, value in given.items()}
        made = None if original is None else original.call_boxed(keys, *args, **kwargs)
        if "out" in given:
            into = there["out"][0]
            RECORDER.launch(lambda: into.copy_(reference(there)[0].view_as(into)))
            return tuple(given["out"])
        if in_place:
            RECORDER.launch(lambda: reference(there))
            return made
        if made is None:
            made = allocate(reference(there), args)
        listed = made if isinstance(made, (tuple, list)) else (made,)
        outputs = [host(output) for output in listed]
        if RECORDER.capturing:
            for output in outputs:
                if isinstance(output, Tensor):
                    scribble(output)
        RECORDER.launch(lambda: give(name, reference(there), outputs))
        return tuple(made) if isinstance(made, list) else made

    return run


def allocate(result: Any, args: tuple[Any, ...]) -> Any:
    """npu tensors like the reference's results, where no C++ allocates them."""
    where = next(x.device for x in args if isinstance(x, Tensor))
    if isinstance(result, Tensor):
        return torch.empty(result.shape, dtype=result.dtype, device=where)
    return tuple(allocate(item, args) if isinstance(item, Tensor) else item for item in result)


def give(name: str, result: Any, outputs: list[Any]) -> None:
    """Fill the allocated outputs; the first must be what the reference computed, statistics may be left out."""
    results = result if isinstance(result, tuple) else (result,)
    for place, (output, found) in enumerate(zip(outputs, results, strict=True)):
        if not isinstance(found, Tensor) or (place and output.shape != found.shape):
            continue
        same = output.shape == found.shape and output.dtype == found.dtype
        allocated, computed = (f"{tuple(x.shape)} {x.dtype}" for x in (output, found))
        need(same, f"{name}: torch_npu allocates {allocated}, the reference computes {computed}")
        output.copy_(found)
