"""Times a backend's operations at a model's shapes, one by one: what a model of step times can be fitted to.

Weights are random. A matrix is multiplied by as many copies as the model has layers, or COPIES bytes of them: in a real
step, too, no cache holds what the last layer used.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend
from anycore.contract.batch import Batch
from anycore.contract.declare import DTYPES
from anycore.contract.weights import DenseWeight
from anycore.models.parameters import parameters
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import Quantization, pieces
from anycore.models.spec import ModelSpec

COPIES = 1 << 30
COPIED = 1 << 28  # bytes that are copied to learn the memory's speed
TURNS = 5
MOST_CALLS = 1000

Call = Callable[[], Any]
Row = dict[str, Any]


class Bench:
    """One backend and one model's shapes."""

    def __init__(
        self, backend: Backend, spec: ModelSpec, dtype: str, quantization: Quantization | None, seconds: float
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.dtype = getattr(torch, dtype)
        self.bytes = DTYPES[dtype]
        self.quantization = quantization
        self.seconds = seconds
        self.generator = torch.Generator().manual_seed(0)
        self.bandwidth = self._bandwidth()  # bytes a second, of reading and writing alike

    def products(self, rows: Sequence[int]) -> Iterator[Row]:
        """Every matrix of a layer, and the head, times so many rows."""
        ops, layer = self.backend.ops, self.first_layer()
        for parameter in parameters(self.spec):
            if not (parameter.head or (parameter.packed and parameter.name.startswith(layer))):
                continue
            for piece in pieces(parameter, self.quantization):
                copies = 1 if parameter.head else max(1, min(self.spec.layers, COPIES // piece.bytes(self.dtype_name)))
                handles = [self._packed(piece) for _ in range(copies)]
                multiply = ops.logits if parameter.head else ops.linear
                name = parameter.name.removeprefix(layer).removesuffix(".weight")
                outputs, inputs = piece.shape
                for count in rows:
                    x = self._random(count, inputs)
                    calls = [lambda x=x, handle=handle, m=multiply: m(x, handle) for handle in handles]
                    moved = piece.bytes(self.dtype_name) + count * (inputs + outputs) * self.bytes
                    yield self._row(
                        "logits" if parameter.head else "linear",
                        calls,
                        moved,
                        2 * count * outputs * inputs,
                        matrix=name,
                        shape=[outputs, inputs],
                        format=piece.format.kind if piece.format else self.dtype_name,
                        rows=count,
                    )

    def elementwise(self, rows: Sequence[int]) -> Iterator[Row]:
        """The norm and the activation of a layer."""
        ops, spec = self.backend.ops, self.spec
        weight = self.backend.memory.upload(torch.ones(spec.hidden_size))
        for count in rows:
            x, inner = self._random(count, spec.hidden_size), self._random(count, 2 * spec.intermediate_size)
            shape = {"rows": count}
            if spec.family == "decoder":
                norm = [lambda x=x: ops.rms_norm(x, weight, spec.norm_eps, x)]
                gate = [lambda inner=inner: ops.gated(inner, spec.activation)]
                yield self._row("gated", gate, 3 * inner.nbytes // 2, 0, **shape)
                yield self._row("rms_norm", norm, 4 * x.nbytes, 0, **shape)
            else:
                norm = [lambda x=x: ops.layer_norm(x, weight, weight, spec.norm_eps, x)]
                yield self._row("layer_norm", norm, 4 * x.nbytes, 0, **shape)

    def attention(self, requests: Sequence[int], lengths: Sequence[int], block_size: int) -> Iterator[Row]:
        """One layer: decodes of several requests over a context, and a prompt of that length; without a cache texts."""
        for length in (length for length in lengths if length <= self.spec.max_positions):
            if block_size:
                for count in requests:
                    yield self._attention("decode", [1] * count, [length - 1] * count, block_size)
                yield self._attention("prefill", [length], [0], block_size)
            else:
                for count in requests:
                    yield self._attention("texts", [length] * count, [0] * count, 0)

    def _attention(self, kind: str, queries: list[int], contexts: list[int], block_size: int) -> Row:
        spec, ops, upload = self.spec, self.backend.ops, self.backend.memory.upload
        rows = sum(queries)
        positions = torch.cat([torch.arange(c, c + q) for c, q in zip(contexts, queries, strict=True)])
        batch = Batch(
            upload(torch.zeros(rows, dtype=torch.int64)), upload(positions), queries, contexts, None, block_size > 0
        )
        cache = None
        if block_size:
            each = -(-(queries[0] + contexts[0]) // block_size)
            tables = torch.arange(1, 1 + each * len(queries), dtype=torch.int32).view(len(queries), each)
            kv = replace(spec.kv(block_size, self.dtype_name), layers=1)
            batch.kv = self.backend.memory.allocate_kv(kv, 1 + each * len(queries))
            owner = torch.repeat_interleave(torch.arange(len(queries)), torch.tensor(queries))
            slots = tables[owner, positions // block_size].long() * block_size + positions % block_size
            batch.slots, batch.block_tables, batch.block_size = upload(slots), upload(tables), block_size
            cache = batch.kv[0]
        q = self._random(rows, spec.heads, spec.head_dim)
        k, v = (self._random(rows, spec.kv_heads, spec.head_dim) for _ in range(2))
        scale = spec.attention_scale or spec.head_dim**-0.5
        batch.plan = ops.plan(batch)
        pairs = sum(n * c + (n * (n + 1) // 2 if block_size else n * n) for n, c in zip(queries, contexts, strict=True))
        moved = (2 * sum(batch.seq_lens) * spec.kv_heads + 2 * rows * spec.heads) * spec.head_dim * self.bytes
        calls: list[Call] = [lambda: ops.attention(q, k, v, cache, batch, scale, None, spec.softcap)]
        shape = {"kind": kind, "requests": len(queries), "length": queries[0] + contexts[0], "rows": rows}
        return self._row("attention", calls, moved, 4 * pairs * spec.heads * spec.head_dim, **shape)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def first_layer(self) -> str:
        return "layers.0." if self.spec.family == "decoder" else "encoder.layer.0."

    def _packed(self, piece: Any) -> Any:
        weight = self._random(*piece.shape)
        return self.backend.ops.pack(DenseWeight(weight) if piece.format is None else quantise(weight, piece.format))

    def _random(self, *shape: int) -> Tensor:
        return self.backend.memory.upload(torch.randn(*shape, generator=self.generator).to(self.dtype))

    def _bandwidth(self) -> float:
        there = torch.zeros(COPIED, dtype=torch.uint8, device=self.backend.device)
        here = torch.empty_like(there)
        return 2 * COPIED / self._time([lambda: here.copy_(there)])

    def _row(self, operation: str, calls: Sequence[Call], moved: int, flops: int, **shape: Any) -> Row:
        seconds = self._time(calls)
        share = moved / seconds / self.bandwidth
        return {"operation": operation, **shape, "seconds": seconds, "bytes": moved, "flops": flops,
                "bandwidth_share": round(share, 4)}  # fmt: skip

    def _time(self, calls: Sequence[Call]) -> float:
        """Seconds of one call, launched one behind the other: the median of turns, each waited for at its end."""
        self._wait(calls[0]())
        started = time.perf_counter()
        self._wait(calls[-1]())
        once = max(time.perf_counter() - started, 1e-7)
        number = max(1, min(MOST_CALLS, int(self.seconds / TURNS / once)))
        turns, place = [], 0
        for _ in range(TURNS):
            started = time.perf_counter()
            for _ in range(number):
                result = calls[place % len(calls)]()
                place += 1
            self._wait(result)
            turns.append((time.perf_counter() - started) / number)
        return statistics.median(turns)

    def _wait(self, result: Any) -> None:
        last = result[0] if isinstance(result, tuple) else result
        last.flatten()[:1].cpu()
