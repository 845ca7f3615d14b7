"""A rounded KV cache in the CPU backend's attention kernel, at every level this machine can run."""

from __future__ import annotations

import random
from pathlib import Path

import engines
import pytest
import tiny
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract.backend import KVSpec
from anycore.contract.batch import Batch
from anycore.contract.rounded import RoundedCache, round_rows
from anycore_cpu.kernel_ops import KernelOps
from anycore_cpu.kernels.library import Kernels
from anycore_cpu.memory import CpuMemory
from anycore_cpu.replay import ReplayStep

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
KINDS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


class Setting:
    """Requests over one cache, whose blocks are shuffled."""

    def __init__(self, kind: str, dtype: torch.dtype, dim: int, block: int, lengths: list[int], seed: int = 0) -> None:
        self.heads, self.kv_heads, self.dim, self.block, self.lengths = 6, 2, dim, block, lengths
        self.dtype, self.kind = dtype, KINDS[kind]
        generator = torch.Generator().manual_seed(seed)
        self.tokens = [torch.randn(length, 10, dim, generator=generator).to(dtype) for length in lengths]
        for length, tokens in zip(lengths, self.tokens, strict=True):  # scales of all sizes
            tokens[:, 6:] *= 10.0 ** torch.randint(-3, 1, (length, 4, 1), generator=generator)
        count = sum(-(-length // block) for length in lengths)
        self.order = list(range(1, count + 1))
        random.Random(seed).shuffle(self.order)
        spec = KVSpec(1, 2, dim, block, str(dtype).removeprefix("torch."), rounded=kind)
        self.cache: RoundedCache = CpuMemory(kernels=True).allocate_kv(spec, count + 1)[0]
        places = iter(self.order)
        self.tables = [[next(places) for _ in range(-(-length // block))] for length in lengths]

    def step(self, ops: KernelOps, spans: list[tuple[int, int]], only: list[int] | None = None) -> list[Tensor]:
        """Rows of some requests, from a token to another one."""
        chosen = list(range(len(spans))) if only is None else only
        lens, contexts = [e - s for s, e in spans], [s for s, _ in spans]
        slots = [
            self.tables[i][p // self.block] * self.block + p % self.block
            for i, (start, end) in zip(chosen, spans, strict=True)
            for p in range(start, end)
        ]
        table = torch.zeros(len(chosen), max(map(len, self.tables)), dtype=torch.int32)
        for row, i in enumerate(chosen):
            table[row, : len(self.tables[i])] = torch.tensor(self.tables[i])
        longs = torch.zeros(sum(lens), dtype=torch.int64)
        batch = Batch(
            longs, longs, lens, contexts, None, True, torch.tensor(slots), table, [self.cache], block_size=self.block
        )
        qkv = torch.cat([self.tokens[i][start:end] for i, (start, end) in zip(chosen, spans, strict=True)])
        q, k, v = qkv.split((6, 2, 2), dim=1)
        return list(ops.attention(q, k, v, self.cache, batch, self.dim**-0.5).split(lens))

    def held(self, request: int, side: int) -> Tensor:
        """What the cache stands for: [L, Hkv, D] float64."""
        blocks = torch.tensor(self.tables[request])
        data = self.cache.data.view(torch.uint8)[blocks].view(self.kind)[:, :, side].double()
        return (data * self.cache.scale[blocks][:, :, side].double()[..., None]).transpose(1, 2).flatten(0, 1)

    def exact(self, request: int, rows: int) -> Tensor:
        """The last rows of a request in float64, over what is stored."""
        length = self.lengths[request]
        q = self.tokens[request][-rows:, :6].double()
        k, v = (self.held(request, side)[:length].repeat_interleave(3, dim=1) for side in (0, 1))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        hidden = torch.arange(length)[-rows:, None] < torch.arange(length)
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def settings(kind: str) -> list[Setting]:
    made = []
    for dtype in TOLERANCE:
        for dim, block, lengths in ((16, 1, [3, 40]), (33, 4, [1, 17]), (64, 16, [1300, 130, 16]), (80, 32, [70, 33])):
            made.append(Setting(kind, dtype, dim, block, lengths, seed=dim))
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_is_what_the_contract_says(kernels: Kernels, kind: str) -> None:
    for case in settings(kind):
        for tokens in case.tokens:
            tokens[0, 6:] = 0
        case.step(KernelOps(kernels), [(0, length) for length in case.lengths])
        for request, tokens in enumerate(case.tokens):
            blocks = torch.tensor(case.tables[request])
            for side, rows in enumerate((tokens[:, 6:8], tokens[:, 8:])):
                data, scale = round_rows(rows, case.kind)
                found = case.cache.data.view(torch.uint8)[blocks][:, :, side].transpose(1, 2).flatten(0, 1)
                # Zero has two signs in e4m3.
                found = found[: len(rows)].view(case.kind).float()
                assert torch.equal(found, data.float())
                found_scale = case.cache.scale[blocks][:, :, side].transpose(1, 2).flatten(0, 1)[: len(rows)]
                assert torch.equal(found_scale, scale)


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_that_over_what_is_stored(kernels: Kernels, kind: str) -> None:
    """One row each, and several; over histories that an earlier step stored."""
    for case in settings(kind):
        for rows in (1, 9):
            spans = [(max(0, length - rows), length) for length in case.lengths]
            if any(start for start, _ in spans):
                case.step(KernelOps(kernels), [(0, start) for start, _ in spans])
            for request, got in enumerate(case.step(KernelOps(kernels), spans)):
                exact = case.exact(request, len(got))
                bound = TOLERANCE[case.dtype] * max(1.0, float(exact.abs().max()))
                error = (got.double() - exact).abs().max().item()
                assert error < bound, (kind, case.dtype, case.dim, rows, error)


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_never_feels_its_company(kernels: Kernels, kind: str) -> None:
    case = Setting(kind, torch.bfloat16, 64, 16, [700, 64, 33])
    spans = [(699, 700), (40, 64), (0, 33)]
    case.step(KernelOps(kernels), [(0, 699), (0, 40)], [0, 1])
    together = case.step(KernelOps(kernels), spans)
    for i, span in enumerate(spans):
        assert torch.equal(case.step(KernelOps(kernels), [span], [i])[0], together[i])


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_stay_in_their_request_and_are_seen(kernels: Kernels, kind: str) -> None:
    case = Setting(kind, torch.bfloat16, 32, 16, [20, 20, 20])
    case.tokens[1][3, 6, 5] = torch.nan
    case.tokens[2][4, 8, 31] = torch.inf
    case.step(KernelOps(kernels), [(0, 19)] * 3)
    healthy, sick, endless = case.step(KernelOps(kernels), [(19, 20)] * 3)
    assert healthy.isfinite().all()
    assert sick.isnan().any()
    assert endless.isnan().any()


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_equal_eager_ones(tmp_path: Path, kind: str) -> None:
    folder = tiny.tiny_lm(tmp_path, layers=2, heads=4, kv_heads=2, head_dim=16, hidden=64)
    fast, eager = (engines.engine(folder, dtype="float32", kv_cache_dtype=kind) for _ in range(2))
    step, other = fast.runner._step, eager.runner._step
    assert isinstance(step, ReplayStep)
    assert isinstance(other, ReplayStep)
    eager.runner._step = other.step
    prompts = [list(range(4, 44)), [9] * 17, [7, 8, 9]]
    found = [engines.run(made, prompts) for made in (fast, eager)]
    assert [str(output) for output in found[0]] == [str(output) for output in found[1]]
    assert step._programs
    assert None not in step._programs.values()
