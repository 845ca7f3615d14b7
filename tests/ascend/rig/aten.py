"""Every aten operator that torch_npu has a kernel for, computed by torch's CPU kernel over the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rig.capture import RECORDER
from rig.host import device, host, scribble
from rig.limits import need

NPU = "PrivateUse1"

KEPT = {
    *("aten::empty.memory_format", "aten::empty_strided", "aten::_local_scalar_dense", "aten::resize_"),
    *("aten::set_", "aten::set_.source_Tensor", "aten::set_.source_Storage", "aten::set_data", "aten::is_set_to"),
    *("aten::set_.source_Storage_storage_offset", "aten::record_stream", "aten::is_pinned", "aten::_pin_memory"),
    *("aten::_has_compatible_shallow_copy_type", "aten::_reshape_alias", "aten::_lazy_clone"),
}
"""Operators about storage, which torch_npu's own kernels do."""

COUNTED = "aten::scaled_dot_product_attention"


def kernels(count: Callable[[str], None]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Name and kernel of each operator to replace; `count` hears of attention."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for full in torch._C._dispatch_get_all_op_names():
        space, _, rest = full.partition("::")
        if space != "aten" or full in KEPT or not has(full, NPU):
            continue
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if operator is None or is_view(operator._schema):  # the wheel has a few kernels without a schema
            continue
        if full == "aten::copy_":
            yield rest, copy
        elif full == "aten::_to_copy":
            yield rest, without_doubles(kernel(operator))
        elif full == COUNTED:
            yield rest, attention(operator, count)
        else:
            yield rest, kernel(operator)


def is_view(schema: Any) -> bool:
    return any(result.alias_info and not result.alias_info.is_write for result in schema.returns)


def attention(operator: Any, count: Callable[[str], None]) -> Callable[..., Any]:
    """torch's attention: on a chip it becomes a fused operator that cannot be captured."""
    run = kernel(operator)

    def counted(*args: Any, **kwargs: Any) -> Any:
        need(not RECORDER.capturing, "scaled_dot_product_attention becomes npu_fusion_attention, which no graph takes")
        count(COUNTED)
        return run(*args, **kwargs)

    return counted


def without_doubles(run: Callable[..., Any]) -> Callable[..., Any]:
    """A conversion on the device, where torch_npu makes float32 of what should become float64."""

    def convert(x: Tensor, **kwargs: Any) -> Any:
        stays = torch.device(kwargs.get("device") or "npu").type == "npu"
        if stays and kwargs.get("dtype") == torch.float64:
            kwargs["dtype"] = torch.float32
        return run(x, **kwargs)

    return convert


def kernel(operator: Any) -> Callable[..., Any]:
    """The CPU operator, on CPU tensors over the arguments' bytes."""
    schema = operator._schema
    outs = [argument.name for argument in schema.arguments if argument.is_out]
    written = [
        (place, argument.name)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write and not argument.is_out
    ]

    def run(*args: Any, **kwargs: Any) -> Any:
        lent: dict[int, Tensor] = {}  # id of a CPU tensor -> the npu tensor whose bytes it shows
        kept: list[Tensor] = []  # keeps those ids in use
        places: list[torch.device] = []

        def lend(value: Any) -> Any:
            if isinstance(value, Tensor) and value.device.type == "npu":
                places.append(value.device)
                kept.append(host(value))
                lent[id(kept[-1])] = value
                return kept[-1]
            if isinstance(value, torch.device) and value.type == "npu":
                places.append(value)
                return torch.device("cpu")
            return None if isinstance(value, torch.Generator) else value

        def lend_all(value: Any) -> Any:
            return tree_map(lend, value) if isinstance(value, (list, tuple, dict)) else lend(value)

        wanted = {name: kwargs[name] for name in outs if name in kwargs}
        given, named = [lend_all(value) for value in args], {name: lend_all(value) for name, value in kwargs.items()}
        for name, out in wanted.items():
            named[name] = torch.empty(0, dtype=out.dtype)  # the CPU operator sizes its own output
        where = places[0] if places else torch.device("npu", torch.npu.current_device())
        touched = [given[place] if place < len(given) else named.get(name) for place, name in written]
        before = [x.clone() if isinstance(x, Tensor) else None for x in touched] if RECORDER.capturing else []
        result = operator(*given, **named)
        results = list(result) if isinstance(result, (tuple, list)) else [result]
        if torch.device(kwargs.get("device") or "npu").type == "cpu":
            need(not RECORDER.capturing, f"{operator} copies to the host while the stream is captured")
            return result.clone() if isinstance(result, Tensor) and id(result) in lent else result

        final: list[Any] = []
        new: list[tuple[int, Tensor]] = []  # index in results, bytes to fill
        for index, item in enumerate(results):
            if not isinstance(item, Tensor):
                final.append(item)
            elif id(item) in lent:
                final.append(lent[id(item)])
            else:
                name = next((name for name in wanted if named[name] is item), None)
                out = device(item, where) if name is None else fill(wanted[name], item)
                final.append(out)
                new.append((index, host(out)))
        if RECORDER.capturing:
            for tensor, old in zip(touched, before, strict=True):
                if old is not None:
                    tensor.copy_(old)
            for _, tensor in new:
                scribble(tensor)

            def again() -> None:
                repeated = operator(*given, **named)
                listed = list(repeated) if isinstance(repeated, (tuple, list)) else [repeated]
                for index, tensor in new:
                    tensor.copy_(listed[index])

            RECORDER.launch(again)
        if not isinstance(result, (tuple, list)):
            return final[0]
        return final if isinstance(result, list) else tuple(final)

    return run


def fill(out: Tensor, result: Tensor) -> Tensor:
    """An `out=` argument with the result in it."""
    if out.shape != result.shape:
        out.resize_(result.shape)
    host(out).copy_(result)
    return out


def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """copy_ between devices, types and layouts."""
    if RECORDER.capturing and to.device != source.device:
        pinned = source.device.type == "cpu" and source.is_pinned()
        need(pinned, "copy between host and device while the stream is captured, and not from pinned memory")
    bytes_to, bytes_from = host(to), host(source)
    RECORDER.launch(lambda: bytes_to.copy_(bytes_from))
    return to
