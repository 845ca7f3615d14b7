"""What the kit checks of `Backend.optimize`: steps that it makes faster give what the step itself gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend, StepOutput, WholeStep
from anycore.contract.batch import Batch, Penalties, Samples, Sampling
from anycore.contract.checks import TOLERANCE, AttentionCase, PagedRun
from anycore.contract.sizes import Limits
from anycore.contract.weights import DenseWeight

VOCAB = 40
LENGTHS = (5, 20, 33)
"""Tokens of the requests when they begin to decode."""
MORE = 8
"""Tokens that they may have then."""
Chosen = Sequence[int]  # which of the requests a step decodes, in order


class OneLayer:
    """A model of attention between two tables: the step, its requests, and their batches."""

    def __init__(self, backend: Backend, case: AttentionCase) -> None:
        generator = torch.Generator().manual_seed(2)
        width, dtype = case.heads * case.head_dim, getattr(torch, case.dtype)
        upload = backend.memory.upload
        self.backend, self.case = backend, case
        self.run = PagedRun(backend, case)
        self.table = upload(
            torch.randn(VOCAB, width + 2 * case.kv_heads * case.head_dim, generator=generator).to(dtype)
        )
        head = torch.randn(VOCAB, width, generator=generator) * width**-0.5 * 6
        self.head = backend.ops.pack(DenseWeight(upload(head.to(dtype))))
        self.tables = [[self.run.free.pop() for _ in range(-(-(n + MORE) // case.block_size))] for n in LENGTHS]
        self.step = WholeStep(self.forward, self.sample)

    def forward(self, batch: Batch) -> Tensor:
        case = self.case
        qkv = self.backend.ops.embedding(batch.input_ids, self.table).view(len(batch.input_ids), -1, case.head_dim)
        q, k, v = qkv.split_with_sizes((case.heads, case.kv_heads, case.kv_heads), dim=1)
        assert batch.kv is not None
        out = self.backend.ops.attention(q, k, v, batch.kv[0], batch, case.scale, case.window, case.softcap)
        return batch.wanted(out.flatten(1))

    def sample(self, rows: Tensor, sampling: Sampling) -> Any:
        return self.backend.ops.sample(self.backend.ops.logits(rows, self.head), sampling)

    def batch(self, chosen: Chosen, counts: list[int], contexts: list[int], seed: int) -> Batch:
        batch = self.run.batch(counts, contexts, [self.tables[i] for i in chosen])
        ids = [(7 * i + 3 * t + 11 * seed) % VOCAB for i, n in zip(chosen, counts, strict=True) for t in range(n)]
        batch.input_ids = self.backend.memory.upload(torch.tensor(ids))
        return batch

    def sampling(self, kind: str, chosen: Chosen) -> Sampling:
        """What each request asks for depends on the request alone."""
        upload = self.backend.memory.upload
        every = torch.tensor(chosen)
        rows = upload(torch.arange(len(chosen)))
        temperature = torch.tensor([0.0, 0.7, 1.3])[every]
        uniforms = torch.tensor([0.15, 0.5, 0.85], dtype=self.backend.ops.draw_dtype)[every]
        base = Sampling(upload(temperature), upload(uniforms))
        counts = upload(torch.arange(3 * VOCAB, dtype=torch.int32).view(3, VOCAB) % 5)
        strength = upload(torch.tensor([1.5, 0.8, 1.2])[every])
        fields: dict[str, dict[str, Any]] = {
            "plain": {},
            "greedy": {"temperature": upload(torch.zeros(len(chosen))), "all_greedy": True},
            "filtered": {
                "top_k": upload(torch.tensor([VOCAB, 3, 9])[every]),
                "top_p": upload(torch.tensor([0.9, 1.0, 0.6])[every]),
                "min_p": upload(torch.tensor([0.0, 0.2, 0.1])[every]),
            },
            "penalised": {"penalties": Penalties(rows, counts, upload(every), strength, strength, strength)},
            "edited": {"bias": (rows, upload(every + 4), strength), "banned": (rows, upload(every + 20))},
            "reported": {"logprobs": 2},
        }
        return replace(base, **fields[kind])


KINDS = ("plain", "filtered", "penalised", "edited", "reported", "greedy")


def check_optimized(backend: Backend, case: AttentionCase) -> None:
    """Decode steps of every kind of sampling, in batches of changing size: as the step itself, alone as in company."""
    model = OneLayer(backend, case)
    size = case.block_size
    longest = -(-(max(LENGTHS) + MORE) // size) * size
    fast = backend.optimize(model.step, Limits(len(LENGTHS), 2 * longest, longest, size, 1 + 6 * longest // size))
    fast(model.batch((0, 1, 2), [n + MORE for n in LENGTHS], [0] * len(LENGTHS), 0), None)
    seed = 0
    for kind in KINDS:
        for chosen in ((0, 1, 2), (2,), (2, 0)):
            seed += 1
            contexts = [LENGTHS[i] + seed % MORE for i in chosen]
            got = fast(model.batch(chosen, [1] * len(chosen), contexts, seed), model.sampling(kind, chosen))
            own = model.step(model.batch(chosen, [1] * len(chosen), contexts, seed), model.sampling(kind, chosen))
            same(got, own, case.dtype, f"{case}, {kind} sampling of requests {chosen}")
        together = fast(model.batch((0, 1, 2), [1] * 3, list(LENGTHS), 0), model.sampling(kind, (0, 1, 2)))
        for i in range(len(LENGTHS)):
            alone = fast(model.batch((i,), [1], [LENGTHS[i]], 0), model.sampling(kind, (i,)))
            assert together.samples is not None
            part: dict[str, Any] = {
                name: x if x is None else x[i : i + 1] for name, x in vars(together.samples).items()
            }
            company = StepOutput(together.rows[i : i + 1], Samples(**part))
            same(alone, company, case.dtype, f"{case}, {kind} sampling of request {i}, alone and in company")


def same(got: StepOutput, own: StepOutput, dtype: str, what: str) -> None:
    """Raise unless two outputs agree. Ids are equal in float32; with others rounding may put a draw beyond an edge."""
    assert got.samples is not None
    assert own.samples is not None
    for name in ("finite", "ids", "ranks", "top_ids"):
        mine, theirs = getattr(got.samples, name), getattr(own.samples, name)
        assert (mine is None) == (theirs is None), f"{what}: {name} is there only once"
        if mine is not None and (dtype == "float32" or name == "finite"):
            assert torch.equal(mine, theirs), f"{what}: {name} {mine.tolist()}, not {theirs.tolist()}"
    off = float((got.rows.double() - own.rows.double()).abs().max())
    assert off <= TOLERANCE[dtype][1], f"{what}: rows are off by {off:.3g}"
