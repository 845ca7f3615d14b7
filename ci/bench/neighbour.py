"""What decoding keeps of its speed on the CPU beside a process that never rests: at least 70 % is wanted.

    python ci/bench/neighbour.py MODEL [--dtype bfloat16] [--quantization w8a8] [--busy 1]

Alone and in company take turns, and medians are compared; it exits with 1 below the goal. The machine must be quiet
otherwise. Two cores that three threads share fairly leave a busy pair of threads 67 %; more is possible where memory,
not the core, is what a thread waits for.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from anycore import LLM, SamplingParams

GOAL = 0.7
PROMPT = [[7 + 3 * i % 200 for i in range(64)]]


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def speed(llm: LLM, tokens: int) -> float:
    """Tokens a second."""
    started = time.perf_counter()
    llm.generate(PROMPT, SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    return tokens / (time.perf_counter() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--busy", type=int, default=1, help="processes that never rest")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    settings = {"dtype": options.dtype, "quantization": options.quantization, "max_model_len": 512}
    llm = LLM(options.model, backend="cpu", **settings)
    speed(llm, 16)
    alone, beside = [], []
    for _ in range(options.turns):
        alone.append(speed(llm, options.tokens))
        with busy_loops(options.busy):
            beside.append(speed(llm, options.tokens))
    share = statistics.median(beside) / statistics.median(alone)
    print(f"alone {statistics.median(alone):.1f} tokens/s, beside {options.busy} busy {statistics.median(beside):.1f}")
    print(f"keeps {share:.0%}, wanted are {GOAL:.0%}")
    return 0 if share >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
