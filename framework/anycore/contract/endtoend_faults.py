"""What the kit checks of an engine on a backend under stress: faults, too little memory, repetition, many requests.

With `endtoend.py` the only place under `contract/` that looks up to the engine.
"""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import psutil
import torch

from anycore.contract import endtoend
from anycore.contract.backend import Backend
from anycore.contract.batch import Batch, Sampling
from anycore.contract.declare import Task
from anycore.contract.endtoend import NEW_TOKENS, VOCAB, generated, open_engine, prompts
from anycore.engine.engine import Engine
from anycore.engine.request import Delta, FinishReason, NewRequest, SamplingParams

LENGTH = 64
"""Longest sequence of these engines."""

SICK = VOCAB - 1
"""The token whose embedding is NaN in `save_sick_decoder`: whoever meets it must end, and nobody else."""

DECODED = 6
"""Tokens of a request during each of whose steps the device is lost once."""

REQUESTS = 1000
LEAK = 32 * 2**20
"""Bytes that the process may grow by over so many requests: the allocator's own habits, not a request's remains."""


def save_sick_decoder(folder: Path, head_dim: int) -> None:
    """Write the random Llama of `endtoend`, with a token that makes NaN and is sampled only when it is forced."""
    endtoend.save_decoder(folder, head_dim)
    from transformers import LlamaForCausalLM

    model: Any = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight[SICK] = float("nan")
        model.lm_head.weight[SICK] = 0.0
    model.save_pretrained(folder)


def healthy() -> list[list[int]]:
    return [[3 if token == SICK else token for token in tokens] for tokens in prompts()]


def new(name: str, tokens: list[int], sampling: SamplingParams | None = None, **fields: Any) -> NewRequest:
    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    return NewRequest(id=name, task=Task.GENERATE, token_ids=tokens, sampling=sampling or greedy, **fields)


def finish(engine: Engine) -> dict[str, list[Delta]]:
    """Step until nothing is left; the deltas of each request."""
    found: dict[str, list[Delta]] = {}
    while engine.has_work():
        for delta in engine.step():
            found.setdefault(delta.id, []).append(delta)
    return found


def ids(deltas: list[Delta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def check_conserved(engine: Engine) -> None:
    """Each block is free or owned, as often as requests hold it; no limit is passed."""
    pool, scheduler = engine.pool, engine.scheduler
    assert pool is not None
    pool.check()
    held = [block for request in scheduler.running for block in request.blocks]
    assert all(pool.references[block] == held.count(block) for block in held), "a block's owners are miscounted"
    assert len(scheduler.running) <= engine.limits.max_num_seqs
    assert all(not request.blocks for request in scheduler.waiting), "a waiting request holds blocks"


def check_empty(engine: Engine) -> None:
    assert engine.pool is not None
    assert engine.pool.free == engine.pool.size, f"{engine.pool.size - engine.pool.free} blocks are still held"
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting


def check_disturbed(backend: str, dtype: str, folder: Path) -> None:
    """Random arrivals, ends at any moment, and blocks for two requests only: nothing is lost, survivors answer right.

    With float32 their ids are those of each request alone.
    """
    roomy = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=LENGTH)
    right = [generated(roomy, [tokens])[0] for tokens in prompts()]
    memory, size = roomy.card["memory"], roomy.limits.block_size
    tight = 2 * -(-LENGTH // size) * memory["kv_cache"] // memory["kv_blocks"]
    engine = open_engine(
        backend, folder, Task.GENERATE, dtype,
        max_model_len=LENGTH, max_num_seqs=4, max_num_batched_tokens=32, kv_cache_memory=tight,
    )  # fmt: skip
    chosen = random.Random(5)
    fates = [chosen.choice(("lives", "lives", "aborted", "late")) for _ in range(8 * len(right))]
    found: dict[str, list[Delta]] = {str(number): [] for number in range(len(fates))}
    coming = list(range(len(fates)))
    while coming or engine.has_work():
        while coming and chosen.random() < 0.5:
            number = coming.pop(0)
            deadline = 0.0 if fates[number] == "late" else None
            engine.add(new(str(number), prompts()[number % len(right)], deadline=deadline))
        for number, fate in enumerate(fates):
            if fate == "aborted" and number not in coming and chosen.random() < 0.2:
                engine.abort(str(number))
        for delta in engine.step():
            found[delta.id].append(delta)
        check_conserved(engine)
    check_empty(engine)
    for number, fate in enumerate(fates):
        deltas = found[str(number)]
        if fate == "late":
            assert deltas[-1].error_code == "deadline_exceeded", f"request {number} had no time, and got {deltas[-1]}"
        if fate != "lives":
            continue
        assert deltas[-1].finish is FinishReason.LENGTH, f"request {number} ended with {deltas[-1]}"
        got, wanted = ids(deltas), right[number % len(right)]
        assert dtype != "float32" or got == wanted, f"request {number}: ids {got} among faults, {wanted} alone"


def check_sick(backend: str, dtype: str, folder: Path) -> None:
    """NaN from a first chunk, a later one, and a decode step ends its own request; neighbours and heirs are well."""
    engine = open_engine(
        backend, folder, Task.GENERATE, dtype, max_model_len=LENGTH, max_num_batched_tokens=32, max_num_seqs=8
    )
    inputs = healthy()
    right = [generated(engine, [tokens])[0] for tokens in inputs]
    engine.reset_prefix_cache()
    forced = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True, logit_bias={SICK: 100.0})
    for number, tokens in enumerate(inputs):
        engine.add(new(str(number), tokens))
    engine.add(new("first chunk", [5, SICK, *range(6, 20)]))
    engine.add(new("later chunk", [*range(10, 55), SICK, 4]))
    engine.add(new("decode", [7, 8, 9], forced))
    found = finish(engine)
    for name in ("first chunk", "later chunk", "decode"):
        code = found[name][-1].error_code
        assert code == "non_finite_output", f"NaN in a {name} ended with {found[name][-1]}"
    assert ids(found["decode"]) == [SICK], f"before its NaN a request had {ids(found['decode'])}"
    check_empty(engine)
    after = generated(engine, inputs)  # in blocks that held NaN
    for number, wanted in enumerate(right):
        together = ids(found[str(number)])
        assert len(together) == len(after[number]) == NEW_TOKENS
        if dtype == "float32":
            assert together == wanted, f"beside NaN: {together}, alone {wanted}"
            assert after[number] == wanted, f"after NaN: {after[number]}, before {wanted}"


class DeviceLost(Exception):
    """What the device says when it is lost."""


def check_lost(backend: str, dtype: str, folder: Path) -> None:
    """A device that fails is heard, in whichever step it is; what it had answered before was right."""
    right = None
    for fatal in range(DECODED + 2, 0, -1):  # first one in which nothing fails
        engine = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=LENGTH)
        step, count = engine.runner._step, 0

        def failing(batch: Batch, sampling: Sampling | None, step: Any = step, fatal: int = fatal) -> Any:
            nonlocal count
            count += 1
            if count == fatal:
                raise DeviceLost(f"in step {fatal}")
            return step(batch, sampling)

        engine.runner._step = failing
        engine.add(new("one", [3, 4, 5], SamplingParams(max_tokens=DECODED, temperature=0, ignore_eos=True)))
        got: list[int] = []
        heard = None
        try:
            while engine.has_work():
                got += [token for delta in engine.step() for token in delta.token_ids]
        except DeviceLost as error:
            heard = str(error)
        right = right or got
        assert count >= min(fatal, DECODED), f"{count} steps were run"
        assert heard == (f"in step {fatal}" if count >= fatal else None), f"the loss in step {fatal} was not heard of"
        assert got == right[: len(got)], f"before the loss in step {fatal} it answered {got}, not {right}"
        assert (len(got) < DECODED) == (heard is not None), f"lost in step {fatal}, and {len(got)} tokens came"


def check_repeats(backend: str, dtype: str, folder: Path) -> None:
    """The same requests in the same order give the same tokens, drawn ones too, in a second engine as well."""
    runs = []
    for _ in range(2):
        engine = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=LENGTH)
        for _ in range(2):
            engine.reset_prefix_cache()
            for number, tokens in enumerate(prompts()):
                drawn = SamplingParams(max_tokens=NEW_TOKENS, temperature=1.0, top_p=0.9, seed=number, ignore_eos=True)
                engine.add(new(str(number), tokens, drawn if number % 2 else None))
            runs.append({name: ids(deltas) for name, deltas in finish(engine).items()})
    assert all(run == runs[0] for run in runs), f"four equal runs gave {runs}"


def check_planned(device: Backend, dtype: str, folder: Path) -> None:
    """From the open device to a full engine, no more is allocated than the plan said, and no more is kept."""
    before = device.memory.held()
    with device.memory.peak() as peak:
        engine = open_engine(
            device.name, folder, Task.GENERATE, dtype, max_model_len=LENGTH, kv_cache_memory=96 * 2**20
        )
        for number in range(2 * engine.limits.max_num_seqs):
            engine.add(new(str(number), prompts()[number % len(prompts())]))
        finish(engine)
    plan = engine.card["memory"]
    assert peak.bytes <= plan["used"], f"{peak.bytes} bytes were allocated at the peak; the plan was {plan}"
    gc.unfreeze()  # what a ready engine has put beyond the collector is to be counted
    after = device.memory.held()
    if before is not None and after is not None:
        kept = after - before
        assert kept <= plan["used"] - plan["margin"], f"{kept} bytes are kept; the plan was {plan}"


def check_leaks(backend: str, dtype: str, folder: Path) -> None:
    """A thousand requests, some of them aborted, leave no block, no tensor and no memory behind."""
    engine = open_engine(backend, folder, Task.GENERATE, dtype, max_model_len=LENGTH, max_num_seqs=32)
    short = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)

    def serve(count: int) -> None:
        for number in range(count):
            while not engine.has_room(request := new(str(number), prompts()[number % len(prompts())], short)):
                engine.step()
            engine.add(request)
            if number % 7 == 0:
                engine.abort(str(number))
        finish(engine)
        engine.reset_prefix_cache()

    decode_every_size(engine)  # what a backend keeps for good, by the size of a batch or not, is there now
    serve(100)
    tensors, resident = live_tensors(), psutil.Process().memory_info().rss
    serve(REQUESTS)
    check_empty(engine)
    more = live_tensors() - tensors
    assert more <= 0, f"{more} tensors are left of {REQUESTS} requests"
    grown = psutil.Process().memory_info().rss - resident
    assert grown < LEAK, f"the process grew by {grown} bytes over {REQUESTS} requests"


def decode_every_size(engine: Engine) -> None:
    """Begin as many requests as may run together, and let one end at each step: all sizes of a batch, once.

    Backends may capture a decode step of a size when it first comes. That is no leak: there are so many sizes, no more.
    """
    for number in range(engine.limits.max_num_seqs):
        ends = SamplingParams(max_tokens=2 + number, temperature=0, ignore_eos=True)
        engine.add(new(str(number), [3 + number], ends))
    sizes = set()
    while engine.has_work():
        engine.step()
        sizes.add(len(engine.scheduler.running))
    every = set(range(1, max(sizes) + 1))  # the cache may have no room for the last request
    assert sizes >= every, f"{sorted(every - sizes)} requests never ran together"
    engine.reset_prefix_cache()


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(item), torch.Tensor) for item in gc.get_objects())
