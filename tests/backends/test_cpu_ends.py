"""The CPU kernels at both ends of a step, at every level that runs here: embeddings, angles, pooling, sampling."""

from __future__ import annotations

import math

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract import sampling
from anycore.contract.batch import Sampling
from anycore.contract.check_weights import exact_rows, int8_weight
from anycore_cpu.kernels import ends, quantised
from anycore_cpu.kernels.library import Kernels

DTYPES = {"float32": (torch.float32, 1e-6), "bfloat16": (torch.bfloat16, 2**-8)}


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DTYPES)
def test_sums_of_embeddings(kernels: Kernels, name: str) -> None:
    dtype, tolerance = DTYPES[name]
    for width, rows in ((7, 3), (64, 1), (100, 40), (768, 33)):
        words, types, places = (numbers(width + i, 50, width).to(dtype) for i in range(3))
        ids, at = torch.randint(0, 50, (2, rows), generator=torch.Generator().manual_seed(rows))
        assert torch.equal(ends.gather(kernels, [(ids, words)]), words[ids])
        scaled = ends.gather(kernels, [(ids, words)], 24.0)
        torch.testing.assert_close(scaled.double(), words[ids].double() * 24, rtol=tolerance, atol=0)
        total = ends.gather(kernels, [(ids, words), (None, types), (at, places)])
        exact = words[ids].double() + types[0].double() + places[at].double()
        torch.testing.assert_close(total.double(), exact, rtol=tolerance, atol=1e-6)


def test_rows_of_a_quantised_table_are_summed_with_others(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(3)
    for width, rows in ((32, 3), (100, 40), (384, 33)):
        weight = int8_weight((50, width), width, torch.bfloat16, generator)
        table, places = quantised.pack(kernels, weight), numbers(width, 60, width).bfloat16()
        ids, at = torch.randint(0, 50, (2, rows), generator=generator)
        alone = ends.gather(kernels, [(ids, table)], 3.0)
        exact = exact_rows(weight)[ids]
        torch.testing.assert_close(alone.double(), 3 * exact, rtol=2**-7, atol=0)
        for parts in ([(ids, table), (None, places), (at, places)], [(None, places), (ids, table), (at, places)]):
            total = ends.gather(kernels, parts)
            wanted = exact.bfloat16().double() + places[0].double() + places[at].double()
            torch.testing.assert_close(total.double(), wanted, rtol=2**-8, atol=2**-7)
    ids = torch.tensor([49, 50, -1])
    assert ends.gather(kernels, [(ids, table), (None, places)]).isnan().all(1).tolist() == [False, True, True]
    with pytest.raises(ValueError, match="taken by ids"):
        ends.gather(kernels, [(ids, places), (None, table)])


def test_an_id_that_no_table_has_gives_nan(kernels: Kernels) -> None:
    table = numbers(0, 5, 20)
    found = ends.gather(kernels, [(torch.tensor([4, 5, -1, 0]), table)])
    assert found.isnan().all(1).tolist() == [False, True, True, False]
    with pytest.raises(ValueError, match=r"whole rows of 20 torch\.float32"):
        ends.gather(kernels, [(torch.tensor([1]), table), (None, table[:, 1:])])


def test_angles(kernels: Kernels) -> None:
    positions = torch.tensor([0, 1, 17, 4095, 131071])
    frequencies = 10000.0 ** -(torch.arange(32) / 32)
    cos, sin = ends.angles(kernels, positions, frequencies, 1.25)
    angles = (positions[:, None].float() * frequencies).double()
    torch.testing.assert_close(cos.double(), angles.cos() * 1.25, rtol=0, atol=2e-7)
    torch.testing.assert_close(sin.double(), angles.sin() * 1.25, rtol=0, atol=2e-7)


@pytest.mark.parametrize("name", DTYPES)
def test_pooling(kernels: Kernels, name: str) -> None:
    dtype, _ = DTYPES[name]
    for width in (5, 33, 384):
        x = numbers(width, 48, width).to(dtype)
        starts = torch.tensor([0, 1, 8, 48], dtype=torch.int32)
        parts = x.double().split([1, 7, 40])
        mean, largest = (ends.pool(kernels, x, starts, kind) for kind in ("mean", "max"))
        torch.testing.assert_close(mean.double(), torch.stack([p.mean(0) for p in parts]), rtol=1e-5, atol=1e-6)
        assert torch.equal(largest.double(), torch.stack([p.amax(0) for p in parts]))
        x[3] = math.nan
        assert ends.pool(kernels, x, starts, "max").isnan().any(1).tolist() == [False, True, False]


# --- sampling ---------------------------------------------------------------------------------------------------------

ROWS = 24


def filters(seed: int, count: int) -> dict[str, Tensor]:
    """Some rows have none of them, some are at the ends of their range."""
    generator = torch.Generator().manual_seed(seed)
    top_k = torch.randint(1, count + 1, (ROWS,), generator=generator)
    top_k[::3] = torch.tensor([1, 2, 5, 50, count, count, 40, 3])[: len(top_k[::3])].clamp(max=count)
    top_p = torch.rand(ROWS, generator=generator)
    top_p[::4], top_p[1] = 1.0, 0.0
    min_p = torch.rand(ROWS, generator=generator) * 0.3
    min_p[::2] = 0.0
    return {"top_k": top_k, "top_p": top_p, "min_p": min_p}


def kept(logits: Tensor, temperature: Tensor, chosen: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Exact probabilities [R, V], and how far each id is from one that filters leave out or in."""
    probs = sampling.filtered(
        logits.double() / temperature[:, None].double(), chosen.get("top_k"), chosen.get("top_p"), chosen.get("min_p")
    )
    return probs, probs.cumsum(-1) / probs.sum(-1, keepdim=True)


@pytest.mark.parametrize("count", [3, 16, 257, 5000])
@pytest.mark.parametrize("names", [(), ("top_k",), ("top_p",), ("min_p",), ("top_k", "top_p", "min_p")])
def test_draws_are_the_inverse_of_the_exact_distribution(kernels: Kernels, names: tuple[str, ...], count: int) -> None:
    logits = numbers(count, ROWS, count) * 3
    logits[2, : count // 2] = -math.inf
    logits[3] = logits[3].round()  # equals, of which the first ones stay
    temperature = torch.rand(ROWS, generator=torch.Generator().manual_seed(7)) + 0.3
    chosen = {name: x for name, x in filters(count, count).items() if name in names}
    probs, edges = kept(logits, temperature, chosen)
    for uniform in (0.0, 0.1, 0.37, 0.5, 0.85, 0.999999):
        params = Sampling(temperature, torch.full((ROWS,), uniform, dtype=torch.float64), **chosen)
        ids, finite = ends.choose(kernels, logits, params)
        assert finite.all()
        mine = probs.gather(1, ids[:, None])[:, 0]
        assert (mine > 0).all(), f"ids that were left out: {ids[mine == 0].tolist()}"
        upper = edges.gather(1, ids[:, None])[:, 0]
        lower = upper - mine / probs.sum(-1)
        assert (lower <= uniform + 1e-5).all()
        assert (upper >= uniform - 1e-5).all()


def test_filters_keep_exactly_what_they_should(kernels: Kernels) -> None:
    """Every id that may be drawn is, and no other."""
    count = 40
    logits = numbers(1, 1, count).round(decimals=1).expand(ROWS, -1).contiguous()  # with equals
    chosen = filters(5, count)
    probs, _ = kept(logits, torch.ones(ROWS), chosen)
    drawn = torch.zeros(ROWS, count, dtype=torch.bool)
    for uniform in torch.linspace(0, 0.9999, 700, dtype=torch.float64):
        ids, _ = ends.choose(kernels, logits, Sampling(torch.ones(ROWS), uniform.expand(ROWS).clone(), **chosen))
        drawn[torch.arange(ROWS), ids] = True
    assert torch.equal(drawn, probs > 0)


def test_greedy_rows_and_those_that_are_not_finite(kernels: Kernels) -> None:
    logits = numbers(2, 7, 1003)
    logits[0, 5] = logits[0, 900] = 9.0  # the first of equals
    logits[1, 1002] = 9.0
    logits[2, 77], logits[3, 1001], logits[4], logits[5, 3] = math.nan, math.nan, -math.inf, math.inf
    params = Sampling(torch.tensor([0.0, 1e-6, 1, 0, 1, 1, 0]), torch.full((7,), 0.5, dtype=torch.float64))
    for greedy in (False, True):
        params.all_greedy = greedy
        ids, finite = ends.choose(kernels, logits, params)
        assert finite.tolist() == [True, True, False, False, False, False, True]
        assert ids[[0, 1, 6]].tolist() == [5, 1002, int(logits[6].argmax())]
        assert ((ids >= 0) & (ids < 1003)).all()


def test_a_draw_never_feels_its_company(kernels: Kernels) -> None:
    logits, chosen = numbers(3, ROWS, 3000) * 2, filters(9, 3000)
    uniforms = torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    together, _ = ends.choose(kernels, logits, Sampling(torch.ones(ROWS), uniforms, **chosen))
    for i in range(ROWS):
        own = {name: x[i : i + 1] for name, x in chosen.items()}
        alone, _ = ends.choose(kernels, logits[i : i + 1], Sampling(torch.ones(1), uniforms[i : i + 1], **own))
        assert alone.item() == together[i]
