"""The kernels at both ends of a step as functions of tensors: embeddings, angles, pooling, sampling."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from anycore.contract.batch import Sampling
from anycore_cpu.kernels import quantised
from anycore_cpu.kernels.attention import address, expect
from anycore_cpu.kernels.library import Kernels, is_wide
from anycore_cpu.kernels.quantised import QuantisedMatrix

Table = Tensor | QuantisedMatrix

TABLES = 3  # of one sum
POOLINGS = ("max", "mean")


EACH = 0
"""The height of a table whose rows are those wanted, one after the other."""


def gather(kernels: Kernels, parts: Sequence[tuple[Tensor | None, Table]], scale: float = 1.0) -> Tensor:
    """`scale` times the sum of up to three tables' rows [V, H] at ids [T]; ids of None: the first row for all.

    Rows of quantised tables, which are always taken by ids, are rounded to bfloat16 before they are added.
    """
    rows = next(len(ids) for ids, _ in parts if ids is not None)
    tables = [opened(kernels, ids, table) for ids, table in parts]
    dtype, width = tables[0][0].dtype, tables[0][0].shape[1]
    out = torch.empty(rows, width, dtype=dtype)
    given: list[int | None] = []
    for table, ids, height in tables:
        if table.dtype != dtype or table.shape[1] != width or not table.is_contiguous():
            raise ValueError(f"tables are whole rows of {width} {dtype}, not of {table.dtype} {tuple(table.shape)}")
        if ids is not None and (ids.dtype != torch.int64 or not ids.is_contiguous()):
            raise ValueError(f"ids are int64, side by side, not {ids.dtype} {ids.stride()} apart")
        expect("ids", ids, torch.int64, rows)
        given += [table.data_ptr(), address(ids), height]
    given += [None, None, 0] * (TABLES - len(parts))
    kernels.library.anycore_gather(*given, rows, width, scale, is_wide(dtype), out.data_ptr())
    return out


def opened(kernels: Kernels, ids: Tensor | None, table: Table) -> tuple[Tensor, Tensor | None, int]:
    """A table as the kernel reads it, with ids and height; of a quantised one the rows at these ids."""
    if not isinstance(table, QuantisedMatrix):
        return table, ids, len(table)
    if ids is None:
        raise ValueError("rows of a quantised table are taken by ids")
    return quantised.embedding(kernels, ids, table), None, EACH


def angles(kernels: Kernels, positions: Tensor, frequencies: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, D/2] of positions [T] times frequencies [D/2]."""
    rows, size = len(positions), len(frequencies)
    expect("positions", positions, torch.int64, rows)
    expect("frequencies", frequencies, torch.float32, size)
    cos, sin = torch.empty(rows, size, dtype=torch.float32), torch.empty(rows, size, dtype=torch.float32)
    positions, frequencies = positions.contiguous(), frequencies.contiguous()
    kernels.library.anycore_angles(
        positions.data_ptr(), frequencies.data_ptr(), scale, rows, size, cos.data_ptr(), sin.data_ptr()
    )
    return cos, sin


def pool(kernels: Kernels, rows: Tensor, starts: Tensor, kind: str) -> Tensor:
    """Rows [T, H], of which each request has those from one start [B + 1] int32 to the next → [B, H] float32."""
    rows, starts, width = rows.contiguous(), starts.contiguous(), rows.shape[1]
    expect("starts", starts, torch.int32, len(starts))
    out = torch.empty(len(starts) - 1, width, dtype=torch.float32)
    kernels.library.anycore_pool(
        rows.data_ptr(), starts.data_ptr(), len(out), width, kind == "mean", is_wide(rows.dtype), out.data_ptr()
    )
    return out


def choose(kernels: Kernels, logits: Tensor, params: Sampling) -> tuple[Tensor, Tensor]:
    """Ids [R] by logits [R, V] float32, which are edited already, and whether these are finite."""
    rows, count = logits.shape
    expect("logits", logits, torch.float32, rows, count)
    numbers = {"temperature": torch.float32, "uniforms": torch.float64, "top_k": torch.int64}
    for name in ("temperature", "uniforms", "top_k", "top_p", "min_p"):
        expect(name, getattr(params, name), numbers.get(name, torch.float32), rows)
    logits = logits.contiguous()
    ids, finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    filters = (params.top_k, params.top_p, params.min_p)
    given = [None if x is None else x.contiguous() for x in (params.temperature, params.uniforms, *filters)]
    addresses = [address(x) for x in given]
    kernels.library.anycore_sample(
        logits.data_ptr(), rows, count, *addresses, params.all_greedy, ids.data_ptr(), finite.data_ptr()
    )
    return ids, finite
