"""The kernels that change logits before an id is chosen, as functions of tensors: masks, penalties, biases, bans.

All of them take logits [R, V] float32, whose rows lie side by side, and change them in place.
"""

from __future__ import annotations

from torch import Tensor, float32, int32, int64

from anycore.contract.batch import Penalties
from anycore_cpu.kernels.attention import expect
from anycore_cpu.kernels.library import Kernels


def mask(kernels: Kernels, logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Leave rows [K] int64 only the ids that words [K, ceil(V / 32)] int32 allow."""
    _, count = _shape(logits)
    masked = len(rows)
    expect("rows", rows, int64, masked)
    expect("words", words, int32, masked, -(-count // 32))
    rows, words = rows.contiguous(), words.contiguous()
    kernels.library.anycore_mask(logits.data_ptr(), count, rows.data_ptr(), words.data_ptr(), masked)


def penalise(kernels: Kernels, logits: Tensor, penalties: Penalties) -> None:
    """As `contract.sampling.penalised`, to the last bit, for rows that each come once."""
    rows, count = _shape(logits)
    p, penalised, height = penalties, len(penalties.rows), len(penalties.counts)
    if not p.counts.is_contiguous():
        raise ValueError("counts are whole rows, side by side")
    expect("counts", p.counts, int32, height, count)
    expect("places", p.places, int64, penalised)
    expect("rows", p.rows, int64, penalised)
    numbers = {"repetition": p.repetition, "presence": p.presence, "frequency": p.frequency}
    for name, values in numbers.items():
        expect(name, values, float32, penalised)
    given = [x.contiguous() for x in (p.rows, p.places, *numbers.values())]
    which, places, *addresses = (x.data_ptr() for x in given)
    kernels.library.anycore_penalise(
        logits.data_ptr(), rows, count, which, p.counts.data_ptr(), height, places, *addresses, penalised
    )


def add(kernels: Kernels, logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """Add values [N] float32 to ids [N] int64 of rows [N] int64."""
    expect("values", values, float32, len(ids))
    values = values.contiguous()
    which, places = _places(rows, ids)
    kernels.library.anycore_add(
        logits.data_ptr(), *_shape(logits), which.data_ptr(), places.data_ptr(), values.data_ptr(), len(ids)
    )


def ban(kernels: Kernels, logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """Make ids [N] int64 of rows [N] int64 impossible."""
    which, places = _places(rows, ids)
    kernels.library.anycore_ban(logits.data_ptr(), *_shape(logits), which.data_ptr(), places.data_ptr(), len(ids))


def _shape(logits: Tensor) -> tuple[int, int]:
    rows, count = logits.shape
    expect("logits", logits, float32, rows, count)
    if not logits.is_contiguous():
        raise ValueError("logits are changed in place, so that their rows have to lie side by side")
    return rows, count


def _places(rows: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    expect("rows", rows, int64, len(ids))
    expect("ids", ids, int64, len(ids))
    return rows.contiguous(), ids.contiguous()
