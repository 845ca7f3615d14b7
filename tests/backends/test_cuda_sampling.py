"""The CUDA backend's choosing of ids in the interpreter, against a float64 reference written from the definition."""

from __future__ import annotations

import pytest
import torch
from backends.cuda_interpreted import interpreted
from torch import Tensor

from anycore.contract import checks, sampling
from anycore.contract.batch import Sampling
from anycore_cuda.kernels import sampling as kernels
from anycore_cuda.kernels.sampling import choose

INF = float("inf")


def shares(logits: Tensor, temperature: float, k: int, p: float, min_p: float) -> Tensor:
    """[V] → [V] float64: the probability of each id after top-k, top-p, min-p; equal logits in the order of ids."""
    wide = logits.double() / temperature
    order = sorted(range(len(wide)), key=lambda i: (-float(wide[i]), i))[:k]
    mass = (wide - wide.max()).exp()
    total = float(mass[order].sum())
    kept, before = torch.zeros(len(wide), dtype=torch.float64), 0.0
    for place, i in enumerate(order):
        if (place == 0 or before < p * total) and mass[i] >= min_p:
            kept[i] = mass[i]
        before += float(mass[i])
    return kept / kept.sum()


def check(logits: Tensor, k: int | None, p: float | None, min_p: float | None, temperature: float = 0.7) -> int:
    """Every id that stays is drawn by the middle of its part of the distribution. Returns how many stay."""
    exact = shares(logits, temperature, k or len(logits), 1.0 if p is None else p, min_p or 0.0)
    wanted = (exact > 1e-5).nonzero()[:, 0]
    wanted = wanted[torch.linspace(0, len(wanted) - 1, min(len(wanted), 4)).long()]
    uniforms = (exact.cumsum(0) - exact / 2)[wanted]
    rows = len(wanted)
    (ids, again), finite = choose(
        logits.repeat(rows, 1), torch.full((rows,), temperature), uniforms,
        None if k is None else torch.full((rows,), k),
        None if p is None else torch.full((rows,), p),
        None if min_p is None else torch.full((rows,), min_p),
    )  # fmt: skip
    assert finite.all()
    assert again.tolist() == [1] * rows
    assert ids.tolist() == wanted.tolist()
    return int((exact > 0).sum())


FILTERS = [(7, None, None), (None, 0.8, None), (None, None, 0.2), (40, 0.6, 0.05), (5000, 0.99, None)]
SHAPES = {
    "peaked": lambda g, v: torch.randn(v, generator=g) * 3,
    "flat": lambda g, v: torch.randn(v, generator=g) * 0.05,
    "tied": lambda g, v: (torch.randn(v, generator=g) * 2).round(),
    "below zero": lambda g, v: torch.randn(v, generator=g) - 40,
    "both zeros": lambda g, v: torch.where(torch.arange(v) % 2 > 0, -0.0, 0.0),
}


CAPACITIES = (kernels.CAPACITY, 16)
"""What stays fits into registers at once, or after several passes. In turn: filters and shapes meet both."""


@pytest.mark.parametrize(
    ("filters", "shape", "capacity"),
    [
        (filters, shape, CAPACITIES[(row + column) % 2])
        for row, filters in enumerate(FILTERS)
        for column, shape in enumerate(SHAPES)
    ],
    ids=str,
)
def test_what_stays_is_what_the_definition_keeps(
    filters: tuple[int | None, float | None, float | None],
    shape: str,
    capacity: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernels, "CAPACITY", capacity)
    check(SHAPES[shape](torch.Generator().manual_seed(5), 700), *filters)


@pytest.mark.parametrize("filters", [(3, None, None), (None, 0.5, None), (None, None, 0.5), (5000, 0.5, 0.1)], ids=str)
def test_equal_logits_by_the_thousand(filters: tuple[int | None, float | None, float | None]) -> None:
    k, p, _ = filters
    kept = check(torch.full((9001,), 1.5), *filters)
    assert kept == {3: 3, None: 4501 if p else 9001, 5000: 2500}[k]


def test_one_living_id_and_hardly_any_mass() -> None:
    lone = torch.full((700,), -INF)
    lone[333] = -2.0
    few = lone.clone()
    few[5], few[600] = -2.5, -3.0
    for filters in [(50, None, None), (None, 0.9, None), (None, None, 0.1), (50, 0.999, 0.01)]:
        check(lone, *filters)
        check(few, *filters)
    steep = torch.randn(700, generator=torch.Generator().manual_seed(0))
    for p in (0.0, 1e-30, 1e-6):
        assert check(steep, None, p, None) == 1
    assert check(steep, 5000, 0.5, None, 1e-4) == 1


def test_rows_of_all_kinds_together_are_what_they_are_alone() -> None:
    generator = torch.Generator().manual_seed(1)
    rows, vocab = 12, 300
    logits = (torch.randn(rows, vocab, generator=generator) * 2).bfloat16().float()
    temperature = torch.tensor([0.0, 1e-6] + [0.7] * (rows - 2))
    uniforms = torch.rand(rows, dtype=torch.float64, generator=generator)
    top_k = torch.tensor([3, 5, vocab, 2, 7, 1, vocab, 4, vocab, vocab, 300, 9])
    top_p = torch.tensor([0.9, 0.5, 0.8, 0.7, 0.6, 1.0, 1.0, 0.0, 1.0, 0.95, 0.999, 1.0])
    min_p = torch.tensor([0.0, 0.1, 0.0, 0.5, 0.0, 0.2, 0.0, 0.0, 0.3, 0.0, 0.001, 0.0])
    (together, _), _ = choose(logits, temperature, uniforms, top_k, top_p, min_p)
    reference = sampling.sample(logits.clone(), Sampling(temperature, uniforms, top_k, top_p, min_p)).ids
    assert together.tolist() == reference.tolist()
    assert together[:2].tolist() == logits[:2].argmax(-1).tolist()
    for i in range(rows):
        one = slice(i, i + 1)
        (alone, _), _ = choose(logits[one], temperature[one], uniforms[one], top_k[one], top_p[one], min_p[one])
        assert alone[0] == together[i]
    (plain, _), _ = choose(logits, temperature, uniforms)
    assert plain[6] == together[6]
    assert plain.tolist() == sampling.sample(logits.clone(), Sampling(temperature, uniforms)).ids.tolist()


def test_rows_that_are_not_finite_are_reported() -> None:
    logits = torch.zeros(5, 190)
    logits[0, 3], logits[1, 150], logits[2], logits[3, 100:] = float("nan"), INF, -INF, -INF
    ones, uniforms = torch.ones(5), torch.rand(5, dtype=torch.float64)
    for filters in ((None, None, None), (None, ones * 0.5, None), (torch.full((5,), 3), None, ones * 0.1)):
        (ids, again), finite = choose(logits, ones, uniforms, *filters)
        assert finite.tolist() == again.tolist() == [False, False, False, True, True]
        assert ids.min() >= 0
        assert ids.max() < 190


def test_edits_are_those_of_the_contract() -> None:
    checks.check_edits(interpreted())
