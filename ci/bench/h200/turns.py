"""One engine in a process of its own, measured when it is told to: several take turns on one machine.

A worker (`engine_*.py`) opens its engine, computes a first token, and then runs the workload that each line of its
standard input names, once. It answers every line with one that begins with MARK.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from measure import workload

HERE = Path(__file__).parent
MARK = "TURN "

Row = dict[str, Any]


def take_turns(run: Callable[[str], float]) -> None:
    """Say that the engine is up, then run what is asked for; the worker's side."""
    print(MARK + "{}", flush=True)
    for line in sys.stdin:
        print(MARK + json.dumps({"seconds": run(line.strip())}), flush=True)


class Worker:
    """The other side: an engine that is started with the object, and ended by `close`."""

    def __init__(self, engine: str, task: str, folder: str, share: float, log: Path) -> None:
        """`engine`: anycore, vllm or transformers; anycore-tp2 of two ranks, each with that share of its own card."""
        start = time.monotonic()
        self.engine = engine
        kind, _, ranks = engine.partition("-tp")
        self._log: TextIO = log.open("a")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"engine_{kind}.py"), task, folder, str(share)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=os.environ | {"RANKS": ranks or "1"},
        )  # fmt: skip
        self._answer()
        self.start_seconds = time.monotonic() - start

    def run(self, kind: str) -> float:
        """Run a workload; return its seconds."""
        assert self._process.stdin is not None
        print(kind, file=self._process.stdin, flush=True)
        return float(self._answer()["seconds"])

    def _answer(self) -> Row:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: Row = json.loads(line.removeprefix(MARK))
                return found
            self._log.write(line)
        raise RuntimeError(f"{self.engine} ended with code {self._process.wait()}: see {self._log.name}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def pairs(vocab: int = 250_000) -> tuple[list[str], list[str]]:
    """40 queries of 16 words with 100 documents of 16 to 480 words each, as equal lists."""
    rng = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{rng.randrange(100, vocab)}" for _ in range(count))

    queries = [words(16) for _ in range(40)]
    repeated = [query for query in queries for _ in range(100)]
    return repeated, [words(rng.randint(16, 480)) for _ in repeated]


def sizes(kind: str) -> Row:
    """What a workload holds, to turn seconds into rates."""
    if kind == "rerank":
        return {"pairs": 4000}
    prompts, lengths = workload(kind, 30_000)
    read = sum(map(len, prompts))
    return {"texts": len(prompts), "in_tok": read} if kind == "embed" else {"out_tok": sum(lengths), "in_tok": read}
