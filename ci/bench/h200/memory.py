"""Checks what the memory plan promises, on one machine and without trained weights; prints one JSON line a result.

memory.py plan DIR/qwen2.5-7b          # each term as planned and as torch counts it; fails above 3 % in all
memory.py soak DIR/qwen2.5-0.5b 600    # so many seconds of random requests at 0.9 of the card; fails on any error
memory.py crowded DIR/qwen2.5-0.5b     # while another process holds half of the card
memory.py overflow                     # activations beyond float16 fail their own request and no other
memory.py golden FILE.gguf             # SmolLM2's ids as transformers chose them, under the gap rule of 0.05

DIR holds folders of `measure.py folders` or `models.py`; weights are random numbers in either case.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measure import drain, random_engine, request, tell, workload

TOLERANCE = 0.03
GAP = 0.05
HOLDER = """
import sys, torch
held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def plan(folder: str) -> None:
    """With the settings that a server has by default: what is planned, and what torch saw at most."""
    import torch

    from anycore_cuda.memory import CudaMemory

    marks: dict[str, int] = {}
    allocate = CudaMemory.allocate_kv

    def watched(self: Any, kv: Any, blocks: int) -> list[Any]:
        torch.cuda.synchronize()
        marks["weights"] = torch.cuda.memory_allocated()
        made = allocate(self, kv, blocks)
        marks["kv_cache"] = torch.cuda.memory_allocated() - marks["weights"]
        torch.cuda.reset_peak_memory_stats()
        return made

    CudaMemory.allocate_kv = watched  # type: ignore[method-assign]
    engine = random_engine(folder)
    planned = engine.card["memory"]
    base = marks["weights"] + marks["kv_cache"]
    marks["warm_up"] = torch.cuda.max_memory_allocated() - base
    prompts, lengths = workload("batch")
    for name, more in (
        ("batch", {}),
        ("filtered", {"top_p": 0.9, "top_k": 50}),
        ("penalised", {"top_p": 0.9, "logprobs": 5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}),
    ):
        torch.cuda.reset_peak_memory_stats()
        drain(engine, [asked(i, p, min(n, 300), more) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))])
        marks[name] = torch.cuda.max_memory_allocated() - base
    working = planned["activations"] + planned["logits"] + planned["workspace"]
    total = planned["weights"] + planned["kv_cache"] + working
    free, card = torch.cuda.mem_get_info()
    outside = card - free - torch.cuda.memory_reserved()
    errors = {name: (base + marks[name]) / total - 1 for name in ("warm_up", "batch", "filtered", "penalised")}
    inside = planned["used"] - planned["runtime"]
    tell(
        memory=Path(folder).name, planned=planned, measured={**marks, **engine.card["memory_measured"]},
        planned_working=working, budget_left=planned["budget"] - total,
        reserved=torch.cuda.memory_reserved(), reserved_of_planned=round(torch.cuda.memory_reserved() / inside, 4),
        outside_torch=outside, planned_runtime=planned["runtime"],
        errors={name: round(error, 4) for name, error in errors.items()},
    )  # fmt: skip
    assert torch.cuda.memory_reserved() <= inside, "torch has reserved more than was planned: graphs or workspace"
    assert outside <= planned["runtime"] + planned["margin"], "more is taken outside torch than the plan's runtime"
    assert all(abs(error) <= TOLERANCE for error in errors.values()), f"the plan is off by {errors}"


def asked(number: int, prompt: list[int], length: int, more: dict[str, Any]) -> Any:
    """A request of measure.py with further sampling parameters."""
    import msgspec

    made = request(number, prompt, length)
    made.sampling = msgspec.structs.replace(made.sampling, **more)
    return made


def soak(folder: str, seconds: float) -> None:
    """Random requests, arriving as fast as the queue takes them, some of them given up midway."""
    import torch

    engine = random_engine(folder, memory_utilization=0.9)
    rng = random.Random(1)
    longest, most = engine.limits.max_model_len, 30_000
    live: list[str] = []
    number = finished = aborted = 0
    end = time.monotonic() + seconds
    while time.monotonic() < end or engine.has_work():
        while time.monotonic() < end and len(live) < 400:
            one = asked(number, *random_size(rng, min(longest, most)), random_sampling(rng))
            engine.add(one)
            live.append(one.id)
            number += 1
        if live and rng.random() < 0.02:
            engine.abort(live.pop(rng.randrange(len(live))))
            aborted += 1
        ended = set()
        for delta in engine.step():
            assert delta.error is None, f"request {delta.id}: {delta.error}"
            if delta.finish is not None and delta.index == 0:
                ended.add(delta.id)
        finished += len(ended)
        live = [name for name in live if name not in ended] if ended else live
    stats = engine.stats()
    assert stats.blocks_free == stats.blocks, f"{stats.blocks - stats.blocks_free} blocks are still held"
    tell(
        soak=Path(folder).name, seconds=seconds, finished=finished, aborted=aborted, preemptions=stats.preemptions,
        peak_gib=round(torch.cuda.max_memory_reserved() / 2**30, 2),
        free_gib=round(torch.cuda.mem_get_info()[0] / 2**30, 2),
    )  # fmt: skip


def random_size(rng: random.Random, longest: int) -> tuple[list[int], int]:
    """Mostly short prompts and answers, now and then one as long as fits."""
    length = rng.randint(1, 2000) if rng.random() < 0.97 else rng.randint(2000, longest - 600)
    return [rng.randrange(100, 150_000) for _ in range(length)], rng.randint(1, 500)


def random_sampling(rng: random.Random) -> dict[str, Any]:
    found: dict[str, Any] = {"temperature": rng.choice((0.0, 0.6, 1.0)), "n": rng.choice((1, 1, 1, 1, 3))}
    for name, value in (
        ("top_p", rng.uniform(0.1, 1)), ("top_k", rng.randint(1, 200)), ("min_p", rng.uniform(0, 0.2)),
        ("logprobs", rng.randint(0, 20)), ("presence_penalty", rng.uniform(-2, 2)),
        ("frequency_penalty", rng.uniform(-2, 2)), ("repetition_penalty", rng.uniform(0.5, 2)),
    ):  # fmt: skip
        if rng.random() < 0.15:
            found[name] = value
    return found


def crowded(folder: str) -> None:
    """A share that was asked for is refused with numbers; the default one takes a smaller pool, and works."""
    import torch

    from anycore.errors import DoesNotFit

    total = torch.cuda.mem_get_info()[1]
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(total // 2)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        try:
            random_engine(folder, memory_utilization=0.9)
            raise AssertionError("0.9 of a card that is half taken was not refused")
        except DoesNotFit as error:
            tell(crowded="refused", message=error.message)
        engine = random_engine(folder)
        prompts, lengths = workload("batch")
        drain(engine, [request(i, p, n) for i, (p, n) in enumerate(zip(prompts, lengths, strict=True))])
        budget = engine.card["memory"]["budget"]
        assert budget < total // 2
        tell(
            crowded="smaller pool",
            budget_gib=round(budget / 2**30, 2),
            free_gib=round(torch.cuda.mem_get_info()[0] / 2**30, 2),
        )
    finally:
        holder.kill()
        holder.wait()


def overflow() -> None:
    """One token makes an MLP's product overflow: its own request fails, its neighbours do not."""
    import tiny

    from anycore import plugins
    from anycore.config import ModelConfig
    from anycore.contract.declare import Task
    from anycore.engine.launch import build, prepare
    from anycore.engine.request import NewRequest, PoolingParams, SamplingParams

    prompts = [[20, 21, 22, 23], [20, 22, 23, 300], [30, 31, 32]]
    with tempfile.TemporaryDirectory() as tmp:
        for task, make in ((Task.GENERATE, tiny.tiny_lm), (Task.EMBED, tiny.tiny_embedder)):
            folder = make(Path(tmp) / task.value)
            poison(folder / "model.safetensors", token=300, factor=50.0)
            settings = {"backend": "cuda", "dtype": "float16", "task": task.value, "memory_utilization": 0.3}
            engine = build(prepare(ModelConfig(model=str(folder), **settings), plugins.load()))
            for i, tokens in enumerate(prompts):
                sampling = (
                    SamplingParams(temperature=0, ignore_eos=True, max_tokens=4) if task is Task.GENERATE else None
                )
                pooling = None if sampling else PoolingParams()
                engine.add(NewRequest(id=str(i), task=task, token_ids=tokens, sampling=sampling, pooling=pooling))
            codes: dict[str, str | None] = {}
            while engine.has_work():
                codes |= {delta.id: delta.error_code for delta in engine.step() if delta.finish is not None}
            tell(overflow=task.value, codes=codes)
            assert codes == {"0": None, "1": "non_finite_output", "2": None}, codes


def poison(file: Path, token: int, factor: float) -> None:
    """Give one token a dimension for itself, which the first MLP multiplies by `factor` and squares."""
    from safetensors.torch import load_file, save_file

    weights = load_file(file)
    prefix = next(name for name in weights if name.endswith("embed_tokens.weight")).removesuffix("embed_tokens.weight")
    table = weights[f"{prefix}embed_tokens.weight"]
    table[:, 7] = 0.0
    table[token] = 0.0
    table[token, 7] = 100.0
    weights[f"{prefix}layers.0.self_attn.o_proj.weight"][7] = 0.0
    for name in ("gate_proj", "up_proj"):
        weights[f"{prefix}layers.0.mlp.{name}.weight"][:, 7] = factor
    save_file(weights, file, {"format": "pt"})


def golden(path: str) -> None:
    """Ids in float32 are transformers'; in bfloat16 the first other one may be a near tie in float32, and no more."""
    from anycore import plugins
    from anycore.config import ModelConfig
    from anycore.contract.declare import Task
    from anycore.engine.launch import build, prepare
    from anycore.engine.request import NewRequest, SamplingParams

    file = Path(__file__).parents[3] / "tests" / "data" / "golden" / "smollm2-135m-float32.json"
    wanted = json.loads(file.read_text())["outputs"]

    def run(engine: Any, prompts: list[list[int]], **more: Any) -> list[list[Any]]:
        found: list[list[Any]] = [[] for _ in prompts]
        for i, tokens in enumerate(prompts):
            sampling = SamplingParams(temperature=0, **more)
            engine.add(NewRequest(id=str(i), task=Task.GENERATE, token_ids=tokens, sampling=sampling))
        while engine.has_work():
            for delta in engine.step():
                found[int(delta.id)] += delta.logprobs if more.get("logprobs") else delta.token_ids
        return found

    engines = {}
    for dtype in ("float32", "bfloat16"):
        settings = {"dtype": dtype, "backend": "cuda", "max_model_len": 1024, "memory_utilization": 0.3}
        engines[dtype] = build(prepare(ModelConfig(model=path, **settings), plugins.load()))
    for dtype, engine in engines.items():
        got = run(engine, [output["prompt_ids"] for output in wanted], max_tokens=48)
        gaps = []
        for ids, output in zip(got, wanted, strict=True):
            theirs = output["output_ids"]
            if ids == theirs:
                continue
            at = next(i for i, (a, b) in enumerate(zip([*ids, -1], [*theirs, -1], strict=False)) if a != b)
            scores = run(engines["float32"], [output["prompt_ids"] + theirs[:at]], max_tokens=1, logprobs=20)[0][0]
            seen = dict(scores.top)
            pair = [[*each, None][at] for each in (ids, theirs)]
            gaps.append(abs(seen[pair[0]] - seen[pair[1]]) if set(pair) <= seen.keys() else float("inf"))
        tell(golden=dtype, prompts=len(wanted), equal=len(wanted) - len(gaps), gaps=[round(gap, 4) for gap in gaps])
        assert max(gaps, default=0) <= GAP, f"{dtype}: a gap of {max(gaps)}"


def main() -> None:
    command, *arguments = sys.argv[1:]
    if command == "soak":
        soak(arguments[0], float(arguments[1]))
    else:
        {"plan": plan, "crowded": crowded, "overflow": overflow, "golden": golden}[command](*arguments)


if __name__ == "__main__":
    main()
