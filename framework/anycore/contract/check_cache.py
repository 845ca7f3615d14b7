"""What the kit checks of rounded KV caches: what is stored is what a row rounds to by itself, however it got there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from anycore.contract.backend import Backend, KVSpec
from anycore.contract.checks import COMPANY_TOLERANCE, AttentionCase, PagedRun, Rows, run_attention

SUMS = 1e-5
"""How far the order of sums may move a result; one number rounded another way moves it by hundreds of times as much."""

ROUNDING = 64 << 10
"""What an allocator may round up, over all tensors of a small cache."""


def check_stored_alike(backend: Backend, case: AttentionCase, one_by_one: bool = True) -> None:
    """A prompt whole, in chunks of any length and token by token, and in company: the same numbers are read.

    Unlike in the other checks rows are ordinary: whatever way one takes into the cache, it has to be rounded alike.
    """
    size = case.block_size
    length = size + 9
    rows = Rows(length, case, torch.Generator().manual_seed(case.seed))
    splits = [[length], [size + 1, 1, 1, 6]]
    if one_by_one:
        splits += [[1] * length, [2, size - 1, 8] if size > 1 else [3, 7]]
    found = [outputs(backend, case, rows, split) for split in splits]
    for split, out in zip(splits[1:], found[1:], strict=True):
        off = float((out.double() - found[0].double()).abs().max())
        allowed = max(SUMS, COMPANY_TOLERANCE[case.dtype])
        assert off <= allowed, f"{case}: in chunks of {split} results move by {off:.3g}, allowed {allowed:.3g}"


def outputs(backend: Backend, case: AttentionCase, rows: Rows, split: list[int]) -> Tensor:
    """One request's rows, so many a step, through the operation that models call."""
    run = PagedRun(backend, case)
    table = [run.free.pop() for _ in range(-(-sum(split) // case.block_size))]
    mate = [run.free.pop()]
    out = []
    for number, (start, end) in enumerate(pairwise([0, *accumulate(split)])):
        counts, contexts, tables = [end - start], [start], [table]
        given = rows.mixed[start:end]
        if number % 2:  # every other step with a neighbour
            counts, contexts, tables = [1, *counts], [0, *contexts], [mate, *tables]
            given = torch.cat((rows.mixed[:1], given))
        batch = run.batch(counts, contexts, tables)
        qkv = backend.memory.upload(given.view(len(given), -1, case.head_dim).clone())
        attended = backend.ops.self_attention(
            qkv, case.heads, case.kv_heads, None, None, run.kv[0], batch, case.scale, case.window, case.softcap
        )
        out.append(attended.cpu()[-(end - start) :])
    return torch.cat(out)


def check_unusual(backend: Backend, case: AttentionCase) -> None:
    """Rows of zeros, tiny and huge ones are stored as what they are; NaN and infinity stay in their own request."""
    run = PagedRun(backend, case)
    count = 5
    rows = Rows(3 * count, case, torch.Generator().manual_seed(3))
    q, k, v = rows.split(rows.mixed)
    v[0] = 0.0
    v[1] *= 1e-4
    v[2] *= 200.0
    k[:count] *= 0.01  # each token then counts for about as much as another
    k[count + 2, 0, 1] = float("nan")
    v[2 * count + 1, 0, 3] = float("inf")
    tables = [[run.free.pop() for _ in range(-(-count // case.block_size))] for _ in range(3)]
    batch = run.batch([count] * 3, [0] * 3, tables)
    out = run_attention(backend, q, k, v, run.kv[0], batch, case)
    finite = out.flatten(1).isfinite().all(1)
    assert bool(finite[:count].all()), f"{case}: a request beside one with NaN has results that are not finite"
    assert not bool(finite[count + 2]), f"{case}: NaN in a key went unnoticed"
    assert not bool(finite[2 * count + 1]), f"{case}: infinity in a value went unnoticed"
    first = out[0].abs().max()
    assert float(first) == 0.0, f"{case}: a value of zeros became {float(first):.3g}"


def check_memory(backend: Backend, caches: Sequence[KVSpec], blocks: int) -> None:
    """Rounded caches take what the plan counts for them, and about half of what 16 bits do."""
    memory = backend.memory
    before = memory.held()
    handles = [memory.allocate_kv(kv, blocks) for kv in caches]
    after = memory.held()
    for kv, found in zip(caches, handles, strict=True):
        block, dense = memory.block_bytes(kv), memory.block_bytes(replace(kv, rounded=None, dtype="float16"))
        exact = kv.bytes_per_token * kv.block_size
        assert block >= exact, f"a block of {exact} bytes is said to take {block}"
        assert block < 0.6 * dense, f"a rounded block takes {block} bytes, one in 16 bits {dense}"
        assert len(found) == kv.layers, f"{len(found)} handles for {kv.layers} layers"
    if before is not None and after is not None:
        taken, counted = after - before, blocks * sum(map(memory.block_bytes, caches))
        assert taken <= counted + ROUNDING, f"{blocks} blocks of each take {taken} bytes, counted were {counted}"
