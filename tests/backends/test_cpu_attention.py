"""The attention kernel of the CPU backend, at every level this machine can run, against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch import Tensor

from anycore.contract.backend import KVSpec
from anycore.contract.batch import Batch
from anycore_cpu.kernel_ops import KernelOps
from anycore_cpu.kernels.library import Kernels
from anycore_cpu.memory import CpuMemory

TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


@pytest.fixture(params=LEVELS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return kernels_of(request.param)


@dataclass
class Case:
    """Requests with a history, whose tokens are stored in steps before the last one is compared."""

    dtype: torch.dtype
    heads: int
    kv_heads: int
    dim: int
    block: int  # 0: no cache
    contexts: Sequence[int]
    rows: Sequence[int]
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    seed: int = 0

    def tokens(self) -> list[Tensor]:
        """q, k and v of all tokens of each request: [L, Hq + 2 Hkv, D]."""
        generator = torch.Generator().manual_seed(self.seed)
        width = self.heads + 2 * self.kv_heads
        lengths = [c + r for c, r in zip(self.contexts, self.rows, strict=True)]
        return [torch.randn(length, width, self.dim, generator=generator).to(self.dtype) for length in lengths]


def exact(case: Case, tokens: Tensor, rows: int) -> Tensor:
    """The last rows of one request in float64."""
    heads, kv = case.heads, case.kv_heads
    q, k, v = tokens.double().split((heads, kv, kv), dim=1)
    k, v = (x.repeat_interleave(heads // kv, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[-rows:], k) * case.dim**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.arange(len(tokens))[-rows:, None] - torch.arange(len(tokens))
    seen = distance >= 0 if case.causal else torch.ones_like(distance, dtype=torch.bool)
    if case.window is not None:
        seen &= distance.abs() < case.window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def run(ops: KernelOps, case: Case, tokens: list[Tensor], only: Sequence[int] | None = None) -> list[Tensor]:
    """What the kernel makes of each request's last rows; histories are stored one step earlier."""
    chosen = list(range(len(tokens)) if only is None else only)
    blocks = [-(-len(tokens[i]) // max(case.block, 1)) for i in chosen]
    order = list(range(1, sum(blocks) + 1))
    random.Random(case.seed).shuffle(order)
    cache = None
    if case.block:
        spec = KVSpec(1, case.kv_heads, case.dim, case.block, str(case.dtype).removeprefix("torch."))
        cache = CpuMemory(kernels=True).allocate_kv(spec, len(order) + 1)[0].fill_(torch.nan)
        tables = [[order.pop() for _ in range(count)] for count in blocks]

    def step(spans: list[tuple[int, int]]) -> Tensor:
        lens, contexts = [end - start for start, end in spans], [start for start, _ in spans]
        positions = torch.cat([torch.arange(start, end) for start, end in spans])
        slots = table = None
        if case.block:
            owner = [i for i, length in enumerate(lens) for _ in range(length)]
            size = case.block
            pairs = zip(owner, positions.tolist(), strict=True)
            slots = torch.tensor([tables[i][p // size] * size + p % size for i, p in pairs])
            table = torch.zeros(len(tables), max(blocks), dtype=torch.int32)
            for i, own in enumerate(tables):
                table[i, : len(own)] = torch.tensor(own, dtype=torch.int32)
        batch = Batch(
            torch.zeros(len(positions), dtype=torch.int64),
            positions,
            lens,
            contexts if case.block else [0] * len(lens),
            None,
            case.causal,
            slots,
            table,
            [cache] if case.block else None,
            case.block,
        )
        batch.plan = ops.plan(batch)
        qkv = torch.cat([tokens[i][start:end] for i, (start, end) in zip(chosen, spans, strict=True)])
        q, k, v = qkv.split((case.heads, case.kv_heads, case.kv_heads), dim=1)
        return ops.attention(q, k, v, cache, batch, case.dim**-0.5, case.window, case.softcap)

    spans = [(case.contexts[i], len(tokens[i])) for i in chosen]
    histories = [(0, start) for start, _ in spans]
    if any(end for _, end in histories):
        step(histories)
    return list(step(spans).split([end - start for start, end in spans]))


def cases() -> list[Case]:
    chance = random.Random(1)
    found = []
    for seed in range(24):
        heads, kv_heads = chance.choice(((6, 2), (4, 4), (5, 1), (12, 1), (9, 3)))
        dtype = chance.choice((torch.float32, torch.bfloat16))
        dim, block = chance.choice((16, 20, 33, 64, 80, 128)), chance.choice((0, 1, 4, 16, 32))
        window = chance.choice((None, None, 1, 7, 40))
        softcap = chance.choice((None, None, 2.0))
        count = chance.randint(1, 5)
        if block:
            contexts = [chance.choice((1, 15, 16, 100, 130)) for _ in range(count)]
            rows = [chance.choice((1, 1, 2, 17, 70)) for _ in range(count)]
            found.append(Case(dtype, heads, kv_heads, dim, block, contexts, rows, window, softcap, True, seed))
        else:
            rows = [chance.choice((1, 2, 31, 33, 150, 260)) for _ in range(count)]
            causal = chance.random() < 0.5
            found.append(Case(dtype, heads, kv_heads, dim, 0, [0] * count, rows, window, softcap, causal, seed))
    for dtype in TOLERANCE:  # one row over so many keys that several threads share it
        found.append(Case(dtype, 6, 2, 64, 16, [511, 512, 1300, 0], [1, 1, 1, 40], None, None, True, 3))
        found.append(Case(dtype, 4, 4, 32, 16, [1300, 900], [1, 1], 600, None, True, 4))
    return found


def test_attention_is_right(kernels: Kernels) -> None:
    ops = KernelOps(kernels)
    for case in cases():
        tokens = case.tokens()
        for got, own, rows in zip(run(ops, case, tokens), tokens, case.rows, strict=True):
            error = (got.double() - exact(case, own, rows)).abs().max().item()
            assert error < TOLERANCE[case.dtype], (case, error)


def test_a_request_never_feels_its_company(kernels: Kernels) -> None:
    ops = KernelOps(kernels)
    case = Case(torch.bfloat16, 6, 2, 64, 16, [5, 700, 64, 0], [1, 1, 20, 33])
    tokens = case.tokens()
    together = run(ops, case, tokens)
    for i in range(len(tokens)):
        assert torch.equal(run(ops, case, tokens, only=[i])[0], together[i])


def test_nan_stays_in_its_request_and_is_seen(kernels: Kernels) -> None:
    ops = KernelOps(kernels)
    case = Case(torch.bfloat16, 4, 2, 32, 16, [20, 20, 40], [1, 1, 9])
    tokens = case.tokens()
    tokens[1][3, 5] = torch.nan  # one key of request 1
    healthy, sick, other = run(ops, case, tokens)
    assert healthy.isfinite().all()
    assert other.isfinite().all()
    assert sick.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_heads_are_normed_and_rotated_on_their_way(kernels: Kernels, dtype: torch.dtype) -> None:
    ops = KernelOps(kernels)
    case = Case(dtype, 6, 2, 40, 0, [0, 0], [1, 50])
    qkv = torch.cat(case.tokens())
    generator = torch.Generator().manual_seed(0)
    norms = (torch.rand(40, generator=generator) + 0.5, torch.rand(40, generator=generator) + 0.5, 1e-6)
    angle = torch.rand(51, 20, generator=generator) * 6
    zeros = torch.zeros(51, dtype=torch.int64)
    batch = Batch(zeros, zeros, [1, 50], [0, 0], None, True)
    for given, turns in ((None, (angle.cos(), angle.sin())), (norms, None), (norms, (angle.cos(), angle.sin()))):
        got = ops.self_attention(qkv.clone(), 6, 2, given, turns, None, batch, 0.2)
        q, k, v = qkv.double().split((6, 2, 2), dim=1)
        if given is not None:
            q, k = (
                x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w for x, w in ((q, norms[0]), (k, norms[1]))
            )
        if turns is not None:
            q, k = (rotated(x, angle.double()) for x in (q, k))
        wanted = Case(torch.float64, 6, 2, 25, 0, [0, 0], [1, 50])  # 25**-0.5 is the scale
        both = torch.cat((q, k, v), dim=1).split([1, 50])
        exacts = torch.cat([exact(wanted, part, len(part)) for part in both])
        assert (got.double() - exacts).abs().max() < TOLERANCE[dtype]


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
