"""Sampling: cases S04, S05, S06 and S08 on given logits, and the draws themselves."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest
import torch
from sequences import sequence

from anycore.contract.batch import IN_PROMPT, Penalties, Sampling
from anycore.contract.sampling import filtered, penalised, sample
from anycore.engine.request import SamplingParams
from anycore.engine.sampler import Sampler, _count_here, draws, mixed_seeds
from anycore.engine.sequence import Request
from anycore.errors import BadRequest

LOGITS = [2.0, 1.0, 0.0, -1.0]
PROBS = [0.643914, 0.236883, 0.087144, 0.032059]


def kept(**filters: float) -> set[int]:
    """Ids that one row of LOGITS keeps under some filters."""
    tensors = {name: torch.tensor([value]) for name, value in filters.items()}
    probs = filtered(torch.tensor([LOGITS]), tensors.get("top_k"), tensors.get("top_p"), tensors.get("min_p"))
    return set(probs[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.65}, {0, 1}),
        ({"top_p": 0.9}, {0, 1, 2}),
        ({"top_p": 1.0}, {0, 1, 2, 3}),
        ({"top_p": 0.0}, {0}),
        ({"min_p": 0.2}, {0, 1}),
        ({"min_p": 1.0}, {0}),
        ({"top_k": 1}, {0}),
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 1000}, {0, 1, 2, 3}),
        ({"top_k": 2, "top_p": 0.5}, {0}),
        ({"top_k": 2, "top_p": 0.74}, {0, 1}),  # 0.643914 / (0.643914 + 0.236883) = 0.731: top-k comes first
    ],
)
def test_s04_filters_keep_the_right_ids(filters: dict[str, float], ids: set[int]) -> None:
    assert kept(**filters) == ids


def test_s04_the_order_is_temperature_then_top_k_then_top_p_then_min_p_as_in_transformers() -> None:
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    for _ in range(20):
        logits = torch.randn(3, 50) * 3
        expected = logits
        for warper in (
            TemperatureLogitsWarper(0.7),
            TopKLogitsWarper(20),
            TopPLogitsWarper(0.8),
            MinPLogitsWarper(0.1),
        ):
            expected = warper(None, expected)
        ours = filtered(logits / 0.7, torch.full((3,), 20), torch.full((3,), 0.8), torch.full((3,), 0.1))
        assert torch.equal(ours > 0, torch.isfinite(expected))


def test_s04_minus_one_and_zero_switch_top_k_off() -> None:
    for value in (-1, 0):
        sampling = prepared(Sampler(4, torch.device("cpu")), [row(top_k=value, temperature=1.0)])
        assert sampling.top_k is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_k", -2),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", 2.1),
        ("temperature", 1e308),
        ("top_p", -0.1),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("n", 0),
        ("n", 129),
        ("seed", 2**70),
        ("logprobs", -1),
        ("logprobs", 21),
        ("max_tokens", 2**63),
        ("stop", ("a", "b", "c", "d", "e")),
        ("stop", ("",)),
        ("logit_bias", {5: 1000}),
        ("logit_bias", dict.fromkeys(range(301), 1)),
    ],
)
def test_o02_values_out_of_range_name_their_field(field: str, value: object) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def prepared(sampler: Sampler, requests: list[Request]) -> Sampling:
    for request in requests:
        sampler.seat(request, request.num_output)
    return sampler.prepare(requests, np.array([request.seat for request in requests]))


def row(**params: object):
    """A sequence about to sample its first token."""
    request = sequence(0, [1, 2], **params)  # type: ignore[arg-type]
    request.num_tokens, request.seat = 3, 0
    return request


def draw(logits: list[float], **params: object) -> int:
    sampler = Sampler(len(logits), torch.device("cpu"))
    request = row(**params)
    return int(sample(torch.tensor([logits]), prepared(sampler, [request])).ids[0])


def test_s04_tiny_temperature_is_greedy_without_overflow() -> None:
    assert draw([1.0, 3.0, 2.0], temperature=1e-9) == 1
    assert draw([1.0, 3.0, 2.0], temperature=0.0) == 1
    assert draw([1.0, 3.0, 2.0], top_k=1, temperature=2.0) == 1
    assert draw([1.0, 3.0, 2.0], top_p=0.0, temperature=2.0) == 1


def uniform(seed: int, index: int, position: int) -> float:
    return float(draws(mixed_seeds([(seed, index)]), np.array([position], dtype=np.uint64))[0])


def test_draws_follow_the_distribution_and_never_leave_it() -> None:
    rows = 4000
    sampling = Sampling(
        temperature=torch.ones(rows),
        uniforms=torch.tensor([uniform(7, 0, i) for i in range(rows)], dtype=torch.float64),
        top_k=torch.full((rows,), 3),
    )
    ids = sample(torch.tensor([LOGITS] * rows), sampling).ids
    share = torch.bincount(ids, minlength=4) / rows
    total = sum(PROBS[:3])
    assert share[3] == 0
    for i in range(3):
        assert abs(share[i] - PROBS[i] / total) < 0.03


def test_a_draw_depends_on_its_own_row_alone() -> None:
    torch.manual_seed(1)
    logits = torch.randn(130, 97)
    uniforms = torch.rand(130, dtype=torch.float64)
    top_p = torch.full((130,), 0.9)
    together = sample(logits.clone(), Sampling(torch.ones(130), uniforms, top_p=top_p)).ids
    for i in range(130):
        one = slice(i, i + 1)
        alone = sample(logits[one].clone(), Sampling(torch.ones(1), uniforms[one], top_p=top_p[one])).ids
        assert alone[0] == together[i]


def test_uniform_numbers_are_spread_and_repeatable() -> None:
    numbers = [uniform(seed, index, position) for seed in range(10) for index in range(4) for position in range(50)]
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.02
    assert all(0 <= x < 1 for x in numbers)
    assert uniform(3, 1, 2) == uniform(3, 1, 2)


def penalties(seen: list[int], **values: float) -> Penalties:
    counts = torch.tensor([[9, 9, 9, 9], [2, 1, 0, 0]], dtype=torch.int32)
    counts[1, seen] += IN_PROMPT
    return Penalties(
        rows=torch.tensor([0]),
        counts=counts,
        places=torch.tensor([1]),
        repetition=torch.tensor([values.get("repetition", 1.0)]),
        presence=torch.tensor([values.get("presence", 0.0)]),
        frequency=torch.tensor([values.get("frequency", 0.0)]),
    )


def test_s05_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([[2.0, -1.0, 0.5, -0.5]])
    both = penalised(logits, penalties([0, 1], frequency=0.5, presence=0.25))
    assert torch.allclose(both, torch.tensor([[0.75, -1.75, 0.5, -0.5]]))
    repeated = penalised(logits, penalties([0, 1], repetition=2.0))
    assert torch.allclose(repeated, torch.tensor([[1.0, -2.0, 0.5, -0.5]]))
    with_prompt = penalised(logits, penalties([0, 1, 2], repetition=2.0))
    assert torch.allclose(with_prompt, torch.tensor([[1.0, -2.0, 0.25, -0.5]]))


def test_s05_repetition_counts_the_prompt_at_the_first_step_and_presence_does_not() -> None:
    sampler = Sampler(4, torch.device("cpu"))
    request = row(repetition_penalty=2.0, presence_penalty=1.0)  # prompt 1, 2
    sampling = prepared(sampler, [request])
    assert sampling.penalties is not None
    assert sampling.penalties.counts.tolist() == [[0, IN_PROMPT, IN_PROMPT, 0]]


def test_s05_counts_grow_with_what_was_sampled() -> None:
    sampler = Sampler(4, torch.device("cpu"))
    request = row(frequency_penalty=1.0)
    for _ in range(3):
        sampler.observe([request], sample(torch.tensor([[0.0, 0.0, 0.0, 9.0]]), prepared(sampler, [request])))
    sampling = prepared(sampler, [request])
    assert sampling.penalties is not None
    assert sampling.penalties.counts.tolist() == [[0, IN_PROMPT, IN_PROMPT, 3]]


def test_s05_what_a_sequence_has_seen_is_counted_alike_on_any_device() -> None:
    sampler, rows = Sampler(9, torch.device("cpu")), torch.full((2, 9), 7, dtype=torch.int32)
    for prompt, output in (([1, 2, 1], [2, 8, 8]), ([], []), ([8], [])):
        given = array("q", prompt), array("q", output)
        _count_here(rows[0], *given)
        sampler._count_there(rows[1], *given)
        assert rows[0].tolist() == rows[1].tolist() == [(i in prompt) * IN_PROMPT + output.count(i) for i in range(9)]


def test_s06_bias_forbids_and_forces_and_stays_in_its_row() -> None:
    sampler = Sampler(4, torch.device("cpu"), seats=3)
    rows = [
        row(logit_bias={0: -100.0}, temperature=0.0),
        row(logit_bias={3: 100.0}, temperature=0.0),
        row(temperature=0.0),
    ]
    for seat, request in enumerate(rows):
        request.seat = seat
    ids = sample(torch.tensor([LOGITS] * 3), prepared(sampler, rows)).ids
    assert ids.tolist() == [1, 3, 0]


@pytest.mark.parametrize("params", [{"logit_bias": {4: 1.0}}, {"logit_bias": {-1: 1.0}}, {"stop_token_ids": (9,)}])
def test_s06_ids_outside_the_vocabulary_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params).check_vocabulary(4)  # type: ignore[arg-type]
    assert caught.value.param == next(iter(params))


def test_s08_stops_have_probability_zero_before_min_tokens() -> None:
    sampler = Sampler(4, torch.device("cpu"))
    request = row(min_tokens=1, stop_token_ids=(0,), temperature=0.0)
    request.eos_ids = frozenset({1})
    assert sample(torch.tensor([LOGITS]), prepared(sampler, [request])).ids.tolist() == [2]
    request.tokens.append(2)
    request.num_tokens += 1
    assert sample(torch.tensor([LOGITS]), prepared(sampler, [request])).ids.tolist() == [0]


def test_allowed_ids_and_bad_words() -> None:
    assert draw(LOGITS, allowed_token_ids=(2, 3), temperature=0.0) == 2
    assert draw(LOGITS, bad_words_ids=((0,),), temperature=0.0) == 1
    sampler = Sampler(4, torch.device("cpu"))
    request = row(bad_words_ids=((1, 0),), temperature=0.0)
    assert sample(torch.tensor([LOGITS]), prepared(sampler, [request])).ids.tolist() == [0]
    request.tokens.append(1)
    request.num_tokens += 1
    assert sample(torch.tensor([LOGITS]), prepared(sampler, [request])).ids.tolist() == [1]


def test_a06_logprobs_are_of_the_raw_distribution_and_finite() -> None:
    sampler = Sampler(4, torch.device("cpu"))
    samples = sample(torch.tensor([LOGITS]), prepared(sampler, [row(logprobs=4, top_k=1)]))
    assert samples.top_logprobs is not None
    assert samples.top_logprobs[0].exp().tolist() == pytest.approx(PROBS, abs=1e-5)
    assert samples.ranks is not None
    assert samples.ranks.tolist() == [1]


def test_rows_that_want_logprobs_are_told_from_others() -> None:
    sampler = Sampler(4, torch.device("cpu"), seats=3)
    for wanted, told in (([None, 2, 0], [1, 2]), ([1, 2, 0], None), ([None] * 3, None)):
        rows = [row(logprobs=number, logit_bias={0: 1.0}) for number in wanted]
        for seat, request in enumerate(rows):
            request.seat = seat
        sampling = prepared(sampler, rows)
        assert sampling.logprobs == (2 if 2 in wanted else None)
        assert (None if sampling.reported is None else sampling.reported.tolist()) == told


def test_non_finite_rows_are_named() -> None:
    logits = torch.tensor([LOGITS, [math.nan, 1, 2, 3], [-math.inf] * 4, [math.inf, 0, 0, 0]])
    sampler = Sampler(4, torch.device("cpu"))
    samples = sample(logits, prepared(sampler, [row(temperature=0.0)] * 4))
    assert samples.finite.tolist() == [True, False, False, False]
