"""How fast prompts are read: anycore beside llama.cpp's `llama-bench`, in turns, each in a fresh process.

    LLAMA_BENCH=llama-bench python ci/bench/prefill.py MODEL FILE.gguf [--ours '--quantization w8a8'] [--tokens 512]

Prints the medians in tokens a second and their ratio; exits with 1 below the goal, twice the peer's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

GOAL = 2.0
THREADS = str(len(os.sched_getaffinity(0)))
OURS = """
import sys, time
from anycore import LLM, SamplingParams
from anycore.cli.workloads import corpus, slices

model, tokens, prompts, given = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), dict(zip(*[iter(sys.argv[4:])] * 2))
flags = {name.removeprefix("--").replace("-", "_"): value for name, value in given.items()}
llm = LLM(model, backend="cpu", max_model_len=tokens + 16, enable_prefix_caching=False, **flags)
ids = llm.tokenizer.encode(corpus(), add_special_tokens=False)
first = SamplingParams(max_tokens=1, temperature=0)
llm.generate(slices(ids, [tokens], 9), first)
started = time.perf_counter()
for prompt in slices(ids, [tokens] * prompts, 10):
    llm.generate([prompt], first)
print(tokens * prompts / (time.perf_counter() - started))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("file", help="the same model as GGUF, of the type to compare with")
    parser.add_argument("--ours", default="--dtype bfloat16", help="flags of anycore with their values")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=4, help="one after the other, in each turn")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    tokens, prompts = str(options.tokens), str(options.prompts)
    mine = [sys.executable, "-c", OURS, options.model, tokens, prompts, *options.ours.split()]
    peer = [os.environ.get("LLAMA_BENCH", "llama-bench"), "-m", options.file, "-p", tokens, "-n", "0"]
    peer += ["-r", prompts, "-t", THREADS, "-o", "json"]
    ours, theirs = [], []
    for _ in range(options.turns):
        ours.append(float(output(mine)))
        theirs.append(float(json.loads(output(peer))[0]["avg_ts"]))
    ratio = statistics.median(ours) / statistics.median(theirs)
    for name, found in (("anycore", ours), ("llama.cpp", theirs)):
        print(f"{name:9} {statistics.median(found):7.1f} tokens/s ({min(found):.1f}-{max(found):.1f})")
    print(f"ratio {ratio:.2f}, wanted are {GOAL:g}; load {os.getloadavg()[0]:.1f}")
    return 0 if ratio >= GOAL else 1


def output(command: list[str]) -> str:
    quiet = os.environ | {"ANYCORE_LOG": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=quiet)
    if done.returncode != 0:
        sys.exit(f"{command[0]} ended with code {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
