"""A disk that is full in the middle of `run-batch`: a file system of a page or more is filled, freed, and gone on with.

Batches run in this process, their engines in threads of it: the file is what is of interest.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from server.harness import ThreadClient

from anycore.batch.run import Outcome, run_batch
from anycore.config import ModelConfig, ServerConfig
from anycore.server import child
from faults.measure import Row

LINES = 60
PAGE = 4096
DISK = 1 << 20  # bytes


def full_disk(model: Path, times: int, seconds: float) -> Row:
    """Needs the right to mount: of root, or in `unshare -rm`."""
    row, end = Row("full disk for run-batch"), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as scratch, small_disk(Path(scratch) / "disk") as disk:
        source = Path(scratch) / "in.jsonl"
        source.write_text("".join(line(number) for number in range(LINES)))
        while row.times < times and time.monotonic() < end:
            once(row, model, source, disk, pages=1 + row.times % 4)
            row.times += 1
    return row


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", folder], capture_output=True)
    if made.returncode:
        raise SystemExit("a full disk needs the right to mount: run this as root, or as `unshare -rm python ci/faults`")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def line(number: int) -> str:
    body = {"model": "lm", "prompt": f"{number} is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return json.dumps({"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def once(row: Row, model: Path, source: Path, disk: Path, pages: int) -> None:
    """Let the disk be full after so many pages of answers, free it, and go on with the same command."""
    target, filler = disk / "out.jsonl", disk / "filler"
    filler.write_bytes(bytes(DISK - pages * PAGE))
    row.ends.sent += LINES
    first = batch(model, source, target)
    row.wrong["ends that are not said"] += "space" not in first.stopped or not first.code
    row.wrong["disks that were not full"] += first.answered == LINES
    before = target.read_bytes()
    row.wrong["lines cut short"] += bool(before) and not before.endswith(b"\n")
    filler.unlink()
    batch(model, source, target)
    row.wrong["answers changed"] += not target.read_bytes().startswith(before)
    found = Counter(json.loads(text)["custom_id"] for text in target.read_text().splitlines())
    row.ends.answered += len(found)
    row.ends.lost["never answered"] += LINES - len(found)
    row.wrong["answered twice"] += found.total() - len(found)
    target.unlink()


def batch(model: Path, source: Path, target: Path) -> Outcome:
    config = ModelConfig(
        model=str(model), served_model_name=("lm",), backend="cpu", dtype="float32", threads=1, kv_cache_memory=8 << 20
    )
    client = partial(ThreadClient, launch=child.launch_model)
    return run_batch(source, target, ServerConfig(log_level="error"), [config], client=client, max_concurrency=4)
