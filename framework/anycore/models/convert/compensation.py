"""Rounding that makes up for itself: what one input's weights lose is given to the inputs that go along with it.

After Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022). Scales
are chosen first, group by group; then columns are rounded one after the other, those of the largest inputs first, and
the columns still to come are changed such that the product of a text's inputs stays as near as it can. With 4 bits,
scales are then fitted to the whole numbers that were found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import Int4Weight, Int8Weight, QuantisedWeight, spread
from anycore.models.quantised.rounding import INT8, quantise

KEPT = (1.0, 0.95, 0.9, 0.85, 0.8)
"""Shares of a group's range that are tried."""
DAMPING = 0.01
"""Of the mean square of the inputs, added to each: a text does not tell all."""
CHANGE = 0.25
"""Of itself, by which a scale is changed at most."""
BLOCK = 128
"""Columns after which those still to come are changed."""
ROWS = 8192
"""Rows that are rounded at a time: a vocabulary's table in float32 would be large."""

EQUATIONS = 1 << 24
"""Numbers of the systems that are solved at a time."""

WholeNumbers = Int4Weight | Int8Weight


def clipped(weight: Tensor, wanted: Format, importance: Tensor) -> WholeNumbers:
    """Round each group over the share of its range at which the weighted squares of its errors are least.

    `weight` is [out, in] float32, `importance` [in] the mean square of each input.
    """
    group, columns = wanted.group or weight.shape[1], weight.shape[1]
    grouped = weight.view(len(weight), -1, group)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    if wanted.kind == "int8":  # which has no zero point
        high = torch.maximum(high, -low)
        low = -high
    best: WholeNumbers | None = None
    least = torch.empty(0)
    for share in KEPT:
        tried = whole_numbers(grouped.clamp(low * share, high * share).view_as(weight), wanted)
        loss = ((tried.dense() - weight).pow(2) * importance).view_as(grouped).sum(-1)
        if best is None:
            best, least = tried, loss
            continue
        better = loss < least
        least = torch.where(better, loss, least)
        best = chosen(better, tried, best, spread(better, group, columns))
    assert best is not None
    return best


def chosen(better: Tensor, one: WholeNumbers, other: WholeNumbers, each: Tensor) -> WholeNumbers:
    """The groups of one where they are better, by group and by element, else those of the other."""
    found = replace(
        other, data=torch.where(each, one.data, other.data), scale=torch.where(better, one.scale, other.scale)
    )
    if isinstance(found, Int4Weight):
        assert isinstance(one, Int4Weight)
        return replace(found, zero=torch.where(better, one.zero, found.zero))
    return found


def whole_numbers(weight: Tensor, wanted: Format) -> WholeNumbers:
    found = quantise(weight, wanted)
    assert isinstance(found, (Int4Weight, Int8Weight)), wanted
    return found


def compensated(weight: Tensor, squares: Tensor, wanted: Format) -> WholeNumbers:
    """Round a matrix [out, in] float32, given the mean products of its inputs with one another, `squares` [in, in]."""
    factor, order = inverse_factor(squares)
    parts = [
        rounded(weight[first : first + ROWS], squares, factor, order, wanted) for first in range(0, len(weight), ROWS)
    ]
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names_of(parts[0])}
    return replace(parts[0], **whole)


def cut(weight: WholeNumbers, parts: Sequence[tuple[str, int]]) -> dict[str, QuantisedWeight]:
    """The rows of a fused matrix as matrices of their own, by name; `parts` are names and how many rows each has."""
    found: dict[str, QuantisedWeight] = {}
    first = 0
    for name, rows in parts:
        own: dict[str, Any] = {
            field: getattr(weight, field)[first : first + rows].clone() for field in names_of(weight)
        }
        found[name] = replace(weight, **own)
        first += rows
    return found


def names_of(weight: WholeNumbers) -> tuple[str, ...]:
    """The fields that have a row for each of the matrix's."""
    return ("data", "scale", "zero") if isinstance(weight, Int4Weight) else ("data", "scale")


def inverse_factor(squares: Tensor) -> tuple[Tensor, Tensor]:
    """The upper Cholesky factor of the inverse of `squares`, damped, its columns in the order that is returned, too.

    Row i says how the inputs after the i-th, by that order, make up for an error in the i-th's weights.
    """
    wide = squares.double()
    diagonal = wide.diagonal()
    order = diagonal.argsort(descending=True)
    wide = wide[order][:, order] + damping(squares) * torch.eye(len(wide), dtype=torch.float64)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(wide))
    return torch.linalg.cholesky(inverse, upper=True).float(), order


def damping(squares: Tensor) -> float:
    return DAMPING * float(squares.diagonal().mean()) or 1.0


def rounded(weight: Tensor, squares: Tensor, factor: Tensor, order: Tensor, wanted: Format) -> WholeNumbers:
    """Round some rows of a matrix; see `compensated`."""
    found = clipped(weight, wanted, squares.diagonal())
    columns = weight.shape[1]
    low, high = (0.0, 15.0) if isinstance(found, Int4Weight) else (-INT8, INT8)
    scales = spread(found.scale, found.group, columns).T[order].contiguous()  # [in, out], as all below
    zeros = spread(found.zero, found.group, columns).T[order].contiguous() if isinstance(found, Int4Weight) else None
    left = weight.T[order].contiguous()
    data = torch.empty(columns, len(weight), dtype=found.data.dtype)
    for first in range(0, columns, BLOCK):
        last = min(first + BLOCK, columns)
        lost = torch.empty(last - first, len(weight))
        for i in range(first, last):
            whole = left[i] / scales[i]
            whole = whole.round_() if zeros is None else whole.round_().add_(zeros[i])
            whole = whole.clamp_(low, high)
            data[i] = whole.to(data.dtype)
            held = whole if zeros is None else whole - zeros[i]
            lost[i - first] = (left[i] - held * scales[i]) / factor[i, i]
            left[i + 1 : last].addr_(factor[i, i + 1 : last], lost[i - first], alpha=-1)
        left[last:].addmm_(factor[first:last, last:].T, lost, alpha=-1)
    found = replace(found, data=torch.empty_like(data).index_copy_(0, order, data).T.contiguous())
    return fitted(found, weight, squares) if isinstance(found, Int4Weight) else found


def fitted(found: Int4Weight, weight: Tensor, squares: Tensor) -> Int4Weight:
    """Change scales, all of a row at once, such that the product is as near as these whole numbers let it be.

    Damped as inputs are, and so are changes: what a text hardly tells of stays.
    """
    columns, groups = weight.shape[1], found.scale.shape[1]
    whole = found.data.float() - spread(found.zero, found.group, columns)
    left = weight - whole * spread(found.scale, found.group, columns)
    damped = squares + damping(squares) * torch.eye(columns)
    step = max(1, EQUATIONS // groups**2)
    pairs = zip(torch.split(whole, step), torch.split(left, step), strict=True)
    change = torch.cat([solved(*pair, damped, found.group) for pair in pairs])
    scale = found.scale + change.clamp(-CHANGE * found.scale, CHANGE * found.scale)
    return replace(found, scale=scale.bfloat16().float())


def solved(whole: Tensor, left: Tensor, squares: Tensor, group: int) -> Tensor:
    """[rows, groups]: how much of a group's whole numbers is in what is left of the weights, both [rows, in]."""
    by_group = (len(whole), -1, group)
    system = torch.stack(
        [
            (numbers @ some * whole).view(by_group).sum(-1)
            for numbers, some in zip(torch.split(whole, group, 1), torch.split(squares, group), strict=True)
        ],
        dim=1,
    )
    own = system.diagonal(dim1=1, dim2=2)
    own += DAMPING * own + 1e-12  # groups of zeros tell nothing
    found: Tensor = torch.linalg.solve(system, (left @ squares * whole).view(by_group).sum(-1))
    return found
