"""Tokens a second that one front process passes on: the real server before an engine process that computes nothing.

    python ci/bench/front.py MODEL                # 256 streams, one token each a step, as fast as the front takes them
    python ci/bench/front.py MODEL --profile      # where the front's time goes, by function

MODEL gives the tokenizer. The front's own time on a core is counted, not the clock on the wall: engine and client are
processes beside it. What comes in faster than it leaves is sent several tokens at a time, so the engine waits between
steps (--step-ms). `anycore bench kernels --steps` fits what requests and tokens take to such flows.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys

from anycore import plugins
from anycore.cli import front_times
from anycore.cli.flood import Flow
from anycore.config import ModelConfig
from anycore.engine.launch import prepare


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--requests", type=int, default=1, help="of each stream, one after the other")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each")
    parser.add_argument("--tokens", type=int, default=100, help="of each answer")
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    prepared = prepare(ModelConfig(model=options.model, backend="cpu", kv_cache_memory=256 << 20), plugins.load())
    flow = Flow(options.streams, options.requests, options.prompt, options.tokens, options.step_ms / 1e3)
    profiler = cProfile.Profile()
    if options.profile:
        profiler.enable()
    (found,) = asyncio.run(front_times.through(prepared, [flow]))
    profiler.disable()
    count = flow.streams * flow.requests * flow.tokens
    print(
        f"{flow.streams} streams, {count} tokens in {found.events} events, woken {found.wakes} times: "
        f"{1e6 * found.seconds / count:.1f} us a token on this core, so {count / found.seconds:.0f} tokens/s"
    )
    if options.profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(40)
    return 0


if __name__ == "__main__":
    sys.exit(main())
