"""The conformance kit: a pytest class that is generated from a backend's support table.

    class TestMyBackend(BackendConformance):
        backend = "mine"

Every combination that the table claims for the device at hand is compared with float64. Needs pytest, which only
this module imports.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import pytest
import torch

from anycore.contract import (
    check_cache,
    check_ranks,
    checks,
    endtoend,
    endtoend_cache,
    endtoend_faults,
    endtoend_weights,
)
from anycore.contract.backend import Backend, KVSpec
from anycore.contract.check_graphs import check_optimized
from anycore.contract.check_masks import check_masked
from anycore.contract.check_weights import check_quantised
from anycore.contract.checks import AttentionCase
from anycore.contract.declare import CONTRACT_VERSION, DTYPES, FEATURES, BackendSpec, Level, Support, Task
from anycore.contract.formats import KV_CACHES, SCHEMES
from anycore.contract.ops import Ops
from anycore.errors import AnycoreError
from anycore.plugins import load

HEAD_DIMS = (64, 16, 80, 256)
"""What is tried where a row says "any head size": powers of two and not, small and large."""

BLOCK_SIZES = (16, 1, 32)
"""What is tried where a row says "any block size"."""

HEADS = ((6, 2), (4, 4), (4, 1))
"""Query and KV heads: grouped, one to one, all on one."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


class BackendConformance:
    """Inherit, name the backend, and let pytest collect it."""

    backend: str

    @classmethod
    def spec(cls) -> BackendSpec:
        """The backend as its plugin declares it."""
        return load().backend(cls.backend)

    @pytest.fixture(scope="class")
    def device(self) -> Iterator[Backend]:
        """The backend, open. Where there is no device, what needs one is skipped with the probe's reason."""
        spec = self.spec()
        probe = spec.probe()
        if not probe.available:
            pytest.skip(f"no {spec.name} device: {probe.reason}")
        with torch.inference_mode():
            opened = spec.open(probe.devices[0].index)
            yield opened
            opened.close()

    @pytest.fixture(autouse=True)
    def cleared(self) -> Iterator[None]:
        """Let no case find the device full of another's engines: they hold themselves in circles."""
        yield
        if gc.get_freeze_count():  # an engine's warm-up froze what was alive, earlier engines among it
            gc.unfreeze()
            gc.collect()

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test a claim: pytest calls this for every test of the class."""
        for name, make in CASES.items():
            if name in metafunc.fixturenames:
                found = list(dict.fromkeys(make(self.claims())))  # rows may overlap
                metafunc.parametrize(name, found, ids=map(title, found))

    @classmethod
    def claims(cls) -> list[Support]:
        """Rows that hold on the first device found, or on any chip when there is none."""
        spec = cls.spec()
        devices = spec.probe().devices
        chip = devices[0].chip if devices else None
        return [
            row
            for row in spec.support
            if row.level is not Level.UNSUPPORTED and (chip is None or not row.chips or chip in row.chips)
        ]

    # --- what it declares ----------------------------------------------------------------------------------------

    def test_declares_itself_soundly(self) -> None:
        spec = self.spec()
        assert spec.api[0] == CONTRACT_VERSION[0]
        assert spec.api[1] <= CONTRACT_VERSION[1]
        assert spec.support, "the support table is empty"
        assert 0 < spec.memory_utilization <= 1
        for row in spec.support:
            assert row.tasks, f"{row} names no task"
            assert row.attention in ("causal", "bidirectional"), row
            assert row.attention == "causal" or Task.GENERATE not in row.tasks, f"{row} generates without causality"
            assert set(row.weights) <= set(DTYPES), row
            assert set(row.features) <= set(FEATURES), row
            assert set(row.schemes) <= set(SCHEMES), row
            assert set(row.kv_caches) <= set(KV_CACHES), row
            assert row.attention == "causal" or not row.kv_caches, f"{row} has no KV cache to round"
            assert all(size > 0 for size in (*row.block_sizes, *row.head_dims)), row
            assert row.level is not Level.UNSUPPORTED or row.note, f"{row} is unsupported and does not say why"

    def test_is_named_without_heavy_imports(self) -> None:
        code = (
            "import sys; from anycore.plugins import load; load()"
            f".backend({self.backend!r}).probe(); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, f"naming and probing the backend imports torch or fails: {done.stderr}"

    def test_probes_with_devices_or_a_reason(self) -> None:
        probe = self.spec().probe()
        assert probe.available or (probe.reason and probe.advice)
        for device in probe.devices:
            assert device.name
            assert device.chip
            assert device.memory is None or device.memory > 0

    def test_refuses_a_device_that_is_not_there(self, device: Backend) -> None:
        with pytest.raises(AnycoreError, match="9999"):
            self.spec().open(9999)

    # --- memory --------------------------------------------------------------------------------------------------

    def test_memory(self, device: Backend, dtype: str) -> None:
        for size in (1, 16):
            checks.check_memory(device, KVSpec(3, 2, 80, size, dtype), blocks=5)

    def test_rounded_memory(self, device: Backend) -> None:
        found = dict.fromkeys(cached_cases(self.claims()))
        if not found:
            pytest.skip("no rounded KV cache is claimed")
        caches = [KVSpec(3, 2, 80, size, dtype, kind) for kind, dtype in found for size in (1, 16)]
        check_cache.check_memory(device, caches, blocks=5)

    # --- operations ----------------------------------------------------------------------------------------------

    def test_paged_attention(self, device: Backend, paged_case: AttentionCase) -> None:
        checks.check_paged_attention(device, paged_case)

    def test_shared_prefix(self, device: Backend, shared_case: AttentionCase) -> None:
        checks.check_shared_prefix(device, shared_case)
        if type(device.ops).shares is not Ops.shares:  # long prefixes may go another way
            checks.check_shared_prefix(device, shared_case, shared=2080, requests=40)

    def test_random_lengths(self, device: Backend, shared_case: AttentionCase) -> None:
        checks.check_random_lengths(device, shared_case)

    def test_rounded_cache(self, device: Backend, rounded_case: AttentionCase) -> None:
        checks.check_paged_attention(device, rounded_case)
        checks.check_random_lengths(device, rounded_case, steps=4)
        check_cache.check_stored_alike(device, rounded_case)

    def test_rounded_cache_of_a_shared_prefix(self, device: Backend, cached: tuple[str, str]) -> None:
        case = next(case for case in rounded_cases(self.claims()) if (case.kv_cache, case.dtype) == cached)
        checks.check_shared_prefix(device, case)
        check_cache.check_unusual(device, case)
        if type(device.ops).shares is not Ops.shares:
            checks.check_shared_prefix(device, case, shared=2080, requests=40)

    def test_packed_attention(self, device: Backend, packed_case: AttentionCase) -> None:
        checks.check_packed_attention(device, packed_case)

    def test_batch_mates_change_nothing(self, device: Backend, packed_case: AttentionCase) -> None:
        checks.check_company(device, packed_case)

    @pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 130])
    def test_linear(self, device: Backend, dtype: str, rows: int) -> None:
        for shape, biased in product(((64, 48), (50, 33), (3, 256), (1, 32)), (False, True)):
            checks.check_linear(device, dtype, rows, shape, biased)

    @pytest.mark.parametrize("rows", [0, 1, 5, 33])
    def test_linear_with_quantised_weights(self, device: Backend, dtype: str, rows: int) -> None:
        if self.spec().api < (1, 1):
            pytest.skip("quantised weights came with contract 1.1: this backend is never given any")
        check_quantised(device, dtype, rows, biased=rows > 1)

    def test_linear_of_no_rows(self, device: Backend, dtype: str) -> None:
        checks.check_linear(device, dtype, 0, (64, 48), biased=True)

    @pytest.mark.parametrize("rows", [1, 5, 64])
    def test_norms(self, device: Backend, dtype: str, rows: int) -> None:
        for width, with_residual in product((48, 77, 576), (False, True)):
            checks.check_norms(device, dtype, rows, width, with_residual)

    @pytest.mark.parametrize("rows", [1, 5])
    @pytest.mark.parametrize("gate", [None, *ACTIVATIONS])
    def test_norm_linear(self, device: Backend, dtype: str, gate: str | None, rows: int) -> None:
        for shape, with_residual, biased in product(((64, 48), (50, 77), (36, 1100)), (False, True), (False, True)):
            checks.check_norm_linear(device, dtype, rows, shape, gate, with_residual, biased)

    @pytest.mark.parametrize("rows", [1, 5, 64])
    def test_rotary(self, device: Backend, dtype: str, rows: int) -> None:
        for heads, kv_heads, head_dim in ((6, 2, 64), (1, 1, 16), (4, 4, 80), (4, 1, 256)):
            checks.check_rotary(device, dtype, rows, heads, kv_heads, head_dim)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_gated(self, device: Backend, dtype: str, kind: str) -> None:
        for rows, width in ((1, 64), (5, 33), (40, 96)):
            checks.check_gated(device, dtype, kind, rows, width)

    def test_pool(self, device: Backend, dtype: str) -> None:
        for lens, width in (([1], 48), ([7, 1, 40, 16], 77), ([3, 300], 200)):
            checks.check_pool(device, dtype, lens, width)

    def test_embedding(self, device: Backend, dtype: str) -> None:
        table = torch.randn(17, 24, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
        ids = torch.tensor([16, 0, 3, 3])
        got = device.ops.embedding(device.memory.upload(ids), device.memory.upload(table))
        assert torch.equal(got.cpu(), table[ids])

    def test_sampling(self, device: Backend) -> None:
        checks.check_sampling(device)
        checks.check_edits(device)
        check_masked(device)

    def test_results_are_written_whole(self, device: Backend, dtype: str) -> None:
        """Where memory that nobody has written to holds NaN, results are what they are elsewhere."""
        kinds = {(case.causal, bool(case.block_size)): case for case in self.attention_cases() if case.dtype == dtype}
        with checks.poisoned_memory():
            for case in kinds.values():
                check = checks.check_paged_attention if case.block_size else checks.check_packed_attention
                check(device, case)
            for rows in (1, 7):
                checks.check_linear(device, dtype, rows, (50, 33), biased=True)
                checks.check_norms(device, dtype, rows, 77, with_residual=True)
                checks.check_norm_linear(device, dtype, rows, (36, 77), "silu", with_residual=True, biased=True)
                checks.check_rotary(device, dtype, rows, 4, 2, 80)
                checks.check_gated(device, dtype, "silu", rows, 33)
            checks.check_pool(device, dtype, [7, 1, 40], 77)
            checks.check_sampling(device)
            if self.spec().api >= (1, 1):
                check_quantised(device, dtype, 5, biased=True)

    @classmethod
    def attention_cases(cls) -> Iterator[AttentionCase]:
        yield from shared_cases(cls.claims())
        yield from packed_cases(cls.claims())

    # --- steps ---------------------------------------------------------------------------------------------------

    def test_optimized_steps(self, device: Backend, dtype: str) -> None:
        self.need(Task.GENERATE, "causal", dtype)
        rows = [row for row in self.claims() if row.attention == "causal" and dtype in row.weights]
        size = next((row.block_sizes[0] for row in rows if row.block_sizes), 16)
        check_optimized(device, AttentionCase(dtype, self.head_dim("causal"), causal=True, block_size=size))

    def test_optimized_steps_on_a_rounded_cache(self, device: Backend, cached: tuple[str, str]) -> None:
        self.need(Task.GENERATE, "causal", cached[1])
        case = next(case for case in rounded_cases(self.claims()) if (case.kv_cache, case.dtype) == cached)
        check_optimized(device, case)

    # --- whole tasks ---------------------------------------------------------------------------------------------

    def test_generates(self, device: Backend, dtype: str, tmp_path: Path) -> None:
        self.need(Task.GENERATE, "causal", dtype)
        endtoend.save_decoder(tmp_path, self.head_dim("causal"))
        endtoend.check_generate(self.backend, dtype, tmp_path)

    def test_embeds(self, device: Backend, dtype: str, tmp_path: Path) -> None:
        self.need(Task.EMBED, "bidirectional", dtype)
        endtoend.save_encoder(tmp_path, self.head_dim("bidirectional"), Task.EMBED)
        endtoend.check_embed(self.backend, dtype, tmp_path)

    def test_reranks(self, device: Backend, dtype: str, tmp_path: Path) -> None:
        self.need(Task.RERANK, "bidirectional", dtype)
        endtoend.save_encoder(tmp_path, self.head_dim("bidirectional"), Task.RERANK)
        endtoend.check_rerank(self.backend, dtype, tmp_path)

    def test_ranks(self, device: Backend, tmp_path: Path) -> None:
        """What rows claim by "tensor_parallel": a model is computed by several processes as by one."""
        dtype = check_ranks.claimed(self.claims())
        if dtype is None:
            pytest.skip("tensor_parallel is not claimed")
        assert device.collective is not None, "tensor_parallel is claimed, and no collective is named"
        found = check_ranks.places(self.spec())
        if found < check_ranks.RANKS:
            pytest.skip(f"{check_ranks.RANKS} ranks need as many devices: {found} here")
        endtoend.save_decoder(tmp_path, self.head_dim("causal"))
        check_ranks.check_ranks(self.backend, dtype, tmp_path)

    # --- whole tasks with quantised weights: what the rows' schemes claim ---------------------------------------------

    @pytest.mark.parametrize("tied", [False, True])
    def test_generates_with(self, device: Backend, held: tuple[str, str], tied: bool, tmp_path: Path) -> None:
        scheme, dtype = held
        self.need(Task.GENERATE, "causal", dtype, scheme)
        head_dim = self.head_dim("causal")
        endtoend_weights.check_generate(self.backend, dtype, scheme, tmp_path / "model", head_dim, tied)

    def test_embeds_with(self, device: Backend, held: tuple[str, str], tmp_path: Path) -> None:
        scheme, dtype = held
        self.need(Task.EMBED, "bidirectional", dtype, scheme)
        head_dim = self.head_dim("bidirectional")
        endtoend_weights.check_embed(self.backend, dtype, scheme, tmp_path / "model", head_dim)

    def test_reranks_with(self, device: Backend, held: tuple[str, str], tmp_path: Path) -> None:
        scheme, dtype = held
        self.need(Task.RERANK, "bidirectional", dtype, scheme)
        head_dim = self.head_dim("bidirectional")
        endtoend_weights.check_rerank(self.backend, dtype, scheme, tmp_path / "model", head_dim)

    # --- whole tasks on a rounded KV cache --------------------------------------------------------------------------

    def test_generates_on_a_rounded_cache(self, device: Backend, cached: tuple[str, str], tmp_path: Path) -> None:
        kind, dtype = cached
        self.need(Task.GENERATE, "causal", dtype)
        endtoend.save_decoder(tmp_path, self.head_dim("causal"))
        endtoend_cache.check_generate(self.backend, dtype, kind, tmp_path)

    # --- an engine under stress ----------------------------------------------------------------------------------

    @pytest.fixture
    def decoder(self, device: Backend, dtype: str, tmp_path: Path) -> Path:
        """A tiny model, where the table claims that dtype for generation."""
        self.need(Task.GENERATE, "causal", dtype)
        endtoend.save_decoder(tmp_path, self.head_dim("causal"))
        return tmp_path

    def test_disturbances_lose_nothing(self, decoder: Path, dtype: str) -> None:
        endtoend_faults.check_disturbed(self.backend, dtype, decoder)

    def test_nan_stays_in_its_request(self, decoder: Path, dtype: str) -> None:
        endtoend_faults.save_sick_decoder(decoder, self.head_dim("causal"))
        endtoend_faults.check_sick(self.backend, dtype, decoder)

    def test_a_lost_device_is_heard(self, decoder: Path, dtype: str) -> None:
        endtoend_faults.check_lost(self.backend, dtype, decoder)

    def test_repeats_itself(self, decoder: Path, dtype: str) -> None:
        endtoend_faults.check_repeats(self.backend, dtype, decoder)

    def test_stays_inside_the_plan(self, device: Backend, decoder: Path, dtype: str) -> None:
        endtoend_faults.check_planned(device, dtype, decoder)

    def test_a_thousand_requests_leave_nothing(self, decoder: Path, dtype: str) -> None:
        endtoend_faults.check_leaks(self.backend, dtype, decoder)

    def need(self, task: Task, attention: str, dtype: str, scheme: str | None = None) -> None:
        """Skip where the table does not claim it."""
        rows = [row for row in self.claims() if task in row.tasks and row.attention == attention]
        if not any(dtype in row.weights and (scheme is None or scheme in row.schemes) for row in rows):
            pytest.skip(f"{task.value} with {attention} attention in {scheme or ''} {dtype} is not claimed")

    def head_dim(self, attention: str) -> int:
        return next((row.head_dims[0] for row in self.claims() if row.attention == attention and row.head_dims), 64)


def dtypes(rows: list[Support]) -> Iterator[str]:
    """Every dtype that some row claims, once."""
    yield from dict.fromkeys(name for row in rows for name in row.weights)


def held_cases(rows: list[Support]) -> Iterator[tuple[str, str]]:
    """Every scheme of quantised weights that some row claims, with each dtype it is multiplied by."""
    for row in rows:
        yield from product(row.schemes, row.weights)


def cached_cases(rows: list[Support]) -> Iterator[tuple[str, str]]:
    """Every rounded KV cache that some row claims, with each dtype of what is stored there."""
    for row in rows:
        yield from product(row.kv_caches, row.weights)


def rounded_cases(rows: list[Support]) -> Iterator[AttentionCase]:
    """What rows claim for rounded KV caches, at one block size: every head size, with windows and soft caps in turn."""
    for row in rows:
        size = (row.block_sizes or BLOCK_SIZES)[0]
        turns = 3 if {"sliding_window", "softcap"} <= set(row.features) else 1
        for number, kind in enumerate(row.kv_caches):
            chosen = islice(cases(row, size, windows=(size + 3,)), number % turns, None, turns)
            yield from (replace(case, kv_cache=kind) for case in chosen)


def paged_cases(rows: list[Support]) -> Iterator[AttentionCase]:
    """What rows claim for models with a KV cache: every block size with every head size, window and soft cap."""
    for row in rows:
        if row.attention == "causal":
            for size in row.block_sizes or BLOCK_SIZES:
                yield from cases(row, size, windows=(5, size + 3))


def shared_cases(rows: list[Support]) -> Iterator[AttentionCase]:
    """What rows claim for models with a KV cache, at one block size."""
    for row in rows:
        if row.attention == "causal":
            yield from cases(row, (row.block_sizes or BLOCK_SIZES)[0], windows=(33,))


def packed_cases(rows: list[Support]) -> Iterator[AttentionCase]:
    """What rows claim for models without a KV cache."""
    for row in rows:
        yield from cases(row, 0, windows=(1, 9))


def cases(row: Support, block_size: int, windows: tuple[int, ...]) -> Iterator[AttentionCase]:
    """Every dtype, head size, window and soft cap of one row; the ratio of heads changes along the way."""
    reach = (None, *windows) if "sliding_window" in row.features else (None,)
    caps = (None, 3.0) if "softcap" in row.features else (None,)
    claimed = product(row.weights, row.head_dims or HEAD_DIMS, reach, caps)
    for seed, (dtype, dim, window, cap) in enumerate(claimed):
        heads, kv_heads = HEADS[seed % len(HEADS)]
        causal = row.attention == "causal"
        yield AttentionCase(dtype, dim, causal, block_size, window, cap, heads, kv_heads, seed)


def title(case: Any) -> str:
    """A short name for a test: bfloat16-64-b16-w19-cap."""
    if not isinstance(case, AttentionCase):
        return "-".join(case) if isinstance(case, tuple) else str(case)
    words = [case.dtype, "causal" if case.causal else "full", f"d{case.head_dim}", f"h{case.heads}/{case.kv_heads}"]
    words += [f"b{case.block_size}"] if case.block_size else []
    words += [f"w{case.window}"] if case.window else []
    words += [case.kv_cache] if case.kv_cache else []
    return "-".join(words + (["cap"] if case.softcap else []))


CASES: dict[str, Callable[[list[Support]], Iterator[Any]]] = {
    "dtype": dtypes,
    "held": held_cases,
    "cached": cached_cases,
    "rounded_case": rounded_cases,
    "paged_case": paged_cases,
    "shared_case": shared_cases,
    "packed_case": packed_cases,
}
"""Test arguments that come from the table."""
