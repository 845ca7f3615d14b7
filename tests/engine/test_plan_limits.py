"""No accepted configuration runs out of memory: random settings under a hard limit on the memory a process may have.

A process of its own gets a scripted device, whose size is drawn, and RLIMIT_DATA (private writable memory, so not the
weight files it maps): what it has after its imports and a first engine, plus the device. Control groups, which would
count pages really touched, cannot be made by ordinary users. Whatever the plan accepts then serves its worst load.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
ROUNDS = 8  # per seed
FORGETFUL = {
    "forgetful": True,
    "device": 160 * MIB,
    "dtype": "float32",
    "kv_cache_memory": 512 * MIB,
    "max_num_seqs": 8,
}
"""The plan takes four times as much as there is for granted."""

SCRIPT = """
import sys
sys.path[:0] = sys.argv[2].split(":")
from engine.test_plan_limits import under_limit
under_limit(sys.argv[1])
"""


def settings_of(rng: random.Random) -> dict[str, Any]:
    """Anything a user might write, much of which cannot be served."""
    return {
        "device": rng.randint(90, 300) * MIB,
        "dtype": rng.choice(["float32", "bfloat16"]),
        "memory_utilization": rng.choice([None, 0.5, 0.9, 1.0]),
        "kv_cache_memory": rng.choice([None, None, rng.randint(1, 48) * MIB]),
        "max_model_len": rng.choice([None, rng.randint(16, 512)]),
        "max_num_seqs": rng.choice([None, rng.randint(1, 64)]),
        "max_num_batched_tokens": rng.choice([None, rng.randint(16, 4096)]),
        "block_size": rng.choice([None, 1, 16, 128]),
    }


def under_limit(folder: str) -> None:
    """Read settings from stdin, one JSON object a line, and answer each with "served", "refused" or a fault."""
    from dataclasses import replace

    from engine.worst import fill
    from engines import LOADED
    from engines import engine as small_engine

    from anycore.config import ModelConfig
    from anycore.contract.declare import Probe
    from anycore.engine import memory
    from anycore.engine.launch import build, prepare
    from anycore.errors import ConfigError
    from anycore_cpu.memory import CpuMemory

    fill(small_engine(Path(folder)))  # threads, caches and compiled code are there
    spec = LOADED.backend("cpu")
    checked = memory._check_given
    for line in sys.stdin:
        settings = json.loads(line)
        memory._check_given = (lambda *asked: None) if settings.pop("forgetful", False) else checked
        size = settings.pop("device")
        device = replace(spec.probe().devices[0], memory=size)
        CpuMemory.total = CpuMemory.free = lambda self, size=size: size  # type: ignore[method-assign, misc]
        seen = replace(LOADED, backends=(replace(spec, probe=lambda device=device: Probe(devices=(device,))),))
        try:
            resource.setrlimit(resource.RLIMIT_DATA, (data_now() + size, resource.RLIM_INFINITY))
            made = build(prepare(ModelConfig(model=folder, backend="cpu", **settings), seen))
            fill(made)
            answer = "served"
        except ConfigError as error:
            answer = f"refused: {error.message}"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        made = None
        print(json.dumps(answer), flush=True)


def data_now() -> int:
    """Private writable memory of this process in bytes, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmData in /proc/self/status")


def run(folder: Path, every: list[dict[str, Any]]) -> list[str]:
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", SCRIPT, str(folder), f"{root}:{root.parent / 'plugins' / 'anycore-echo'}"]
    text = "".join(json.dumps(settings) + "\n" for settings in every)
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=280, check=False)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(every), f"died at {every[len(answers)]}: {done.stderr[-2000:]}"
    return answers


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts what is meant on Linux only")
@pytest.mark.parametrize("seed", range(2))
def test_what_is_accepted_never_runs_out_of_memory(t_lm: Path, seed: int) -> None:
    """And a plan that forgets the cache would be caught, in the same process: the last one."""
    rng = random.Random(seed)
    every = [settings_of(rng) for _ in range(ROUNDS)]
    *answers, caught = run(t_lm, [*every, FORGETFUL])
    assert "emory" in caught
    assert not caught.startswith(("served", "refused"))
    for settings, answer in zip(every, answers, strict=True):
        assert answer.startswith(("served", "refused")), (settings, answer)
    assert answers.count("served") > ROUNDS // 3
