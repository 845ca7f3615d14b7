"""The CPU kernels that change logits and report log-probabilities, at every level, against the contract."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract import sampling
from anycore.contract.batch import IN_PROMPT, Penalties, Sampling
from anycore_cpu.kernel_ops import KernelOps
from anycore_cpu.kernels import edits, reports
from anycore_cpu.kernels.library import Kernels

COUNTS = [1, 3, 63, 64, 257, 5000, 16384, 33001]
"""Vocabularies below a vector and beyond a block or a task, and not multiples of them."""


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


def numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


def some(generator: torch.Generator, most: int, *shape: int) -> Tensor:
    return torch.randint(0, most, shape, generator=generator)


def penalties(seed: int, height: int, count: int, rows: list[int]) -> Penalties:
    """Of tables in which most ids are new, some are the prompt's, some were generated, and some are both."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.zeros(height + 2, count, dtype=torch.int32)
    for row in counts:
        row[some(generator, count, max(1, count // 90))] = IN_PROMPT
        row[some(generator, count, max(1, count // 90))] += 1 + int(some(generator, 5, 1))
    repetition, presence, frequency = (torch.rand(len(rows), generator=generator) * 2 for _ in range(3))
    repetition[::3], presence[::2], frequency[1::2] = 1.0, 0.0, 0.0
    repetition += 0.01
    places = torch.randperm(height + 2, generator=generator)[: len(rows)]
    return Penalties(torch.tensor(rows, dtype=torch.int64), counts, places, repetition, presence - 1, frequency - 1)


def odd_rows(count: int) -> Tensor:
    """[6, count] logits: whole, with equals, with -inf, nothing but -inf, with NaN, with inf."""
    logits = numbers(count, 6, count)
    logits[1] = logits[1].round()
    logits[2, : count // 2] = -math.inf
    logits[3] = -math.inf
    logits[4, count // 3], logits[5, count // 2] = math.nan, math.inf
    return logits


@pytest.mark.parametrize("count", COUNTS)
def test_penalties_are_the_contracts_to_the_last_bit(kernels: Kernels, count: int) -> None:
    logits = odd_rows(count)
    for rows in ([5, 0, 3, 1, 2, 4], [4, 1], []):
        p = penalties(count + len(rows), 6, count, rows)
        expected, got = logits.clone(), logits.clone()
        if rows:
            expected[p.rows] = sampling.penalised(expected[p.rows], p)
        edits.penalise(kernels, got, p)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", COUNTS)
def test_biases_add_up_and_bans_leave_nothing(kernels: Kernels, count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    for number in (0, 1, 300, 40000):  # ids come several times
        rows, ids = some(generator, 6, number), some(generator, count, number)
        values = torch.rand(number, generator=generator)
        expected, got = odd_rows(count), odd_rows(count)
        expected.index_put_((rows, ids), values, accumulate=True)
        edits.add(kernels, got, rows, ids, values)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)
        expected.index_put_((rows, ids), torch.tensor(-math.inf))
        edits.ban(kernels, got, rows, ids)
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_edits_beside_the_logits_are_passed_over(kernels: Kernels) -> None:
    logits = numbers(0, 4, 50)
    inner, whole = logits[1:3], logits.clone()
    rows, ids = torch.tensor([-1, 2, 0, 1]), torch.tensor([3, 3, 50, -1])
    edits.add(kernels, inner, rows, ids, torch.ones(4))
    edits.ban(kernels, inner, rows, ids)
    table = torch.full((2, 50), IN_PROMPT, dtype=torch.int32)
    one = torch.full((3,), 2.0)
    edits.penalise(kernels, inner, Penalties(torch.tensor([-1, 2, 0]), table, torch.tensor([0, 0, 2]), one, one, one))
    assert torch.equal(logits, whole)


def test_edits_take_what_belongs_together(kernels: Kernels) -> None:
    logits, one, two = numbers(0, 2, 40), torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    p = penalties(0, 2, 40, [0, 1])
    wrong = [
        ({"counts": p.counts[:, :39].contiguous()}, r"counts: .* \(4, 40\), .* \(4, 39\)"),
        ({"counts": p.counts[:, ::2]}, "side by side"),
        ({"counts": p.counts.long()}, r"counts: .* torch\.int32 .* torch\.int64"),
        ({"places": one}, r"places: .* \(2,\), .* \(1,\)"),
        ({"presence": one.float()}, r"presence: .* \(2,\), .* \(1,\)"),
    ]
    for changed, message in wrong:
        with pytest.raises(ValueError, match=message):
            edits.penalise(kernels, logits, replace(p, **changed))
    with pytest.raises(ValueError, match="side by side"):
        edits.ban(kernels, numbers(0, 40, 2).t(), two, two)
    with pytest.raises(ValueError, match=r"rows: .* \(2,\), .* \(1,\)"):
        edits.ban(kernels, logits, one, two)
    with pytest.raises(ValueError, match=r"ids: .* torch\.int64 .* torch\.int32"):
        edits.ban(kernels, logits, two, two.int())
    with pytest.raises(ValueError, match=r"values: .* \(2,\), .* \(1,\)"):
        edits.add(kernels, logits, two, two, torch.ones(1))
    with pytest.raises(ValueError, match=r"ids: .* \(2, 1\), .* \(1, 1\)"):
        reports.report(kernels, logits, one, 3)
    with pytest.raises(ValueError, match=r"logits: .* torch\.float32 .* torch\.bfloat16"):
        reports.report(kernels, logits.bfloat16(), two, 3)


@pytest.mark.parametrize("count", [1, 31, 32, 70, 1000, 49153])
def test_masks_leave_what_they_allow(kernels: Kernels, count: int) -> None:
    """As the contract says it; words of all ids, of none and of some."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(5, count, generator=generator)
    rows = torch.tensor([4, 0, 2])
    words = torch.randint(-(2**31), 2**31, (3, -(-count // 32)), generator=generator).to(torch.int32)
    words[torch.rand(words.shape, generator=generator) < 0.3] = 0
    words[torch.rand(words.shape, generator=generator) < 0.3] = -1
    expected = logits.clone()
    sampling.constrain(expected, rows, words)
    edits.mask(kernels, logits, rows, words)
    assert torch.equal(logits, expected)
    with pytest.raises(ValueError, match="side by side"):
        edits.mask(
            kernels, torch.randn(count + 1, 2).t(), rows[:1], torch.zeros(1, -(-(count + 1) // 32), dtype=torch.int32)
        )


# --- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("threads", [1, 2])
def test_reports_are_the_contracts(kernels: Kernels, count: int, threads: int) -> None:
    logits = odd_rows(count)
    ids = some(torch.Generator().manual_seed(count), count, 6)
    finite = torch.tensor([True, True, True, False, False, False])
    kernels.set_threads(threads)
    try:
        for number in {0, 1, 5, 20, min(count, 300), count + 1}:
            logprobs, ranks, top_ids, top = sampling.report(logits, ids, number)
            found = reports.report(kernels, logits, ids, number)
            torch.testing.assert_close(found[0], logprobs, rtol=1e-6, atol=2e-6, equal_nan=True)
            assert torch.equal(found[1], ranks)
            if top_ids is None or top is None:
                assert found[2:] == (None, None)
                continue
            assert found[2] is not None
            assert found[3] is not None
            torch.testing.assert_close(found[3], top, rtol=1e-6, atol=2e-6, equal_nan=True)
            order = logits.sort(dim=-1, descending=True, stable=True).indices  # equals by their ids
            assert torch.equal(found[2], order[:, :number])
            assert found[3][finite].isnan().sum() == 0
            own = found[3][:, :1] - logits.gather(1, found[2][:, :1])
            torch.testing.assert_close(
                (logprobs[:, None] - logits.gather(1, ids[:, None]))[0], own[0], rtol=0, atol=1e-5
            )
    finally:
        kernels.set_threads(2)


def test_log_probabilities_are_exact(kernels: Kernels) -> None:
    """Within what float32 holds, over a vocabulary of Qwen's size."""
    logits = numbers(1, 4, 151936) * torch.tensor([[0.01], [1.0], [4.0], [20.0]])
    ids = torch.tensor([0, 5, 70000, 151935])
    found = reports.report(kernels, logits, ids, 0)[0]
    exact = logits.double().log_softmax(-1).gather(1, ids[:, None])[:, 0]
    torch.testing.assert_close(found.double(), exact, rtol=2e-7, atol=1e-6)


def test_some_rows_are_reported_and_ids_named(kernels: Kernels) -> None:
    logits, rows = odd_rows(5000), torch.tensor([5, 1, 2])
    ids = torch.tensor([7, 8, 9])
    alone = reports.report(kernels, logits[rows], ids, 4)
    some_rows = reports.report(kernels, logits, ids, 4, rows)
    for mine, other in zip(some_rows, alone, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
    spread = reports.spread(some_rows, rows, 6)
    assert spread[1].tolist()[0] == 0
    assert spread[3] is not None
    assert spread[3].isnan().all(1).tolist() == [True, False, False, True, True, False]
    wanted = some(torch.Generator().manual_seed(0), 5000, 6, 17)
    exact = logits.gather(1, wanted) - logits.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(reports.named(kernels, logits, wanted), exact, rtol=1e-6, atol=2e-6, equal_nan=True)
    beside = reports.named(kernels, logits[:1], torch.tensor([[-1, 3, 5000]]))
    assert beside.isnan().tolist() == [[True, False, True]]
    assert reports.named(kernels, logits[:0], wanted[:0]).shape == (0, 17)


def test_a_report_never_feels_its_company(kernels: Kernels) -> None:
    logits, ids = numbers(3, 24, 33001), torch.arange(24)
    together = reports.report(kernels, logits, ids, 6)
    for i in range(24):
        for mine, others in zip(reports.report(kernels, logits[i : i + 1], ids[i : i + 1], 6), together, strict=True):
            assert mine is not None
            assert others is not None
            assert torch.equal(mine[0], others[i])


# --- whole steps ------------------------------------------------------------------------------------------------------


def edited(rows: int, count: int, **further: object) -> Sampling:
    """Greedy rows with edits of all kinds and log-probabilities."""
    generator = torch.Generator().manual_seed(rows + count)
    return replace(
        Sampling(torch.zeros(rows), torch.zeros(rows, dtype=torch.float64), all_greedy=True),
        penalties=penalties(1, rows, count, list(range(0, rows, 2))),
        bias=(some(generator, rows, 9), some(generator, count, 9), torch.rand(9, generator=generator) * 9),
        banned=(some(generator, rows, 40), some(generator, count, 40)),
        masked=(torch.tensor([rows - 1]), some(generator, 2**30, 1, -(-count // 32)).int()),
        logprobs=3,
        **further,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("some_only", [False, True])
def test_a_step_is_sampled_as_the_contract_says(kernels: Kernels, some_only: bool) -> None:
    """Log-probabilities are of the logits before they are edited."""
    for rows, count in ((1, 100), (8, 5001)):
        logits = numbers(rows, rows, count)
        asking = torch.arange(0, rows, 3) if some_only else None
        params = edited(rows, count, reported=asking)
        for given in (params, replace(params, penalties=None, bias=None, banned=None, masked=None)):
            wanted = sampling.sample(logits.clone(), given)
            got = KernelOps(kernels).sample(logits.clone(), given)
            assert torch.equal(got.ids, wanted.ids)
            assert torch.equal(got.finite, wanted.finite)
            at = torch.arange(rows) if asking is None else asking
            for name in ("logprobs", "ranks", "top_ids", "top_logprobs"):
                mine, theirs = getattr(got, name), getattr(wanted, name)
                assert mine.shape == theirs.shape
                torch.testing.assert_close(mine[at], theirs[at], rtol=1e-6, atol=2e-6)


ALONE = """
import os
import numpy, torch
from backends.cpu_kernels import LEVELS, kernels_of
from backends.test_cpu_edits import edited
from sequences import sequence
from anycore.engine.sampler import Sampler
from anycore_cpu.kernel_ops import KernelOps

def prepared(seat):  # a request that comes to this seat
    request = sequence(0, [1, 2], repetition_penalty=1.1, logprobs=2)
    request.num_tokens, request.seat = 3, seat
    sampler.seat(request, 1)
    return sampler.prepare([request], numpy.array([seat]))

torch.set_num_threads(1)
ops = KernelOps(kernels_of(LEVELS[0]))
params = edited(8, 151936)
sampler = Sampler(151936, torch.device("cpu"), seats=2)
prepared(0)
banned = torch.arange(100000)
params.banned = torch.zeros_like(banned), banned
logits = torch.empty(8, 151936)
torch.set_num_threads(4)
ops.kernels.library.anycore_angles(*[logits.data_ptr()] * 2, 1.0, 64, 8, *[logits.data_ptr()] * 2)  # its threads start
before = len(os.listdir("/proc/self/task"))
with torch.inference_mode():
    ops.sample(logits, params)
    ops.sample(logits[:1], prepared(1))
assert len(os.listdir("/proc/self/task")) == before, "torch has started threads"
"""


def test_no_thread_of_torch_takes_part() -> None:
    """They are started by the first operation that is large enough, and spin beside ours for a while after each."""
    kernels_of(LEVELS[0])
    paths = [path for path in sys.path if path]
    code = f"import sys; sys.path[:0] = {paths!r}\n{ALONE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
