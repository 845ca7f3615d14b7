"""How many requests the same KV memory holds at once: blocks as they are needed, against the longest length for each.

    python ci/bench/admitted.py

The block pool and the scheduler are the engine's own; only the model is left out, for lengths do not depend on it.
There is always somebody waiting. Lengths are ShareGPT-like: log-normal, prompts 161 and outputs 338 tokens in the mean
(as the paper on PagedAttention has them for ShareGPT, Kwon et al. 2023), their logarithm's deviation 1.1 and 1.0; cut
where both together would pass the longest length. Every prompt is another one: no prefix is shared. Printed is the
mean over the second half of the steps; the exit code is 1 below 3 times.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
from itertools import count

from anycore.contract.declare import Task
from anycore.contract.sizes import Limits
from anycore.engine.blocks import BlockPool
from anycore.engine.request import NewRequest, SamplingParams
from anycore.engine.scheduler import Scheduler
from anycore.engine.sequence import Request

PROMPT, OUTPUT = (161, 1.1), (338, 1.0)  # mean of the tokens, deviation of their logarithm
BAR = 3.0
WAITING = 8  # requests that always wait


def draw(rng: random.Random, mean: float, deviation: float) -> int:
    return max(1, round(rng.lognormvariate(math.log(mean) - deviation**2 / 2, deviation)))


def lengths(rng: random.Random, longest: int) -> tuple[int, int]:
    """Tokens of a prompt and of its output."""
    prompt = min(draw(rng, *PROMPT), longest - 1)
    return prompt, min(draw(rng, *OUTPUT), longest - prompt)


def paged(tokens: int, block_size: int, longest: int, budget: int, steps: int, seed: int) -> dict[str, float]:
    """Serve an endless queue for so many steps; return means over the second half."""
    limits = Limits(tokens, budget, longest, block_size, tokens // block_size + 1)
    pool = BlockPool(limits.blocks, block_size)
    scheduler = Scheduler(limits, pool)
    rng, names = random.Random(seed), count()
    running: list[int] = []
    used: list[float] = []
    ended = 0
    for step in range(steps):
        while len(scheduler.waiting) < WAITING:
            prompt, output = lengths(rng, longest)
            number = next(names)
            ids = [rng.randrange(1 << 30) for _ in range(prompt)]
            new = NewRequest(id=str(number), task=Task.GENERATE, token_ids=ids,
                             sampling=SamplingParams(max_tokens=output, ignore_eos=True))  # fmt: skip
            scheduler.add(Request(new, 0, number, prompt + output), float(number))
        due = [entry.request for entry in scheduler.schedule().entries if entry.last]
        for request in due:
            request.tokens.append(rng.randrange(1 << 30))
            if len(request.tokens) == request.max_total:
                scheduler.remove(request)
                ended += 1
        if step >= steps // 2:
            running.append(len(scheduler.running))
            used.append(1 - pool.free / pool.size)
    pool.check()
    mean = statistics.fmean(running)
    assert ended > mean, f"{ended} requests ended, {mean:.0f} ran: take more --steps"
    return {"running": mean, "used": statistics.fmean(used), "preempted": scheduler.preemptions, "ended": ended}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072, help="that the memory holds (16 GiB of Llama-3-8B's)")
    parser.add_argument("--longest", type=int, nargs="*", default=[2048, 4096, 8192], help="tokens of a sequence")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--budget", type=int, default=2048, help="tokens of a step")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    means = f"prompts {PROMPT[0]} and outputs {OUTPUT[0]} tokens in the mean, log-normal"
    print(f"KV memory of {options.tokens} tokens; {means}")
    print(f"{'longest':>8}{'contiguous':>12}{'paged':>9}{'times':>8}{'used':>8}{'preempted':>11}{'ended':>8}")
    least = math.inf
    for longest in options.longest:
        contiguous = options.tokens // longest
        found = paged(options.tokens, options.block_size, longest, options.budget, options.steps, options.seed)
        times = found["running"] / contiguous
        least = min(least, times)
        print(f"{longest:8}{contiguous:12}{found['running']:9.1f}{times:8.2f}{found['used']:8.1%}"
              f"{found['preempted']:11.0f}{found['ended']:8.0f}", flush=True)  # fmt: skip
    print(f"least: {least:.2f} times; the bar is {BAR:g}")
    return int(least < BAR)


if __name__ == "__main__":
    sys.exit(main())
