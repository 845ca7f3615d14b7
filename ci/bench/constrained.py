"""What it costs to hold outputs to a schema: tokens a second of a batch, and the delay of a schema never seen before.

    python ci/bench/constrained.py MODEL [--schema bounded|plain|nested] [--writes drawn|document]
        [--batch 16] [--tokens 96] [--turns 5] [--dtype bfloat16]

Both sorts of batch run in turns, in one process, after one warm-up each; medians. Every schema is of a list that goes
on for as long as outputs are to be: `bounded` limits its strings, in which masks take longest; `plain` and `nested` are
as people write them. With `drawn` the model's own tokens count, which of random weights are any that the schema allows;
with `document` it is made to write a valid one, as a model would that was trained to. Shown are, too, how long sampling
waited for masks, and of that what filling them took and what taking the tokens before, in ms a step.

Delays are those of one request with one token, with a schema of about 2 kB that differs in a name each time, less that
of the same request without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import fmean, median, quantiles
from typing import Any

import torch
from torch import Tensor

from anycore import LLM, SamplingParams
from anycore.contract.batch import Samples, Sampling
from anycore.text import grammar

ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "tags", "active"],
    "additionalProperties": False,
}
TEXT = {"type": "string"}
PLAIN: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": TEXT,
        "age": {"type": "integer"},
        "score": {"type": "number"},
        "kind": {"enum": ["person", "place", "thing"]},
        "tags": {"type": "array", "items": TEXT},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "kind", "tags"],
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "description": "what the order is called in letters to the customer"},
        "customer": PLAIN,
        "addresses": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"street": TEXT, "city": TEXT, "code": {"type": "string", "pattern": "^[0-9]{5}$"}},
                "required": ["street", "city"],
            },
        },
        "lines": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "article": TEXT,
                    "count": {"type": "integer", "minimum": 1},
                    "price": {"type": "number"},
                    "currency": {"enum": ["EUR", "USD", "CNY", "GBP"]},
                    "note": {"type": ["string", "null"]},
                },
                "required": ["article", "count", "price"],
            },
        },
        "paid": {"type": "boolean"},
    },
    "required": ["title", "customer", "addresses", "lines", "paid"],
}
WHO = {"name": "Ada Lovelace", "age": 36, "kind": "person", "tags": ["poetry", "maths"], "active": True}
ORDER = {
    "title": "Order of two books",
    "customer": WHO,
    "addresses": [{"street": "12 St James's Square", "city": "London", "code": "10115"}],
    "lines": [{"article": "Notes on the Engine", "count": 2, "price": 14.5, "currency": "GBP", "note": None}],
    "paid": False,
}
SCHEMAS = {"bounded": (ITEM, WHO), "plain": (PLAIN, WHO), "nested": (NESTED, ORDER)}
"""What the list is of, and one that fits it."""


def endless(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1000}


ENDLESS = endless(ITEM)


def large(number: int) -> dict[str, Any]:
    """A schema of about 2 kB."""
    return {
        "type": "object",
        "properties": {f"part_{number}_{i}": ITEM for i in range(6)},
        "additionalProperties": False,
    }


def watched(owner: Any, method: str, spent: list[float]) -> None:
    """Note how long each call of a method takes, in ms."""
    work = getattr(owner, method)

    def timed(*arguments: Any) -> Any:
        began = time.perf_counter()
        result = work(*arguments)
        spent.append(1000 * (time.perf_counter() - began))
        return result

    setattr(owner, method, timed)


def writing(llm: LLM, text: str) -> Callable[[Tensor, Sampling], Samples]:
    """The backend's sampling, except that rows under a grammar write a text, each from its own start."""
    runner = llm.engine.runner
    sample, sampler = runner.backend.ops.sample, runner.sampler
    ids = torch.tensor(llm.tokenizer.encode(text, add_special_tokens=False), device=runner.backend.device)

    def written(logits: Tensor, params: Sampling) -> Samples:
        samples = sample(logits, params)
        if params.masked is not None and sampler._group is not None:
            places = sampler._places[sampler._group.seats].astype("int64") - 2  # they are of the next token, from 1 on
            samples.ids.copy_(ids[sampler.memory.upload(torch.from_numpy(places))])
        return samples

    return written


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--schema", choices=SCHEMAS, default="bounded")
    parser.add_argument("--writes", choices=("drawn", "document"), default="drawn")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    llm = LLM(options.model, task="generate", dtype=options.dtype, max_model_len=1024, max_num_seqs=options.batch)
    item, example = SCHEMAS[options.schema]
    ops = llm.engine.runner.backend.ops
    if options.writes == "document":
        vars(ops)["sample"] = writing(llm, json.dumps([example] * 200))
    spent: dict[str, list[float]] = defaultdict(list)
    sampler = llm.engine.runner.sampler
    watched(sampler._masks, "fill", spent["filling"])
    watched(llm.engine, "_commit", spent["taking"])
    watched(sampler, "settle", spent["waiting"])
    prompts = [f"List {i + 3} people as JSON:" for i in range(options.batch)]
    common: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": options.tokens, "ignore_eos": True}
    free, held = SamplingParams(**common), SamplingParams(**common, grammar=grammar.json_schema(endless(item)))
    rates: dict[str, list[float]] = {"free": [], "held": []}
    figures: dict[str, list[float]] = defaultdict(list)
    for turn in range(-1, options.turns):
        for name, params in (("free", free), ("held", held)):
            for times in spent.values():
                times.clear()
            began = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - began
            rate = sum(len(output.token_ids) for output in outputs) / seconds
            print(f"turn {turn}, {name}: {rate:.0f} tokens/s", flush=True)
            if turn >= 0:
                rates[name].append(rate)
                for what, times in spent.items() if name == "held" else ():
                    figures[what] += times
    ratios = [held / free for held, free in zip(rates["held"], rates["free"], strict=True)]
    for name, found in rates.items():
        print(f"{name}: {median(found):.0f} tokens/s {[round(rate) for rate in found]}")
    print(f"held / free: {median(ratios):.3f} {[round(ratio, 3) for ratio in ratios]}")
    for name, times in figures.items():
        p99 = quantiles(times, n=100)[-1]
        print(f"{name}: mean {fmean(times):.3f} p50 {median(times):.3f} p99 {p99:.3f} ms of {len(times)} steps")

    vars(ops).pop("sample", None)
    delays = []
    for number in range(-1, 2 * options.turns):
        found = []
        for schema in (None, large(number)):
            began = time.perf_counter()
            form = None if schema is None else grammar.json_schema(schema)
            llm.generate(f"Say {number}", SamplingParams(temperature=0, max_tokens=1, grammar=form))
            found.append(time.perf_counter() - began)
        if number >= 0:
            delays.append(1000 * (found[1] - found[0]))
    print(f"new schema of {len(json.dumps(large(1)))} bytes: {median(delays):.1f} ms {[round(d, 1) for d in delays]}")


if __name__ == "__main__":
    main()
