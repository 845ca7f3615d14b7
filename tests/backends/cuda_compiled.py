"""Compiles the CUDA backend's kernels for compute capability 9.0 on a machine without a GPU; nothing is computed.

Run as a program of its own (Triton must not interpret): python cuda_compiled.py FOLDER, which holds a decoder. Prints
as JSON which kernels the rehearsal compiled, and which were still missing in what it stands for; then those of
quantised products, of rounded KV caches and of masks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from cuda_host import HostMemory
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel

from anycore.contract.backend import Backend
from anycore.contract.batch import Batch, Sampling
from anycore.contract.capture import NotCaptured
from anycore.contract.check_weights import fp8_weight, int4_weight, int8_weight
from anycore.contract.declare import Task
from anycore.contract.formats import KV_CACHES
from anycore.contract.graphs import GraphStep
from anycore.contract.sizes import KVSpec, Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.engine import Engine
from anycore.engine.request import NewRequest, SamplingParams
from anycore.engine.runner import Runner
from anycore.engine.scheduler import Scheduler
from anycore.models import loader
from anycore.models.source import Source
from anycore.models.spec import read_spec
from anycore_cuda.kernels import small_products
from anycore_cuda.kernels.launch import launch
from anycore_cuda.ops import CudaOps

LIMITS = Limits(max_num_seqs=40, max_num_batched_tokens=64, max_model_len=64, block_size=16, blocks=12)


class Driver:
    """What Triton asks of a device in order to compile for it."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def no_graphs(work: Any) -> Any:
    raise NotCaptured("there is no device")


hasty: list[str] = []
"""Kernels that start early and touch what others write before they wait."""


INSTRUCTIONS = ("dp4a.s32.s32", "dp4a.u32.s32", "cvt.rn.f16x2.e4m3x2", "cvt.rn.satfinite.e4m3x2.f32")
used: set[str] = set()
"""Which of these the kernels are made of."""


def waits(kernel: Any) -> bool:
    """Whether a kernel waits before it writes, or, unless that is how it reads its weights, reads."""
    before, wait, _ = kernel.asm["ptx"].partition("griddepcontrol.wait")
    reads = () if kernel.name.endswith(("_matvec", "_norm")) else ("ld.global", "cp.async")
    touching = ("st.global", "atom.", "red.", *reads)
    return bool(wait) and not any(word in before for word in touching)


def leave_out(kernel: Any) -> None:
    """In place of loading a kernel: launches of it do nothing."""
    used.update(name for name in INSTRUCTIONS if name in kernel.asm["ptx"])
    if kernel.metadata.launch_pdl and not waits(kernel):
        hasty.append(kernel.name)
    kernel.module, kernel.function, kernel._run = "none", 0, lambda *arguments: None


def compile_quantised(ops: CudaOps) -> None:
    """Go through the products of every format, as on a chip that multiplies e4m3."""
    ops.chip = replace(ops.chip, e4m3=True)
    generator, bf16 = torch.Generator().manual_seed(0), torch.bfloat16
    for weight in (
        int8_weight((64, 320), 320, bf16, generator),
        int8_weight((64, 320), 32, bf16, generator),
        int4_weight((64, 320), 32, bf16, generator),
        int4_weight((64, 256), 128, bf16, generator),
        fp8_weight((64, 320), bf16, generator),
    ):
        packed = ops.pack(weight)
        columns = packed.shape[1]
        for rows in (1, 8):
            x = torch.zeros(rows, columns, dtype=bf16)
            ops.norm_linear(x, x, torch.ones(columns), 1e-6, packed, None, "silu")
            ops.logits(x, packed)
        ops.embedding(torch.zeros(3, dtype=torch.int64), packed)


def any_rows(ops: CudaOps) -> None:
    """Multiply 4 bits by more and by fewer rows than `compile_quantised` did."""
    for group in (32, 128):
        packed = ops.pack(int4_weight((64, 256 if group == 128 else 320), group, torch.bfloat16, torch.Generator()))
        for rows in (2, 17, 33, 65, 97, 129, 145, 161, 193, 256):
            ops.linear(torch.zeros(rows, packed.shape[1], dtype=torch.bfloat16), packed)


def any_small_rows(ops: CudaOps) -> None:
    """Multiply the decoder's matrices, whose products small shapes do, by rows that the rehearsal did not have."""
    qkv, out, gate_up, down = ((128, 32), (32, 64), (1280, 32), (32, 640))
    made = {shape: torch.zeros(shape, dtype=torch.bfloat16) for shape in (qkv, out, gate_up, down)}
    scale = torch.ones(32)
    for rows in (2, 3, 17, 33, 65, 100, 129, 192, 256):
        x = torch.zeros(rows, 640, dtype=torch.bfloat16)
        residual = torch.zeros(rows, 32, dtype=torch.bfloat16)
        joined, _ = ops.rms_norm(ops.linear_for_norm(x, made[down]), scale, 1e-6, residual)
        ops.linear(joined, made[qkv])
        ops.linear_for_norm(torch.zeros(rows, 64, dtype=torch.bfloat16), made[out])
        ops.norm_linear(joined, residual, scale, 1e-6, made[gate_up], None, "silu")


def compile_masked(ops: CudaOps) -> None:
    """Sample rows under a grammar, with and without a bias."""
    rows, words = torch.tensor([2, 0]), torch.zeros(2, 10, dtype=torch.int32)
    plain = Sampling(torch.ones(3), torch.zeros(3, dtype=ops.draw_dtype), masked=(rows, words))
    for params in (plain, replace(plain, bias=(rows, rows, torch.zeros(2)))):
        ops.sample(torch.zeros(3, 320), params)


def compile_rounded(ops: CudaOps, kind: str) -> None:
    """Go through prompts, decoding, and decoding beside a prompt and over a shared prefix, on a rounded cache."""
    heads, kv_heads, dim, size = 8, 2, 64, 16
    cache = ops.memory.allocate_kv(KVSpec(1, kv_heads, dim, size, "bfloat16", kind), 6)
    for lens, contexts in (([20, 3], [0, 0]), ([1, 1], [9, 20]), ([1, 5], [9, 20]), ([1, 1], [1 << 17, 1 << 17])):
        rows = sum(lens)
        batch = Batch(
            torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64),
            query_lens=lens, context_lens=contexts, output_rows=None, causal=True,
            slots=torch.zeros(rows, dtype=torch.int64),
            block_tables=torch.zeros(2, 4, dtype=torch.int32), kv=cache, block_size=size,
        )  # fmt: skip
        batch.shared_tokens = contexts[0] if contexts[0] > 1 << 16 else 0
        batch.plan = ops.plan(batch)
        qkv = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=torch.bfloat16)
        angles = torch.zeros(rows, dim // 2), torch.zeros(rows, dim // 2)
        ops.self_attention(qkv, heads, kv_heads, None, angles, cache[0], batch, 0.1)
        ops.attention(*qkv.split((heads, kv_heads, kv_heads), dim=1), cache[0], batch, 0.1)


def main(folder: str) -> None:
    compiled: list[str] = []
    rehearsed: list[str] = []
    triton.runtime.driver.set_active(Driver())
    CompiledKernel._init_handles = leave_out
    torch.cuda.set_device = lambda device: None  # type: ignore[assignment]
    triton.knobs.compilation.listener = lambda src, **more: compiled.append(src.fn.__name__)

    source = Source(folder, Path(folder))
    spec = read_spec(source).for_task(Task.GENERATE)
    memory = HostMemory(torch.device("cpu"))
    ops = CudaOps(memory, processors=132, early=True)
    ops.wide_products = False  # the CPU has none
    ops.measured, small_products.LEAST = True, 0
    backend = Backend(memory.device, memory, ops)
    seen: list[tuple[GraphStep, Batch]] = []

    @contextmanager
    def rehearsal() -> Iterator[None]:
        with launch.compiling(backend.device):
            yield
        rehearsed.extend(compiled)
        compiled.clear()

    def optimize(step: Any, limits: Limits) -> Any:
        graphs = GraphStep(step, ops, limits, backend.device, no_graphs, rehearsal=rehearsal)

        def watched(batch: Batch, sampling: Sampling | None) -> Any:
            seen.append((graphs, batch))
            return graphs(batch, sampling)

        return watched

    backend.optimize = optimize  # type: ignore[method-assign]
    model = loader.load(source, spec, backend, "bfloat16")
    kv = memory.allocate_kv(spec.kv(LIMITS.block_size, "bfloat16"), LIMITS.blocks)
    pool = BlockPool(LIMITS.blocks, LIMITS.block_size)
    engine = Engine(Runner(model, backend, Task.GENERATE, LIMITS, kv), Scheduler(LIMITS, pool), LIMITS)
    for i in range(2):
        sampling = SamplingParams(max_tokens=2, temperature=0.6)
        engine.add(NewRequest(id=str(i), task=Task.GENERATE, token_ids=[5, 6, 7], sampling=sampling))
    engine.step()
    graphs, batch = seen[0]
    with torch.inference_mode():
        graphs._prepare(batch, LIMITS.max_num_seqs, True, False)
    missing = sorted(compiled)
    compiled.clear()
    with torch.inference_mode(), launch.compiling(backend.device):
        compile_quantised(ops)
    quantised = sorted(set(compiled))
    compiled.clear()
    with torch.inference_mode():
        any_rows(ops)
        any_small_rows(ops)
    missing += sorted(compiled)
    compiled.clear()
    with torch.inference_mode(), launch.compiling(backend.device):
        for kind in KV_CACHES:
            compile_rounded(ops, kind)
    rounded = sorted(set(compiled))
    compiled.clear()
    with torch.inference_mode(), launch.compiling(backend.device):
        compile_masked(ops)
    found = {
        "rehearsed": sorted(rehearsed), "missing": missing, "hasty": hasty, "quantised": quantised,
        "rounded": rounded, "masked": sorted(set(compiled)),
        "unused": sorted(set(INSTRUCTIONS) - used),
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
