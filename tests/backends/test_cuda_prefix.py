"""Decoding over a prefix that all requests share: read once for all, it gives what reading it for each gives."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from backends import test_cuda_engine
from backends.cuda_interpreted import interpreted

from anycore.contract.checks import AttentionCase, check_shared_prefix, close, exact_attention
from anycore.contract.sizes import Limits
from anycore.engine.tables import BlockTables
from anycore_cuda import ops
from anycore_cuda.kernels.decode import decode
from anycore_cuda.kernels.prefix import prefix

SIZE = 16
CASES = [
    AttentionCase("float32", 16, True, SIZE, None, None, 14, 2, 0),
    AttentionCase("float16", 80, True, SIZE, None, 3.0, 4, 4, 1),
]


class Sharing:
    """One row of each request over a cache where the first `shared` tokens of all lie in the same blocks."""

    def __init__(self, case: AttentionCase, shared: int, lens: list[int]) -> None:
        self.case, self.lens = case, lens
        generator = torch.Generator().manual_seed(case.seed)
        dtype = getattr(torch, case.dtype)
        columns = -(-max(lens) // SIZE)
        blocks = list(range(1, 1 + len(lens) * columns))
        random.Random(case.seed).shuffle(blocks)
        tables = torch.tensor(blocks).view(len(lens), columns)
        tables[:, : shared // SIZE] = tables[0, : shared // SIZE]
        self.tables = tables.int()
        shape = (2, 1 + len(blocks), case.kv_heads, SIZE, case.head_dim)
        self.cache = torch.randn(shape, generator=generator).to(dtype)
        self.q = torch.randn(len(lens), case.heads, case.head_dim, generator=generator).to(dtype)

    def attend(self, told: int | None, splits: int = 1, processors: int = 4) -> torch.Tensor:
        """With the prefix kernel, which is told how many tokens are shared, or without it."""
        case, out = self.case, torch.full_like(self.q, float("nan"))
        counters = torch.zeros(64, dtype=torch.int32)
        found = None
        if told is not None:
            tokens = torch.tensor([told], dtype=torch.int32)
            found = prefix(self.q, self.cache, self.tables, tokens, case.scale, case.softcap, processors)
        lens = torch.tensor(self.lens, dtype=torch.int32)
        given = self.q, self.cache, out, self.tables, lens, counters, splits, case.scale, None, case.softcap
        decode(*given, prefix=found)
        assert not counters.any()
        return out

    def exact(self, row: int) -> torch.Tensor:
        length = self.lens[row]
        k, v = (side[self.tables[row].long()].transpose(1, 2).flatten(0, 1)[:length] for side in self.cache)
        return exact_attention(self.q[row : row + 1], k, v, [length - 1], self.case)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("shared", "splits"), [(192, 1), (208, 2)])
def test_what_is_shared_is_counted_once(case: AttentionCase, shared: int, splits: int) -> None:
    """Requests that end right behind the prefix, a row of padding, a prefix that ends within a turn of the kernel."""
    lens = [shared + 1, shared + 16, shared + 150, 1, shared + 60]
    run = Sharing(case, shared, lens)
    joined, plain = run.attend(shared, splits), run.attend(None, splits)
    for row in range(len(lens)):
        close(joined[row : row + 1], run.exact(row), case.dtype, f"{case}, {shared} shared, length {lens[row]}")
    torch.testing.assert_close(joined, plain, rtol=1e-2, atol=1e-3 if case.dtype == "float32" else 2e-2)


def test_fewer_shared_tokens_than_one_turn_change_nothing() -> None:
    run = Sharing(CASES[0], 48, [49, 70])
    plain = run.attend(None)
    for told in (0, 48):
        assert torch.equal(run.attend(told), plain)


def test_a_prefix_of_every_length_gives_the_same() -> None:
    """Launched alike, for any number up to what is truly shared: captured graphs rely on it."""
    run = Sharing(CASES[0], 256, [257, 300, 290])
    plain = run.attend(None)
    for told in (64, 128, 256):
        torch.testing.assert_close(run.attend(told, processors=40), plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [None, 40])
def test_steps_that_only_decode_share_and_others_do_not(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "SAVED_TOKENS", 64)
    counted = Counter[str]()
    monkeypatch.setattr(ops, "prefix", lambda *a, **named: counted.update(["prefix"]) or prefix(*a, **named))
    case = AttentionCase("float32", 16, True, SIZE, window, None, 4, 2)
    check_shared_prefix(interpreted(), case, shared=100, requests=3)
    assert counted["prefix"] == (0 if window else 2)


def test_block_tables_tell_what_rows_share() -> None:
    tables = BlockTables(Limits(4, 64, 96, SIZE, 20))
    tables._table[:3, :6] = torch.tensor([[5, 6, 7, 8, 0, 0], [5, 6, 7, 9, 10, 0], [5, 6, 11, 0, 0, 0]]).numpy()
    tables._table[3, 0] = 12
    assert tables.shared([0, 1], 95) == 3 * SIZE
    assert tables.shared([0, 1, 2], 95) == 2 * SIZE
    assert tables.shared([2, 0], 31) == SIZE, "only what every request has computed"
    assert tables.shared([0, 3], 95) == tables.shared([1], 95) == 0


def test_requests_over_a_cached_prefix_equal_those_that_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole engine, replayed steps among them: the shared path is taken, and its tokens are those of each alone."""
    monkeypatch.setattr(ops, "SAVED_TOKENS", 64)
    limits = Limits(max_num_seqs=3, max_num_batched_tokens=80, max_model_len=96, block_size=SIZE, blocks=30)
    monkeypatch.setattr(test_cuda_engine, "LIMITS", limits)
    folder = tmp_path / "model"
    test_cuda_engine.tiny.tiny_lm(folder, family="qwen3", layers=1, heads=4, kv_heads=2, head_dim=16, hidden=32)
    common = [(7 * i + i * i) % 150 + 10 for i in range(66)]
    prompts = [[*common, 20 + i, 30 + 2 * i] for i in range(3)]
    mine, steps = test_cuda_engine.engine(folder)
    found = test_cuda_engine.engines.run(mine, prompts, max_tokens=5)
    assert any(shares for _, _, shares in steps[0]._recorded), "no step shared its prefix"
    alone = test_cuda_engine.engines.engine(folder)
    wanted = [test_cuda_engine.engines.run(alone, [prompt], max_tokens=5)[0].tokens for prompt in prompts]
    assert [output.tokens for output in found] == wanted
