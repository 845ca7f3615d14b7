"""Steps of several texts: recorded once for many rows, run for groups of whole texts, each on one thread.

Nothing of an encoder's step joins one text to another. So a thread takes some of them from the first kernel to the
last: what lies between kernels stays in its core's cache, nobody waits at the end of each kernel, and Python makes one
call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import WholeStep
from anycore.contract.batch import Batch
from anycore_cpu.costs import CAPACITY, GROUP
from anycore_cpu.kernels.attention import Arguments, KernelPlan
from anycore_cpu.kernels.library import Kernels
from anycore_cpu.kernels.recording import Arena, Line, NotRecorded

KINDS = ("place", "script", "ids", "positions", "types", "wanted", "starts", "lengths", "rows", "requests")
"""What is added to a word, in the order of `Kind` in replay.cpp."""

ROWS_AT = {
    "anycore_linear": 1,
    "anycore_quantised_linear": 2,
    "anycore_quantised_rows": 2,
    "anycore_norm": 5,
    "anycore_activation": 1,
    "anycore_place": 1,
    "anycore_gather": 9,
    "anycore_angles": 3,
}
"""Which argument of a kernel says how many rows there are. Others have no place in these steps, but for attention."""

REQUESTS = GROUP
"""Texts of the step that is recorded: as many as a group has at most, so that there is room for a row of each."""


class Step(ctypes.Structure):
    """`struct Step` of replay.cpp."""

    _fields_ = (("run", ctypes.c_void_p), ("at", ctypes.c_int64))


class Texts(ctypes.Structure):
    """`struct Texts` of replay.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("script", "steps", "patches")),
        *((name, ctypes.c_int64) for name in ("script_bytes", "step_count", "patch_count", "room", "place")),
        ("row_bytes", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("ids", "positions", "types", "wanted", "starts", "groups")),
        ("group_count", ctypes.c_int64),
        ("out", ctypes.c_void_p),
    )


@dataclass(frozen=True, slots=True)
class Script:
    """A recorded step that can be run elsewhere, for other rows."""

    fixed: dict[str, int]  # of `Texts`
    width: int
    dtype: torch.dtype
    kept: tuple[Any, ...]

    def run(self, kernels: Kernels, batch: Batch, groups: Sequence[int]) -> Tensor:
        """The wanted rows of a batch whose groups begin at these requests; the last number is that of requests."""
        wanted, types = batch.output_rows, batch.token_types
        inputs = [batch.input_ids.contiguous(), batch.positions.contiguous()]
        inputs += [x.contiguous() for x in (types, wanted) if x is not None]
        starts, bounds = batch.query_starts_device, torch.tensor(groups)
        out = torch.empty(len(batch.input_ids) if wanted is None else len(wanted), self.width, dtype=self.dtype)
        texts = Texts(
            ids=inputs[0].data_ptr(),
            positions=inputs[1].data_ptr(),
            types=None if types is None else inputs[2].data_ptr(),
            wanted=None if wanted is None else inputs[-1].data_ptr(),
            starts=starts.data_ptr(),
            groups=bounds.data_ptr(),
            group_count=len(groups) - 1,
            out=out.data_ptr(),
            **self.fixed,
        )
        kernels.library.anycore_replay_texts(ctypes.byref(texts))
        return out


def record(step: WholeStep, kernels: Kernels, like: Batch) -> Script:
    """Run a step of CAPACITY rows and write down what it calls.

    Raises:
        NotRecorded: it is made of more than kernels.
    """
    arena = Arena()
    zeros = torch.zeros(CAPACITY, dtype=torch.int64)
    batch = Batch(
        input_ids=zeros,
        positions=zeros.clone(),
        query_lens=[*[1] * (REQUESTS - 1), CAPACITY - REQUESTS + 1],
        context_lens=[0] * REQUESTS,
        output_rows=None if like.output_rows is None else torch.arange(REQUESTS),
        causal=like.causal,
        token_types=None if like.token_types is None else zeros.clone(),
    )
    batch.plan = plan = KernelPlan(batch)
    plan.common  # noqa: B018  its tensors, made before anything is recorded
    with kernels.recording(arena) as recorder:
        rows = step.forward(batch)
    tensors: dict[str, Tensor | None] = {"ids": batch.input_ids, "positions": batch.positions}
    tensors |= {"types": batch.token_types, "wanted": batch.output_rows}
    tensors |= {"starts": plan.starts, "lengths": plan.lengths}
    writer = Writer(arena, {x.data_ptr(): name for name, x in tensors.items() if x is not None})
    steps = [Step(line.run, writer.line(line)) for line in recorder.lines]
    script, patches = bytes(writer.script), (ctypes.c_int64 * len(writer.patches))(*writer.patches)
    calls = (Step * len(steps))(*steps)
    place = ctypes.create_string_buffer(script, len(script))
    fixed = {
        "script": ctypes.addressof(place),
        "steps": ctypes.addressof(calls),
        "patches": ctypes.addressof(patches),
        "script_bytes": len(script),
        "step_count": len(steps),
        "patch_count": len(patches) // 2,
        "room": arena.peak,
        "place": rows.data_ptr() - arena.start,
        "row_bytes": rows.shape[1] * rows.element_size(),
    }
    return Script(fixed, rows.shape[1], rows.dtype, (place, calls, patches, recorder.lines))


class Writer:
    """Turns calls into a script: words of 8 bytes, and which of them have to be mended before they are read."""

    def __init__(self, arena: Arena, tensors: dict[int, str]) -> None:
        self.script = bytearray()
        self.patches: list[int] = []  # in pairs: bytes from the script's beginning, index of the kind
        self._arena = arena
        self._tensors = tensors

    def line(self, line: Line) -> int:
        """Append a call's words; returns where they begin."""
        words = [int.from_bytes(line.words.raw[at : at + 8], "little") for at in range(0, len(line.words), 8)]
        if line.name == "anycore_attention":
            (what,) = line.structures
            at = self._attention(what)
            return self._append([("script", at)])
        if line.name not in ROWS_AT:
            raise NotRecorded(f"{line.name} is not known to work on rows alone")
        rows_at = ROWS_AT[line.name]
        found = [self._mended(word) for word in words]
        found[rows_at] = self._count(words[rows_at], line.name)
        return self._append(found)

    def _attention(self, what: Arguments) -> int:
        raw = bytes(what)
        words = [self._mended(int.from_bytes(raw[at : at + 8], "little")) for at in range(0, len(raw), 8)]
        for name in ("rows", "requests"):
            words[getattr(Arguments, name).offset // 8] = (name, 0)
        return self._append(words)

    def _mended(self, word: int) -> tuple[str, int]:
        """A word's kind, "" if it stays as it is, and what the kind's number is added to."""
        if word in self._tensors:
            return self._tensors[word], 0
        offset = word - self._arena.start
        return ("place", offset) if 0 <= offset < self._arena.size else ("", word)

    @staticmethod
    def _count(word: int, name: str) -> tuple[str, int]:
        kinds = {CAPACITY: "rows", REQUESTS: "requests"}
        if word not in kinds:
            raise NotRecorded(f"{name} is called for {word} rows of {CAPACITY}")
        return kinds[word], 0

    def _append(self, words: list[tuple[str, int]]) -> int:
        start = len(self.script)
        for kind, word in words:
            if kind:
                self.patches += [len(self.script), KINDS.index(kind)]
            self.script += word.to_bytes(8, "little")
        return start


def grouped(lens: Sequence[int], threads: int) -> list[int] | None:
    """Where groups of whole texts begin, and where the last one ends; None: there is not enough to do for all threads.

    Each has GROUP rows or somewhat more, fewer if that keeps all threads at work.
    """
    if len(lens) < 2 or max(lens) > CAPACITY - GROUP:
        return None
    target = min(GROUP, -(-sum(lens) // threads))
    groups, rows = [0], 0
    for i, length in enumerate(lens):
        rows += length
        if rows >= target or i == len(lens) - 1:
            groups.append(i + 1)
            rows = 0
    return groups if len(groups) - 1 >= threads else None
