"""Checks and times the CUDA backend on one machine, without weights or a network; prints one JSON line a result.

PYTHONPATH=framework:backends:tests python ci/bench/h200/measure.py folders DIR     # config-only model folders
... measure.py generate DIR/qwen2.5-0.5b [single batch prefill prefix]               # workloads, random weights
... measure.py embed DIR/bge-base-like
... measure.py step DIR/qwen2.5-0.5b 1 256                                           # where a decode step's time goes
... measure.py early DIR/qwen2.5-0.5b                                                # early starts change no token
... measure.py agree                                                                 # tiny models against transformers
... measure.py kernels                                                               # kernels against the limits
... measure.py decode                                                                # decode attention, by shape
... measure.py varlen                                                                # packed attention, torch's too
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import psutil

STARTED = psutil.Process().create_time()
QWEN25 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768, "rope_theta": 1000000.0, "tie_word_embeddings": False, "eos_token_id": 151645,
    "torch_dtype": "bfloat16", "use_sliding_window": False, "bos_token_id": 151643,
}  # fmt: skip
FOLDERS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN25 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "num_hidden_layers": 24, "vocab_size": 151936,
    },
    "qwen2.5-7b": QWEN25 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "num_hidden_layers": 28, "vocab_size": 152064,
    },
    "qwen2.5-32b": QWEN25 | {
        "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_key_value_heads": 8,
        "num_hidden_layers": 64, "vocab_size": 152064,
    },
    "bge-base-like": {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 768, "intermediate_size": 3072,
        "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 30522, "max_position_embeddings": 512,
        "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12, "torch_dtype": "float16",
    },
    "qwen3-embedding-0.6b-like": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 28,
        "vocab_size": 151669, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "tie_word_embeddings": True, "hidden_act": "silu", "torch_dtype": "bfloat16", "use_sliding_window": False,
        "eos_token_id": 151643, "bos_token_id": 151643,
    },
}  # fmt: skip


def workload(kind: str, vocab: int = 150000) -> tuple[list[list[int]], list[int]]:
    """Prompts and output lengths, the same for every engine."""
    rng = random.Random(0)

    def ids(count: int) -> list[int]:
        return [rng.randrange(100, vocab) for _ in range(count)]

    if kind == "single":
        return [ids(128)], [256]
    if kind == "batch":
        prompts = [ids(rng.randint(100, 1024)) for _ in range(256)]
        return prompts, [rng.randint(100, 1024) for _ in range(256)]
    if kind == "prefix":
        common = ids(2048)
        return [common + ids(64) for _ in range(256)], [64] * 256
    if kind == "prefill":
        return [ids(2048) for _ in range(64)], [1] * 64
    return [ids(rng.randint(16, 512)) for _ in range(4096)], []


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class RandomCheckpoint:
    """Weights nobody trained, as a loader's checkpoint: small numbers in matrices, ones in norms, zeros in biases."""

    def __init__(self, spec: Any) -> None:
        import torch

        from anycore.models.parameters import parameters

        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: (rows, *p.shape[1:]) for p in parameters(spec) if not p.optional for name, rows in p.parts
        }
        self.formats: Mapping[str, Any] = {}
        self.numbers = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, shape in self.shapes.items():
            if len(shape) == 1:
                yield name, torch.full(shape, float(name.endswith("weight")))
                continue
            size = prod(shape)
            repeated = self.numbers.repeat(-(-size // len(self.numbers))) if size > len(self.numbers) else self.numbers
            yield name, repeated[:size].view(shape)

    def file_of(self, name: str) -> str:
        return "random numbers"


def random_engine(folder: str, early: bool = os.environ.get("EARLY") != "0", **settings: Any) -> Any:
    """An engine as `anycore serve` makes it, but for the weights, and with kernels that start early only if wanted."""
    from anycore import plugins
    from anycore.config import ModelConfig
    from anycore.engine.launch import build, prepare
    from anycore.models import loader

    config = ModelConfig(model=folder, **{"backend": "cuda"} | settings)
    prepared = prepare(config, plugins.load())
    if config.backend == "cuda":
        from anycore_cuda.backend import CudaBackend

        spec = replace(prepared.choice.spec, open=partial(CudaBackend, early=early))
        prepared = replace(prepared, choice=replace(prepared.choice, spec=spec))
    loader.open_checkpoint = lambda source: RandomCheckpoint(prepared.spec)  # type: ignore[assignment]
    marks: dict[str, float] = {}
    engine = build(prepared, lambda phase, fraction: marks.setdefault(phase, round(time.time() - STARTED, 2)) and None)
    tell(model=Path(folder).name, phases=marks, limits=str(engine.limits))
    return engine


def request(number: int, tokens: list[int], length: int | None) -> Any:
    from anycore.contract.declare import Task
    from anycore.engine.request import NewRequest, PoolingParams, SamplingParams

    if length is None:
        return NewRequest(id=str(number), task=Task.EMBED, token_ids=tokens, pooling=PoolingParams())
    sampling = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length)
    return NewRequest(id=str(number), task=Task.GENERATE, token_ids=tokens, sampling=sampling)


def drain(engine: Any, requests: list[Any]) -> float:
    start = time.perf_counter()
    for one in requests:
        engine.add(one)
    while engine.has_work():
        for delta in engine.step():
            assert delta.error is None, delta.error
    return time.perf_counter() - start


class Waiting:
    """Counts the seconds an engine spends waiting for its device; the rest of a step is host time."""

    def __init__(self, engine: Any) -> None:
        self.seconds = 0.0
        memory = engine.runner.backend.memory
        begin = memory.download

        def download(tensors: Any) -> Callable[[], Any]:
            arrive = begin(tensors)

            def wait() -> Any:
                start = time.perf_counter()
                found = arrive()
                self.seconds += time.perf_counter() - start
                return found

            return wait

        memory.download = download


def generate(folder: str, kinds: list[str], repeats: int = 3) -> None:
    engine = random_engine(folder, max_model_len=4096, max_num_seqs=256, memory_utilization=0.85, seed=1)
    prompts, _ = workload("single")
    drain(engine, [request(0, prompts[0], 1)])
    tell(model=Path(folder).name, start_s=round(time.time() - STARTED, 2))
    waiting = Waiting(engine)
    for kind in kinds or ["single", "batch", "prefill", "prefix"]:
        prompts, lengths = workload(kind)
        seconds, host = [], []
        for _ in range(repeats):
            engine.reset_prefix_cache()
            waiting.seconds, steps = 0.0, engine.stats().steps
            took = drain(engine, [request(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))])
            seconds.append(took)
            host.append(1e3 * (took - waiting.seconds) / (engine.stats().steps - steps))
        middle = statistics.median(seconds)
        tell(
            model=Path(folder).name, workload=kind, seconds=[round(s, 3) for s in seconds],
            out_tok_s=round(sum(lengths) / middle), in_tok_s=round(sum(map(len, prompts)) / middle),
            host_ms_per_step=round(statistics.median(host), 3), preemptions=engine.stats().preemptions,
        )  # fmt: skip
    import torch

    tell(model=Path(folder).name, peak_gib=round(torch.cuda.max_memory_allocated() / 2**30, 2))


def embed(folder: str) -> None:
    engine = random_engine(folder, task="embed", max_model_len=512, max_queued=8192, memory_utilization=0.6)
    vocab = engine.spec.vocab_size
    prompts, _ = workload("embed", min(vocab, 150000))
    waiting = Waiting(engine)
    seconds, host = [], []
    for _ in range(4):
        waiting.seconds, steps = 0.0, engine.stats().steps
        engine.reset_prefix_cache()
        took = drain(engine, [request(i, p, None) for i, p in enumerate(prompts)])
        seconds.append(took)
        host.append(1e3 * (took - waiting.seconds) / (engine.stats().steps - steps))
    middle = statistics.median(seconds[1:])
    tell(
        model=Path(folder).name, workload="embed", seconds=[round(s, 3) for s in seconds],
        texts_s=round(len(prompts) / middle), tok_s=round(sum(map(len, prompts)) / middle),
        host_ms_per_step=round(statistics.median(host), 3),
    )  # fmt: skip


def step(folder: str, counts: list[int]) -> None:
    """Kernels of decode steps at a context of 1,024, slowest first."""
    from torch.profiler import ProfilerActivity, profile

    engine = random_engine(folder, max_model_len=4096, max_num_seqs=256, memory_utilization=0.85, seed=1)
    rng = random.Random(0)
    for count in counts:
        for i in range(count):
            engine.add(request(i, [rng.randrange(100, 150000) for _ in range(1000)], 200))
        while any(r.num_computed < 1010 for r in engine.scheduler.running) or engine.scheduler.waiting:
            engine.step()
        start = time.perf_counter()
        for _ in range(50):
            engine.step()
        took = time.perf_counter() - start
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(10):
                engine.step()
        rows = sorted(profiler.key_averages(), key=lambda row: -row.self_device_time_total)
        total = sum(row.self_device_time_total for row in rows)
        tell(
            model=Path(folder).name, rows=count, ms_per_step=round(1e3 * took / 50, 3), device_ms=round(total / 1e4, 3)
        )
        for row in rows[:14]:
            each = row.self_device_time_total / row.count
            print(
                f"    {row.self_device_time_total / 1e4:8.4f} ms {row.count / 10:6.1f} x {each:8.2f} us {row.key[:90]}"
            )
        for i in range(count):
            engine.abort(str(i))
        while engine.has_work():
            engine.step()


def early(folder: str) -> None:
    """Kernels that start early must give the tokens of those that do not: requests one by one, and all at once."""
    from anycore.contract.declare import Task
    from anycore.engine.request import NewRequest, SamplingParams

    prompts, _ = workload("embed")
    found: list[list[list[int]]] = []
    for starts_early in (False, True, True):
        engine = random_engine(folder, starts_early, max_model_len=2048, max_num_seqs=16, memory_utilization=0.25)
        tokens: list[list[int]] = [[] for _ in range(24)]
        for i in range(24):
            sampling = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=300, seed=i)
            engine.add(NewRequest(id=str(i), task=Task.GENERATE, token_ids=prompts[i % 16], sampling=sampling))
            while i < 8 and engine.has_work():
                for delta in engine.step():
                    tokens[int(delta.id)] += delta.token_ids
        while engine.has_work():
            for delta in engine.step():
                tokens[int(delta.id)] += delta.token_ids
        found.append(tokens)
        del engine
    late, first, again = found
    equal = [a == b for a, b in zip(late, first, strict=True)]
    tell(early=Path(folder).name, alone=f"{sum(equal[:8])}/8", all_at_once=f"{sum(equal[8:])}/16", again=first == again)


def host(folder: str, kinds: list[str]) -> None:
    """Where the host's time goes, by function."""
    import cProfile
    import pstats

    engine = random_engine(folder, max_model_len=4096, max_num_seqs=256, memory_utilization=0.85, seed=1)
    for kind in kinds:
        prompts, lengths = workload(kind)
        for turn in range(2):
            engine.reset_prefix_cache()
            profiler = cProfile.Profile()
            if turn:
                profiler.enable()
            drain(engine, [request(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))])
            profiler.disable()
        print(kind, flush=True)
        pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(24)


def agree() -> None:
    """Greedy ids in float32, and vectors, of tiny models against transformers on the same device."""
    import tiny
    import torch
    from transformers import AutoModel, AutoModelForCausalLM

    from anycore import plugins
    from anycore.config import ModelConfig
    from anycore.contract.declare import Task
    from anycore.engine.launch import build, prepare
    from anycore.engine.request import NewRequest, PoolingParams, SamplingParams

    loaded = plugins.load()
    rng = random.Random(0)
    prompts = [[rng.randrange(5, 170) for _ in range(n)] for n in (1, 7, 33, 130, 200)]
    with tempfile.TemporaryDirectory() as tmp:
        for family in tiny.DECODERS:
            window = 24 if family != "llama" else None
            folder = tiny.tiny_lm(Path(tmp) / family, family=family, window=window)
            engine = build(prepare(ModelConfig(model=str(folder), backend="cuda", dtype="float32"), loaded))
            wanted, got = [], [[] for _ in prompts]
            theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            theirs = theirs.cuda().eval()
            for i, tokens in enumerate(prompts):
                sampling = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
                engine.add(NewRequest(id=str(i), task=Task.GENERATE, token_ids=tokens, sampling=sampling))
                ids = torch.tensor([tokens]).cuda()
                with torch.inference_mode():
                    for _ in range(40):
                        ids = torch.cat((ids, theirs(ids).logits[:, -1:].argmax(-1)), dim=1)
                wanted.append(ids[0, len(tokens) :].tolist())
            while engine.has_work():
                for delta in engine.step():
                    got[int(delta.id)] += delta.token_ids
            tell(agree=family, prompts=len(prompts), equal=sum(a == b for a, b in zip(got, wanted, strict=True)))
        for name, make in (("bert", tiny.tiny_bert), ("xlmr", tiny.tiny_xlmr), ("qwen3-embed", tiny.tiny_embedder)):
            folder = make(Path(tmp) / name)
            for dtype in ("float32", "float16", "bfloat16"):
                engine = build(
                    prepare(ModelConfig(model=str(folder), backend="cuda", dtype=dtype, task="embed"), loaded)
                )
                kind = engine.spec.pooling.kind
                theirs = AutoModel.from_pretrained(folder, dtype=torch.float32).cuda().eval()
                worst = 1.0
                texts = [tokens[:60] for tokens in prompts]
                for i, tokens in enumerate(texts):
                    engine.add(NewRequest(id=str(i), task=Task.EMBED, token_ids=tokens, pooling=PoolingParams()))
                vectors = {}
                while engine.has_work():
                    vectors |= {int(delta.id): delta.vector for delta in engine.step()}
                for i, tokens in enumerate(texts):
                    with torch.inference_mode():
                        hidden = theirs(torch.tensor([tokens]).cuda()).last_hidden_state[0]
                    exact = {"cls": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[kind].cpu()
                    ours = torch.frombuffer(bytearray(vectors[i]), dtype=torch.float32)
                    worst = min(worst, float(torch.cosine_similarity(ours, exact, dim=0)))
                tell(agree=name, dtype=dtype, worst_cosine=round(worst, 7))


def kernels() -> None:
    """Each kernel's time and its share of the memory or matrix limit (4.42 TB/s read, 797 TFLOP/s)."""
    import torch
    from triton.testing import do_bench

    from anycore.contract.batch import Penalties
    from anycore.contract.sampling import report
    from anycore_cuda.kernels import attention, decode, edits, gated, norm, rotary, sampling

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}

    def show(name: str, work: Callable[[], Any], moved: float = 0.0, flops: float = 0.0) -> None:
        ms = do_bench(work, return_mode="median")
        limit = max(moved / 4.42e12, flops / 797e12) * 1e3
        tell(kernel=name, us=round(ms * 1e3, 1), share=round(limit / ms, 3))

    for rows, width in ((256, 896), (8192, 896), (8192, 3584)):
        x, w = torch.randn(rows, width, **bf16), torch.ones(width, device="cuda")
        y = torch.randn_like(x)
        show(f"rms_norm {rows}x{width}", lambda x=x, y=y, w=w: norm.rms_norm(x, w, 1e-6, y), 8 * x.numel())
    x = torch.randn(8192, 2 * 4864, **bf16)
    show("gated 8192x4864", lambda: gated.gated(x, "silu"), 3 * x.numel())
    for heads, kv_heads, dim in ((14, 2, 64), (28, 4, 128)):
        for rows in (256, 8192):
            qkv = torch.randn(rows, heads + 2 * kv_heads, dim, **bf16)
            cache = torch.zeros(2, 1024, kv_heads, 16, dim, **bf16)
            angles = torch.rand(2, rows, dim // 2, device="cuda").unbind(0)
            slots = torch.arange(rows, device="cuda")
            moved = qkv.nbytes * 2
            show(
                f"rotary+store {rows}x{heads}/{kv_heads}x{dim}",
                lambda q=qkv, h=heads, k=kv_heads, a=angles, c=cache, s=slots: rotary.prepare_heads(
                    q, h, k, a, None, c, s
                ),
                moved,
            )
        for count, length in ((1, 1024), (1, 8192), (16, 1024), (64, 1024), (256, 1024)):
            blocks = -(-length // 16)
            cache = torch.randn(2, 1 + count * blocks, kv_heads, 16, dim, **bf16)
            tables = (torch.randperm(count * blocks, device="cuda") + 1).int().view(count, blocks)
            lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
            q = torch.randn(count, heads, dim, **bf16)
            out = torch.empty_like(q)
            zeros = torch.zeros(4096, dtype=torch.int32, device="cuda")
            for splits in (1, 4, 16) if count <= 16 else (1, 2, 4):
                show(
                    f"decode {heads}/{kv_heads}x{dim} B={count} L={length} splits={splits}",
                    lambda a=(q, cache, out, tables, lens, zeros, splits, dim**-0.5): decode.decode(*a, None, None),
                    2.0 * count * length * kv_heads * dim * 2,
                )
        for count, length in ((4, 2048), (32, 256)):
            qkv = torch.randn(count * length, heads + 2 * kv_heads, dim, **bf16)
            q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
            out = torch.empty(q.shape, **bf16)
            rows = attention.tile_rows(heads // kv_heads, dim, 2, False)
            tokens = rows // (heads // kv_heads)
            tiles = [(i, first) for first in reversed(range(0, length, tokens)) for i in range(count)]
            tile = torch.tensor(tiles, dtype=torch.int32, device="cuda")
            starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
            lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
            blocks = length // 16
            cache = torch.randn(2, 1 + count * blocks, kv_heads, 16, dim, **bf16)
            tables = (torch.randperm(count * blocks, device="cuda") + 1).int().view(count, blocks)
            for causal in (True, False):
                flops = 4.0 * count * length * length * heads * dim / (2 if causal else 1)
                given = (tile, rows, starts, lens)
                for name, (a, b, t) in {"packed": (k, v, None), "paged": (cache[0], cache[1], tables)}.items():
                    show(
                        f"attend {heads}/{kv_heads}x{dim} {count}x{length} {'causal' if causal else 'full'} {name}",
                        lambda a=a, b=b, t=t, q=q, out=out, given=given, c=causal: attention.attend(
                            q, a, b, out, *given, t, c, 0.1, None, None
                        ),
                        flops=flops,
                    )
    for rows in (1, 256):
        logits = torch.randn(rows, 151936, device="cuda") * 3
        warm, draws = torch.full((rows,), 0.6, device="cuda"), torch.rand(rows, device="cuda", dtype=torch.float64)
        k, p = torch.full((rows,), 20, device="cuda"), torch.full((rows,), 0.8, device="cuda")
        show(f"choose {rows}", lambda a=(logits, warm, draws): sampling.choose(*a), logits.nbytes)
        flat, many, least = logits / 30, torch.full_like(k, 2000), torch.full_like(p, 0.05)
        for name, given in {
            "top-k top-p": (logits, warm, draws, k, p, None),
            "top-p": (logits, warm, draws, None, p, None),
            "min-p": (logits, warm, draws, None, None, least),
            "top-k 2000": (logits, warm, draws, many, None, None),
            "top-p of nearly equal logits": (flat, warm, draws, None, p, None),
        }.items():
            show(f"{name} {rows}", lambda a=given: sampling.choose(*a), logits.nbytes)
        seat, counts = torch.arange(rows, device="cuda"), torch.zeros(rows, 151936, dtype=torch.int32, device="cuda")
        penalties = Penalties(seat, counts, seat, warm, warm, warm)
        show(f"penalties {rows}", lambda a=(logits, penalties): edits.penalise(*a), 3 * logits.nbytes)
        show(
            f"log-probabilities {rows}",
            lambda x=logits, ids=seat: report(x, ids, 5, sampling.normaliser(x)), logits.nbytes,
        )  # fmt: skip


def tune() -> None:
    """Times of attention kernels by (keys a step, warps, stages), best first."""
    import torch

    from anycore_cuda.kernels import attention

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    # PART=i/n takes every n-th shape from the i-th on: several processes fill the disk cache before one measures.
    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))

    def best(name: str, shapes: list[tuple[int, int, int]], work: Callable[[tuple[int, int, int]], None]) -> None:
        found = []
        for shape in shapes[part::parts]:
            try:
                found.append((round(replayed(lambda shape=shape: work(shape), 4), 1), shape))
            except Exception as error:
                print(name, shape, type(error).__name__)
        print(name, sorted(found)[:4], flush=True)

    for heads, kv_heads, dim in ((14, 2, 64), (28, 4, 128), (12, 12, 64)):
        for count, length in ((4, 2048), (64, 128)):
            qkv = torch.randn(count * length, heads + 2 * kv_heads, dim, **bf16)
            q, k, v = qkv.split_with_sizes((heads, kv_heads, kv_heads), dim=1)
            out = torch.empty(q.shape, **bf16)
            starts = torch.arange(count + 1, dtype=torch.int32, device="cuda") * length
            lens = torch.full((count,), length, dtype=torch.int32, device="cuda")
            cache = torch.randn(2, 1 + count * length // 16, kv_heads, 16, dim, **bf16)
            tables = (torch.randperm(count * length // 16, device="cuda") + 1).int().view(count, -1)
            for rows in (64, 128):
                tokens = rows // (heads // kv_heads)
                tiles = [(i, first) for first in reversed(range(0, length, tokens)) for i in range(count)]
                tile = torch.tensor(tiles, dtype=torch.int32, device="cuda")
                for name, (a, b, t) in {"packed": (k, v, None), "paged": (cache[0], cache[1], tables)}.items():
                    if name == "paged" and kv_heads == heads:
                        continue
                    given = (q, a, b, out, tile, rows, starts, lens, t, kv_heads != heads, dim**-0.5, None, None)
                    shapes = [(64, 4, 3), (64, 8, 3), (128, 8, 2), (128, 4, 3)]
                    title = f"{name} {heads}/{kv_heads}x{dim} {count}x{length} rows {rows}"
                    best(title, shapes, lambda s, g=given: attention.attend(*g, s))


def products() -> None:
    """What a layer of one row multiplies, norms and gates within, by (rows, columns a turn, warps): best first.

    For comparison: the best shape without early starts, the shape in use, and the same in separate kernels.
    """
    import torch

    from anycore_cuda.kernels import gated, matvec, norm

    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    part, parts = map(int, os.environ.get("PART", "0/1").split("/"))
    wide = (512, 1024, 2048, 4096, 8192)
    every = [(r, c, w) for r in (1, 2, 4, 8) for c in wide for w in (1, 2, 4, 8) if 16 <= r * c // (32 * w) <= 64]
    for hidden, qkv, inner, vocab in ((896, 1152, 4864, 151936), (3584, 4608, 18944, 152064)):
        for rows, columns, normed, gate in (
            (qkv, hidden, True, None), (hidden, hidden, False, None), (2 * inner, hidden, True, "silu"),
            (hidden, inner, False, None), (vocab, hidden, False, None),
        ):  # fmt: skip
            weights = [torch.randn(rows, columns, **bf16) for _ in range(max(2, 200_000_000 // (rows * columns * 2)))]
            x, added, ones = *torch.randn(2, 1, columns, **bf16), torch.ones(columns, device="cuda")

            def fused(weight: Any, shape: Any, early: bool, x: Any = x, args: Any = (added, ones, normed, gate)) -> Any:
                added, ones, normed, gate = args
                if normed:
                    return matvec.norm_matvec(x, added, ones, 1e-6, weight, None, gate, shape, early)
                return matvec.matvec(x, weight, None, None, shape, early)

            def separate(weight: Any, early: bool, x: Any = x, args: Any = (added, ones, normed, gate)) -> Any:
                added, ones, normed, gate = args
                x = norm.rms_norm(x, ones, 1e-6, added, early)[0] if normed else x
                x = matvec.matvec(x, weight, early=early)
                return x if gate is None else gated.gated(x, gate, early)

            def each(work: Callable[..., Any], *more: Any, weights: Any = weights) -> float:
                return replayed(lambda: [work(weight, *more) for weight in weights], 1) / len(weights)

            shapes = [(r, c, w) for r, c, w in every if c < 2 * columns and (gate is None or r > 1)]
            found = sorted((each(fused, shape, True), shape) for shape in shapes[part::parts])
            others = {
                "best, not early": each(fused, found[0][1], False),
                "in use": each(fused, None, True), "in use, not early": each(fused, None, False),
                "separate": each(separate, True), "separate, not early": each(separate, False),
            }  # fmt: skip
            title = f"{rows}x{columns}{' normed' if normed else ''}{' gated' if gate else ''}"
            for us, name in (*found[:5], *((us, name) for name, us in others.items())):
                print(f"{title}: {us:6.2f} us {rows * columns * 2 / 1e6 / us:.2f} TB/s {name}", flush=True)


def replayed(work: Callable[[], Any], times: int) -> float:
    """Microseconds of one call, launches left out."""
    import torch
    from triton.testing import do_bench

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    return float(do_bench(graph.replay, warmup=5, rep=20, return_mode="median") * 1e3 / times)


def folders(root: str) -> None:
    for name, config in FOLDERS.items():
        (Path(root) / name).mkdir(parents=True, exist_ok=True)
        (Path(root) / name / "config.json").write_text(json.dumps(config))


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "folders":
        folders(arguments[0])
    elif command == "generate":
        generate(arguments[0], arguments[1:], int(os.environ.get("REPEATS", "3")))
    elif command == "embed":
        embed(arguments[0])
    elif command == "step":
        step(arguments[0], [int(word) for word in arguments[1:]])
    elif command == "early":
        early(arguments[0])
    elif command == "host":
        host(arguments[0], arguments[1:])
    elif command == "tune":
        tune()
    elif command == "products":
        products()
    elif command == "agree":
        agree()
    elif command == "decode":
        import decoding

        decoding.main(tuple(map(int, arguments)) or decoding.ROWS)
    elif command == "varlen":
        import varlen

        varlen.compare()
    else:
        kernels()


if __name__ == "__main__":
    main()
