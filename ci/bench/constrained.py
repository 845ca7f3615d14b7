"""What it costs to hold outputs to a schema: tokens a second of a batch, and the delay of a schema never seen before.

    python ci/bench/constrained.py MODEL [--batch 16] [--tokens 96] [--turns 5] [--dtype bfloat16]

Both sorts of batch run in turns, in one process, after one warm-up each; medians. The schema lets outputs go on for as
long as they are to be. Delays are those of one request with one token, with a schema of about 2 kB that differs in a
name each time, less that of the same request without.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

from anycore import LLM, SamplingParams
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
ENDLESS = {"type": "array", "items": ITEM, "minItems": 1000}


def large(number: int) -> dict[str, Any]:
    """A schema of about 2 kB."""
    return {
        "type": "object",
        "properties": {f"part_{number}_{i}": ITEM for i in range(6)},
        "additionalProperties": False,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    llm = LLM(options.model, task="generate", dtype=options.dtype, max_model_len=1024, max_num_seqs=options.batch)
    prompts = [f"List {i + 3} people as JSON:" for i in range(options.batch)]
    free = SamplingParams(temperature=0.8, seed=1, max_tokens=options.tokens, ignore_eos=True)
    held = SamplingParams(
        temperature=0.8, seed=1, max_tokens=options.tokens, ignore_eos=True, grammar=grammar.json_schema(ENDLESS)
    )
    rates: dict[str, list[float]] = {"free": [], "held": []}
    for turn in range(-1, options.turns):
        for name, params in (("free", free), ("held", held)):
            began = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - began
            rate = sum(len(output.token_ids) for output in outputs) / seconds
            print(f"turn {turn}, {name}: {rate:.0f} tokens/s", flush=True)
            if turn >= 0:
                rates[name].append(rate)
    ratios = [held / free for held, free in zip(rates["held"], rates["free"], strict=True)]
    for name, found in rates.items():
        print(f"{name}: {median(found):.0f} tokens/s {[round(rate) for rate in found]}")
    print(f"held / free: {median(ratios):.3f} {[round(ratio, 3) for ratio in ratios]}")

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
