"""What the conformance kit checks, as plain functions that raise AssertionError. No pytest here, no engine.

Results are compared with short float64 computations written for this purpose, not with the contract's defaults,
so that a mistake in those is found too.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend, KVSpec
from anycore.contract.batch import IN_PROMPT, Batch, Penalties, Sampling
from anycore.contract.check_rounding import settle, stored
from anycore.contract.weights import DenseWeight

TOLERANCE = {"float32": (1e-4, 2e-5), "bfloat16": (2e-2, 2e-2), "float16": (4e-3, 4e-3)}
"""Relative and absolute tolerance for operations on numbers near 1, by dtype."""

COMPANY_TOLERANCE = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 4e-3}
"""How far a result may move, absolutely, when batch mates or chunking change."""

errors = logging.getLogger("anycore.conformance.errors")
"""Told of every comparison: dtype, error, and its share of what is allowed. `anycore conformance` keeps the worst."""

NEVER = float("nan")
"""What an earlier owner left in the cache: whoever reads it shows it."""


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One combination that a support row claims."""

    dtype: str
    head_dim: int
    causal: bool
    block_size: int = 0  # 0: no KV cache
    window: int | None = None
    softcap: float | None = None
    heads: int = 6
    kv_heads: int = 2
    seed: int = 0
    kv_cache: str | None = None  # a name from KV_CACHES: the cache is rounded

    @property
    def scale(self) -> float:
        return 1.7 / math.sqrt(self.head_dim)  # not the usual one: a backend that assumes that is found


def close(got: Tensor, wanted: Tensor, dtype: str, what: str) -> None:
    """Raise unless `got` is finite and within the dtype's tolerance of float64 `wanted`."""
    rtol, atol = TOLERANCE[dtype]
    assert got.dtype == getattr(torch, dtype), f"{what}: result is {got.dtype}, not {dtype}"
    assert got.shape == wanted.shape, f"{what}: shape {tuple(got.shape)}, not {tuple(wanted.shape)}"
    got = got.detach().cpu().double()
    assert bool(got.isfinite().all()), f"{what}: {int((~got.isfinite()).sum())} results are NaN or infinite"
    wrong = (got - wanted).abs() - (atol + rtol * wanted.abs())
    if got.numel() and errors.isEnabledFor(logging.DEBUG):
        off = (got - wanted).abs()
        errors.debug(
            "%s: off by %g, %g of what is allowed", dtype, off.max(), (off / (atol + rtol * wanted.abs())).max()
        )
    assert bool((wrong <= 0).all()), f"{what}: off by {float((got - wanted).abs().max()):.3g}, allowed {atol:.3g}"


def exact_attention(q: Tensor, k: Tensor, v: Tensor, positions: Sequence[int], case: AttentionCase) -> Tensor:
    """Rows at `positions` of one request, in float64: q [R, Hq, D], k and v [L, Hkv, D] → [R, Hq, D]."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = case.scale * torch.einsum("rhd,lhd->rhl", q.double(), keys)
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    distance = torch.tensor(positions)[:, None] - torch.arange(len(k))
    hidden = (distance < 0) & case.causal
    if case.window is not None:
        hidden |= distance.abs() >= case.window
    scores = scores.masked_fill(hidden[:, None], float("-inf"))
    return torch.einsum("rhl,lhd->rhd", scores.softmax(-1), values)


class Rows:
    """Random q, k, v of some rows, as views of one matrix, the way models hand them over."""

    def __init__(self, count: int, case: AttentionCase, generator: torch.Generator) -> None:
        width = (case.heads + 2 * case.kv_heads) * case.head_dim
        mixed = torch.randn(count, width, generator=generator).to(getattr(torch, case.dtype))
        self.mixed = mixed
        self.sizes = [case.heads * case.head_dim, case.kv_heads * case.head_dim, case.kv_heads * case.head_dim]
        self.head_dim = case.head_dim

    def split(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (part.view(len(mixed), -1, self.head_dim) for part in torch.split(mixed, self.sizes, dim=1))
        return q, k, v


class PagedRun:
    """A few requests over one cache: decides rows and blocks like an engine, remembers what each request computed."""

    def __init__(self, backend: Backend, case: AttentionCase, longest: int | None = None) -> None:
        self.backend = backend
        self.case = case
        self.random = random.Random(case.seed)
        self.generator = torch.Generator().manual_seed(case.seed)
        per_request = -(-(longest or 3 * case.block_size + 40) // case.block_size)
        blocks = 1 + 6 * per_request
        kv = KVSpec(1, case.kv_heads, case.head_dim, case.block_size, case.dtype, case.kv_cache)
        self.kv = backend.memory.allocate_kv(kv, blocks)
        self.free = list(range(1, blocks))
        self.random.shuffle(self.free)
        self.tables: dict[int, list[int]] = {}
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.poison(blocks)

    def poison(self, blocks: int) -> None:
        """Let earlier owners fill every block, the scratch block too, with NaN."""
        size = self.case.block_size
        rows = Rows(blocks * size, self.case, self.generator)
        q, k, v = rows.split(rows.mixed.fill_(NEVER))
        batch = self.batch([size] * blocks, [0] * blocks, [[block] for block in range(blocks)])
        self.attend(q, k, v, batch)

    def finish(self, request: int) -> None:
        """Give a request's blocks to whoever comes next."""
        self.free += self.tables.pop(request)
        del self.keys[request], self.values[request]

    def fork(self, request: int, other: int) -> None:
        """Let another request start with the full blocks of this one."""
        count = len(self.keys[request]) // self.case.block_size
        self.tables[other] = self.tables[request][:count]
        self.keys[other] = self.keys[request][: count * self.case.block_size]
        self.values[other] = self.values[request][: count * self.case.block_size]

    def step(self, wanted: dict[int, int]) -> None:
        """Compute so many rows of each request, in that order, and compare."""
        case = self.case
        rows = Rows(sum(wanted.values()), case, self.generator)
        q, k, v = rows.split(rows.mixed)
        if case.kv_cache is not None:
            settle(k, case.kv_cache, self.generator)
            settle(v, case.kv_cache, self.generator)
        contexts = [len(self.keys.get(i, ())) for i in wanted]
        starts = [0, *accumulate(wanted.values())]
        for i, start, end in zip(wanted, starts, starts[1:], strict=False):
            self.remember(i, k[start:end], v[start:end])
        batch = self.batch(list(wanted.values()), contexts, [self.tables[i] for i in wanted])
        out = self.attend(q, k, v, batch)
        for i, start, context, count in zip(wanted, starts, contexts, wanted.values(), strict=False):
            chosen = sample_rows(count, self.random)
            rows_here = [start + row for row in chosen]
            positions = [context + row for row in chosen]
            exact = exact_attention(q[rows_here], self.keys[i], self.values[i], positions, case)
            close(out[rows_here], exact, case.dtype, f"{case}, request {i}, positions {positions}")

    def remember(self, i: int, k: Tensor, v: Tensor) -> None:
        if self.case.kv_cache is not None:
            k, v = stored(k, self.case.kv_cache), stored(v, self.case.kv_cache)
        if i not in self.keys:
            self.keys[i], self.values[i], self.tables[i] = k[:0], v[:0], []
        self.keys[i] = torch.cat((self.keys[i], k))
        self.values[i] = torch.cat((self.values[i], v))
        while len(self.tables[i]) * self.case.block_size < len(self.keys[i]):
            self.tables[i].append(self.free.pop())

    def batch(self, counts: list[int], contexts: list[int], tables: list[list[int]]) -> Batch:
        size = self.case.block_size
        width = max(map(len, tables))
        padded = torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32)
        positions = [c + t for c, n in zip(contexts, counts, strict=True) for t in range(n)]
        owners = [i for i, n in enumerate(counts) for _ in range(n)]
        slots = [tables[i][p // size] * size + p % size for i, p in zip(owners, positions, strict=True)]
        upload = self.backend.memory.upload
        batch = Batch(
            input_ids=upload(torch.zeros(len(slots), dtype=torch.int64)),
            positions=upload(torch.tensor(positions)),
            query_lens=counts,
            context_lens=contexts,
            output_rows=None,
            causal=self.case.causal,
            slots=upload(torch.tensor(slots)),
            block_tables=upload(padded),
            kv=self.kv,
            block_size=size,
        )
        if batch.decode_only:
            same = sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*tables, strict=False)))
            batch.shared_tokens = min(same, min(contexts) // size) * size
        batch.plan = self.backend.ops.plan(batch)
        return batch

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        case = self.case
        return run_attention(self.backend, q, k, v, self.kv[0], batch, case)


def run_attention(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, cache: Any, batch: Batch, case: AttentionCase
) -> Tensor:
    """Call the operation; its inputs must come out as they went in."""
    before = [x.clone() for x in (q, k, v)]
    given = q, k, v = backend.memory.upload(q), backend.memory.upload(k), backend.memory.upload(v)
    out = backend.ops.attention(q, k, v, cache, batch, case.scale, case.window, case.softcap)
    for name, old, now in zip("qkv", before, given, strict=True):
        assert torch.equal(old.nan_to_num(), now.cpu().nan_to_num()), f"{case}: attention has overwritten {name}"
    return out.cpu()


def sample_rows(count: int, chosen: random.Random) -> list[int]:
    """The first, the last and a few rows between."""
    return sorted({0, count - 1, *chosen.sample(range(count), min(count, 4))})


def check_paged_attention(backend: Backend, case: AttentionCase) -> None:
    """Whole prompts, chunks that end inside and at the end of a block, decoding, and blocks that change hands."""
    run = PagedRun(backend, case)
    size = case.block_size
    run.step({0: 2 * size + 5, 1: size // 2 + 3, 2: 1})
    run.step({1: size, 2: 1, 0: 1, 3: 2 * size})
    run.step({3: 1, 0: 1, 2: 1, 1: 1})
    run.step({1: 1, 4: size + 9, 0: 3, 3: 1})
    run.finish(0)
    run.finish(3)
    run.step({5: size + 1, 1: 2, 2: 1})
    run.step({5: 1, 1: 1, 2: 1, 4: 1})
    run.step({4: 1})


def check_shared_prefix(backend: Backend, case: AttentionCase, shared: int = 300, requests: int = 9) -> None:
    """Decoding of requests whose first blocks are the same: one that has just begun its own part, others further on."""
    run = PagedRun(backend, case, longest=shared + 60)
    run.step({0: shared})
    for i in range(1, requests):
        run.fork(0, i)
    run.step({i: 1 + 9 * i % 37 for i in reversed(range(1, requests))})
    run.step(dict.fromkeys(range(requests), 1))
    run.step({0: 2} | dict.fromkeys(range(1, requests), 1))
    run.step(dict.fromkeys(range(1, requests), 1))


def check_random_lengths(backend: Backend, case: AttentionCase, steps: int = 10, requests: int = 6) -> None:
    """Any mix of decoding, chunks of any length and new requests in blocks of finished ones, in any order."""
    longest = 3 * case.block_size + 40
    run = PagedRun(backend, case, longest)
    for _ in range(steps):
        wanted: dict[int, int] = {}
        for i in run.random.sample(range(requests), run.random.randint(1, requests)):
            if len(run.keys.get(i, ())) == longest:
                run.finish(i)
            left = longest - len(run.keys.get(i, ()))
            wanted[i] = min(left, run.random.choice((1, 1, 2, run.random.randint(1, longest))))
        run.step(wanted)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Let fresh tensors hold NaN, or the largest integer, until somebody writes to them."""
    earlier = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # it is what torch fills empty tensors under
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(earlier[0], warn_only=earlier[1])


def check_packed_attention(backend: Backend, case: AttentionCase) -> None:
    """No cache: random lengths, equal neighbours and single rows among them."""
    chosen = random.Random(case.seed)
    generator = torch.Generator().manual_seed(case.seed)
    for lengths in ([1], [7, 7, 7], [chosen.randint(1, 70) for _ in range(5)], [33, 1, 1, 16, 16, 2]):
        rows = Rows(sum(lengths), case, generator)
        q, k, v = rows.split(rows.mixed)
        batch = packed_batch(backend, lengths, case.causal)
        out = run_attention(backend, q, k, v, None, batch, case)
        for start, count in zip(batch.query_starts, lengths, strict=False):
            own = slice(start, start + count)
            picked = sample_rows(count, chosen)
            exact = exact_attention(q[own][picked], k[own], v[own], picked, case)
            close(out[own][picked], exact, case.dtype, f"{case}, lengths {lengths}, rows {picked} from {start}")


def packed_batch(backend: Backend, lengths: list[int], causal: bool) -> Batch:
    upload = backend.memory.upload
    count = sum(lengths)
    batch = Batch(
        input_ids=upload(torch.zeros(count, dtype=torch.int64)),
        positions=upload(torch.tensor([t for n in lengths for t in range(n)])),
        query_lens=lengths,
        context_lens=[0] * len(lengths),
        output_rows=None,
        causal=causal,
    )
    batch.plan = backend.ops.plan(batch)
    return batch


def check_company(backend: Backend, case: AttentionCase) -> None:
    """A request alone, then among others: the same numbers."""
    generator = torch.Generator().manual_seed(case.seed)
    lengths = [9, 21, 21, 40, 3]
    rows = Rows(sum(lengths), case, generator)
    q, k, v = rows.split(rows.mixed)
    together = run_attention(backend, q, k, v, None, packed_batch(backend, lengths, case.causal), case)
    start = 0
    for length in lengths:
        own = slice(start, start + length)
        alone = run_attention(backend, q[own], k[own], v[own], None, packed_batch(backend, [length], case.causal), case)
        error = float((alone.double() - together[own].double()).abs().max())
        allowed = COMPANY_TOLERANCE[case.dtype]
        assert error <= allowed, f"{case}: batch mates moved a result by {error:.3g}, allowed {allowed:.3g}"
        start += length


def check_linear(backend: Backend, dtype: str, rows: int, shape: tuple[int, int], biased: bool) -> None:
    """x [rows, I] times a packed weight [O, I]; the packed weight must not hang on the given one's memory."""
    generator = torch.Generator().manual_seed(rows)
    outputs, inputs = shape
    kind = getattr(torch, dtype)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(kind)
    x = torch.randn(rows, inputs, generator=generator).to(kind)
    bias = torch.randn(outputs, generator=generator).to(kind) if biased else None
    handle = backend.ops.pack(DenseWeight(backend.memory.upload(weight.clone())))
    got = backend.ops.linear(backend.memory.upload(x), handle, None if bias is None else backend.memory.upload(bias))
    exact = x.double() @ weight.double().T
    close(got, exact if bias is None else exact + bias.double(), dtype, f"linear {shape}, {rows} rows, {dtype}")


def check_norms(backend: Backend, dtype: str, rows: int, width: int, with_residual: bool) -> None:
    """rms_norm and layer_norm, alone and with a residual, whose sum must come back too."""
    generator = torch.Generator().manual_seed(rows)
    kind = getattr(torch, dtype)
    upload = backend.memory.upload
    # Rows of very different size: the mean square must be a row's own.
    x = (torch.randn(rows, width, generator=generator) * torch.logspace(-1, 1, rows)[:, None]).to(kind)
    residual = torch.randn(rows, width, generator=generator).to(kind) if with_residual else None
    weight, bias = torch.randn(2, width, generator=generator).unbind(0)
    total = x if residual is None else x + residual
    wide = total.double()
    centred = wide - wide.mean(-1, keepdim=True)
    exact = {
        "rms_norm": wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(),
        "layer_norm": centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double() + bias.double(),
    }
    added = None if residual is None else upload(residual)
    given = upload(x.clone())
    got = {
        "rms_norm": backend.ops.rms_norm(given, upload(weight), 1e-5, added),
        "layer_norm": backend.ops.layer_norm(given, upload(weight), upload(bias), 1e-5, added),
    }
    for name, (normed, summed) in got.items():
        close(normed, exact[name], dtype, f"{name}, {rows} rows of {width}")
        close(summed, wide, dtype, f"{name}'s residual, {rows} rows of {width}")
    assert torch.equal(given.cpu(), x), "a norm has overwritten its input"


def check_norm_linear(
    backend: Backend, dtype: str, rows: int, shape: tuple[int, int], gate: str | None, with_residual: bool, biased: bool
) -> None:
    """x [rows, I], its residual, norm, a packed weight [O, I] and a gate: the result and x + residual."""
    generator = torch.Generator().manual_seed(rows)
    outputs, inputs = shape
    kind = getattr(torch, dtype)
    upload = backend.memory.upload
    x, added = torch.randn(2, rows, inputs, generator=generator).to(kind)
    scale = 1 + torch.randn(inputs, generator=generator) / 4
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(kind)
    bias = torch.randn(outputs, generator=generator).to(kind)
    residual = upload(added.clone()) if with_residual else None
    handle = backend.ops.pack(DenseWeight(upload(weight.clone())))
    given = upload(x.clone())
    got, total = backend.ops.norm_linear(
        given, residual, upload(scale), 1e-5, handle, upload(bias) if biased else None, gate
    )
    wide = (x + added if with_residual else x).double()
    exact = (wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * scale.double()) @ weight.double().T
    if biased:
        exact += bias.double()
    if gate is not None:
        first, second = exact.chunk(2, dim=-1)
        exact = exact_activation(first, gate) * second
    what = f"norm_linear {shape}, {rows} rows, {dtype}, gate {gate}"
    close(got, exact, dtype, what)
    close(total, wide, dtype, f"{what}: x + residual")
    assert torch.equal(given.cpu(), x), f"{what} has overwritten its input"
    assert residual is None or torch.equal(residual.cpu(), added), f"{what} has overwritten the residual"


def check_rotary(backend: Backend, dtype: str, rows: int, heads: int, kv_heads: int, head_dim: int) -> None:
    """Pairs (d, d + D/2) turned by each row's own angles."""
    generator = torch.Generator().manual_seed(rows)
    case = AttentionCase(dtype, head_dim, True, heads=heads, kv_heads=kv_heads)
    made = Rows(rows, case, generator)
    q, k, _ = made.split(made.mixed)
    angles = torch.rand(rows, head_dim // 2, generator=generator, dtype=torch.float64) * 100
    cos, sin = angles.cos().float(), angles.sin().float()
    upload = backend.memory.upload
    turned = backend.ops.rotary(upload(q), upload(k), upload(cos), upload(sin))
    for name, x, got in zip("qk", (q, k), turned, strict=True):
        first, second = x.double().chunk(2, dim=-1)
        c, s = cos.double()[:, None], sin.double()[:, None]
        exact = torch.cat((first * c - second * s, second * c + first * s), dim=-1)
        close(got, exact, dtype, f"rotary of {name}, {rows} rows, head size {head_dim}")


def check_gated(backend: Backend, dtype: str, kind: str, rows: int, width: int) -> None:
    """act(first half) * second half, and the activation alone."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 2 * width, generator=generator).to(getattr(torch, dtype))
    act = exact_activation(x.double(), kind)
    given = backend.memory.upload(x.clone())
    close(backend.ops.activation(given, kind), act, dtype, f"activation {kind}")
    close(backend.ops.gated(given, kind), act[:, :width] * x.double()[:, width:], dtype, f"gated {kind}")
    assert torch.equal(given.cpu(), x), f"{kind} has overwritten its input"


def exact_activation(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x / (1 + (-x).exp())
    if kind == "gelu":
        return x * 0.5 * (1 + torch.erf(x / 2**0.5))
    if kind == "gelu_tanh":
        return x * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return x.clamp(min=0)


def check_pool(backend: Backend, dtype: str, lens: list[int], width: int) -> None:
    """The mean and the maximum of each request's rows; what is not finite in one stays in its own row."""
    rows = torch.randn(sum(lens), width, generator=torch.Generator().manual_seed(width)).to(getattr(torch, dtype))
    parts = torch.split(rows.double(), lens)
    batch = packed_batch(backend, lens, causal=False)
    given = backend.memory.upload(rows)
    for kind, right in (("mean", [part.mean(0) for part in parts]), ("max", [part.amax(0) for part in parts])):
        found = backend.ops.pool(given, batch, kind)
        assert found.dtype == torch.float32, f"pool {kind} gave {found.dtype}, not float32"
        close(found, torch.stack(right), "float32", f"pool {kind}")
    spoilt = backend.memory.upload(rows.index_fill(0, torch.tensor([0]), float("nan")))
    for kind in ("mean", "max"):
        found = backend.ops.pool(spoilt, batch, kind)
        assert torch.equal(found.isfinite().all(1).cpu(), torch.arange(len(lens)) > 0), f"pool {kind} hides a NaN"


def check_memory(backend: Backend, kv: KVSpec, blocks: int) -> None:
    """Sizes that make sense, as many handles as layers, and uploads that arrive whole."""
    memory = backend.memory
    assert 0 < memory.free() <= memory.total(), f"free {memory.free()} and total {memory.total()} bytes"
    exact = kv.bytes_per_token * kv.block_size
    assert memory.block_bytes(kv) >= exact, f"a block of {exact} bytes is said to take {memory.block_bytes(kv)}"
    handles = memory.allocate_kv(kv, blocks)
    assert len(handles) == kv.layers, f"{len(handles)} handles for {kv.layers} layers"
    for host in (torch.arange(7), torch.randn(3, 5), torch.zeros(0, dtype=torch.int64)):
        there = memory.upload(host.clone())
        assert there.device == backend.device or there.device.type == backend.device.type, "upload went elsewhere"
        assert torch.equal(there.cpu(), host), "upload changed what it carried"
    with memory.peak() as peak:
        torch.zeros(1 << 20)
    assert peak.bytes >= 0, f"a peak of {peak.bytes} bytes"


def check_sampling(backend: Backend, rows: int = 4000) -> None:
    """Greedy is the maximum; draws follow the filtered distribution; bans hold; broken rows are reported."""
    upload = backend.memory.upload
    ids = 12
    logits = torch.randn(ids, generator=torch.Generator().manual_seed(3))
    ranked = logits.double().softmax(0).sort(descending=True)
    before = ranked.values.cumsum(0) - ranked.values
    # What each filter keeps, by rank, computed by hand from the definition.
    filters: dict[str, tuple[dict[str, Any], Tensor]] = {
        "nothing": ({}, torch.ones(ids, dtype=torch.bool)),
        "top_k": ({"top_k": upload(torch.full((rows,), 3))}, torch.arange(ids) < 3),
        "top_p": ({"top_p": upload(torch.full((rows,), 0.6))}, before < 0.6),
        "min_p": ({"min_p": upload(torch.full((rows,), 0.3))}, ranked.values >= 0.3 * ranked.values[0]),
    }
    uniforms = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    for name, (fields, kept) in filters.items():
        params = replace(Sampling(upload(torch.ones(rows)), upload(uniforms.to(backend.ops.draw_dtype))), **fields)
        found = backend.ops.sample(upload(logits.repeat(rows, 1)), params).ids.cpu()
        exact = torch.zeros(ids, dtype=torch.float64).scatter_(0, ranked.indices, ranked.values * kept)
        off = float((found.bincount(minlength=ids) / rows - exact / exact.sum()).abs().max())
        assert off < 3 / rows, f"sampling with {name}: a frequency is off by {off:.3g}"

    table = torch.randn(4, 50, generator=torch.Generator().manual_seed(4))
    best = table.argmax(-1)
    table[3, 7] = NEVER
    banned = (upload(torch.tensor([1])), upload(best[1:2]))
    params = Sampling(
        upload(torch.zeros(4)),
        upload(torch.full((4,), 0.5, dtype=backend.ops.draw_dtype)),
        banned=banned,
        logprobs=2,
        all_greedy=True,
    )
    got = backend.ops.sample(upload(table.clone()), params)
    assert got.ids[[0, 2]].tolist() == best[[0, 2]].tolist(), "greedy is not the maximum"
    assert int(got.ids[1]) == int(table[1].topk(2).indices[1]), "a banned id was chosen, or not the best of the rest"
    assert got.finite.tolist() == [True, True, True, False], f"finite rows are said to be {got.finite.tolist()}"
    raw = table[:3].double().log_softmax(-1)
    assert got.logprobs is not None
    assert got.ranks is not None
    assert got.top_ids is not None
    close(got.logprobs[:3], raw.gather(1, got.ids[:3, None].cpu())[:, 0], "float32", "log-probabilities")
    assert got.ranks[:3].tolist() == [1, 2, 1], f"ranks {got.ranks[:3].tolist()}"
    assert torch.equal(got.top_ids[:3].cpu(), raw.topk(2).indices), "the most likely ids"


def check_edits(backend: Backend) -> None:
    """Penalties, biases and bans, each alone and together, in some rows among others; log-probabilities are of before.

    Every row is drawn in the middle of one id's part of what its distribution should be.
    """
    upload = backend.memory.upload
    ids, kinds = 7, 5
    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(kinds, ids, generator=generator)
    counts = torch.randint(0, 4, (6, ids), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, (6, ids), generator=generator, dtype=torch.int32)
    penalised, places = [1, 4], [5, 2]  # kinds of rows, and their rows in the table
    repetition, presence, frequency = torch.tensor([[1.7, 0.6], [0.5, -0.8], [0.3, 0.9]])
    bias, banned = [(2, 3, 1.5), (4, 0, -2.0), (4, 6, 0.7)], [(3, 1), (3, 2), (4, 5)]

    exact = logits.double()
    for i, place, r, p, f in zip(penalised, places, repetition, presence, frequency, strict=True):
        generated = counts[place] % IN_PROMPT
        divided = torch.where(exact[i] > 0, exact[i] / r, exact[i] * r)
        exact[i] = torch.where(counts[place] > 0, divided, exact[i]) - f * generated - p * (generated > 0)
    for i, id_, value in bias:
        exact[i, id_] += value
    for i, id_ in banned:
        exact[i, id_] = float("-inf")
    shares = exact.softmax(-1)
    middles = shares.cumsum(-1) - shares / 2

    def column(values: Sequence[float], repeats: int = 1, dtype: torch.dtype = torch.int64) -> Tensor:
        return upload(torch.tensor(values, dtype=dtype).repeat_interleave(repeats))

    def rows(of: Sequence[int]) -> list[int]:
        return [i * ids + target for i in of for target in range(ids)]  # one row for each id of each kind

    params = Sampling(
        temperature=upload(torch.ones(kinds * ids)),
        uniforms=upload(middles.flatten().to(backend.ops.draw_dtype)),
        penalties=Penalties(
            column(rows(penalised)), upload(counts), column(places, ids),
            *(column(values.tolist(), ids, torch.float32) for values in (repetition, presence, frequency)),
        ),
        bias=(
            column(rows([i for i, _, _ in bias])), column([id_ for _, id_, _ in bias], ids),
            column([value for _, _, value in bias], ids, torch.float32),
        ),
        banned=(column(rows([i for i, _ in banned])), column([id_ for _, id_ in banned], ids)),
        logprobs=1,
    )  # fmt: skip
    table = logits.repeat_interleave(ids, dim=0)
    got = backend.ops.sample(upload(table.clone()), params)
    possible = shares.flatten() > 0
    wanted = torch.arange(ids).repeat(kinds)[possible]
    assert torch.equal(got.ids.cpu()[possible], wanted), f"drawn {got.ids.tolist()}, not {wanted.tolist()}"
    assert got.logprobs is not None
    raw = table.double().log_softmax(-1).gather(1, got.ids.cpu()[:, None])[:, 0]
    close(got.logprobs, raw, "float32", "log-probabilities of edited rows")
