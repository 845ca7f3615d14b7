"""Times the commands that only answer questions, each in a new process: `anycore matrix`, `check` and `plan`.

    python ci/bench/startup.py
    python ci/bench/startup.py --runs 20 --bar 0.4

Prints the best of some runs in seconds of processor time, which other processes hardly lengthen, and exits with 1
where one is beyond the bar. `anycore bench startup` times the start of a server.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
"""With that each run of a checkout compiles anycore's own sources, which come compiled where it is installed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10, help="of which the best counts")
    parser.add_argument("--bar", type=float, default=0.5, help="seconds of processor time")
    options = parser.parse_args()
    slow = []
    with tempfile.TemporaryDirectory() as model:
        Path(model, "config.json").write_text(json.dumps(CONFIG))
        for words in (["matrix"], ["check", model, "--backend", "cpu"], ["plan", model, "--device", "h200"]):
            best = min(seconds(words) for _ in range(options.runs))
            print(f"anycore {words[0]:<8}{best:6.3f} s")
            if best > options.bar:
                slow.append(words[0])
    if slow:
        print(f"beyond {options.bar:g} s: {', '.join(slow)}")
    return 1 if slow else 0


def seconds(words: list[str]) -> float:
    """Run a command; return the processor time of its process, and of those it started."""
    before = os.times()
    command = [sys.executable, "-m", "anycore.cli.main", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


if __name__ == "__main__":
    sys.exit(main())
