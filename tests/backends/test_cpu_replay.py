"""Recorded steps of the CPU backend: replayed, they give to the bit what eager steps give, whoever comes and goes."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import engines
import pytest
import tiny
import torch
from backends.cpu_kernels import LEVELS, kernels_of
from torch.utils._python_dispatch import TorchDispatchMode

from anycore.engine.engine import Engine
from anycore_cpu.costs import REQUESTS
from anycore_cpu.kernels.recording import Arena, Call, NotRecorded
from anycore_cpu.replay import Program, ReplayStep

DTYPES = ("float32", "bfloat16")


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Engines made inside use this level."""
    kernels_of(request.param)
    monkeypatch.setenv("ANYCORE_CPU_KERNELS", request.param)
    return str(request.param)


def pair(folder: Path, **settings: Any) -> tuple[Engine, Engine]:
    """The same engine twice: as it is, and without replay."""
    fast, eager = engines.engine(folder, **settings), engines.engine(folder, **settings)
    assert isinstance(fast.runner._step, ReplayStep)
    assert isinstance(eager.runner._step, ReplayStep)
    eager.runner._step = eager.runner._step.step
    return fast, eager


def recorded(made: Engine) -> dict[Any, Any]:
    step = made.runner._step
    assert isinstance(step, ReplayStep)
    return step._programs


def watch(made: Engine) -> list[torch.Tensor]:
    """All hidden rows that the engine's steps leave."""
    rows: list[torch.Tensor] = []
    step = made.runner._step

    def watched(batch: Any, sampling: Any) -> Any:
        output = step(batch, sampling)
        rows.append(output.rows.clone())
        return output

    made.runner._step = watched
    return rows


def ways(seed: int) -> list[dict[str, Any]]:
    """Of sampling."""
    return [{}, {"temperature": 0.8, "seed": seed}, {"temperature": 1.0, "seed": seed, "top_k": 5, "logprobs": 2}]


def traffic(made: Engine, seed: int) -> dict[Any, Any]:
    """Requests that join in the middle, more than fit into the cache together, with prompts longer than a step."""
    chance, outputs = random.Random(seed), {}
    waiting = [
        engines.request(
            str(i),
            [chance.randrange(1, 400) for _ in range(chance.choice((1, 15, 16, 40, 90)))],
            max_tokens=chance.randrange(1, 60),
            **chance.choice(ways(i)),
        )
        for i in range(24)
    ]
    while waiting or made.has_work():
        while waiting and (not made.has_work() or chance.random() < 0.3):
            made.add(waiting.pop())
        for delta in made.step():
            outputs.setdefault((delta.id, delta.index), engines.Output()).take(delta)
    return outputs


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_requests_that_come_go_and_are_preempted(tmp_path: Path, family: str, dtype: str) -> None:
    folder = tiny.tiny_lm(tmp_path, family=family, layers=2, window=24 if family == "gemma3" else None)
    fast, eager = pair(folder, dtype=dtype, max_num_seqs=9, max_num_batched_tokens=48, kv_cache_memory=420_000)
    mine, theirs = watch(fast), watch(eager)
    assert traffic(fast, 1) == traffic(eager, 1)
    assert fast.stats().preemptions > 0
    assert len(mine) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_every_level_replays_what_it_computes(level: str, t_lm: Path) -> None:
    fast, eager = pair(t_lm, dtype="bfloat16")
    assert traffic(fast, 2) == traffic(eager, 2)
    decodes = [program for (_, decoding, *_), program in recorded(fast).items() if decoding]
    assert len(decodes) > 3
    assert None not in decodes


@pytest.mark.parametrize("dtype", DTYPES)
def test_single_texts(level: str, t_bert: Path, t_ce: Path, dtype: str) -> None:
    for folder in (t_bert, t_ce):
        fast, eager = pair(folder, dtype=dtype)
        chance = random.Random(3)
        for length in (1, 2, 16, 5, 16, 33, 5, 1):
            tokens = [chance.randrange(5, 60) for _ in range(length)]
            types = {"token_types": [int(i > length // 2) for i in range(length)]} if folder == t_ce else {}
            found = [engines.run(made, [tokens], **types)[0] for made in (fast, eager)]
            assert str(found[0]) == str(found[1])
        assert {rows for rows, *_ in recorded(fast)} >= {1, 2, 5, 16, 33}
        assert None not in recorded(fast).values()


def test_results_are_the_callers_own(t_lm: Path) -> None:
    """The next step does not write into what an earlier one returned."""
    made = engines.engine(t_lm)
    rows: list[tuple[torch.Tensor, torch.Tensor]] = []
    step = made.runner._step

    def kept(batch: Any, sampling: Any) -> Any:
        output = step(batch, sampling)
        rows.append((output.rows, output.rows.clone()))
        return output

    made.runner._step = kept
    engines.run(made, [[5, 6, 7], [8, 9]], max_tokens=6)
    assert all(torch.equal(given, copy) for given, copy in rows)


def test_torchs_own_threads_have_no_part_in_a_result() -> None:
    """They would look for work on a core of the pool's long after they have copied 32,768 numbers or more."""
    ran: list[str] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    rows = torch.randn(128, 384)
    program = Program((Call * 0)(), [], None, rows)  # type: ignore[arg-type]
    with Watch():
        copy = program.copied()
    assert ran == ["aten.empty_like.default"]
    assert torch.equal(copy, rows)
    assert copy.data_ptr() != rows.data_ptr()


def test_larger_batches_run_as_they_are(t_lm: Path) -> None:
    made = engines.engine(t_lm, max_num_seqs=REQUESTS + 6)
    engines.run(made, [[5, 6, 7]] * (REQUESTS + 6), max_tokens=3)
    assert all(rows <= REQUESTS for rows, *_ in recorded(made))


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_matrices_in_two_formats_are_recorded(tmp_path: Path, family: str) -> None:
    """As in most GGUF files, whose values have more bits than their queries and keys: their products are joined."""
    folder = tiny.tiny_lm(tmp_path, family=family, layers=2)
    settings: dict[str, Any] = {"quantization": "w4a16", "keep_dense": ("layers.*.v_proj",), "dtype": "bfloat16"}
    fast, eager = pair(folder, **settings)
    programs = recorded(fast)
    rows = [watch(made) for made in (fast, eager)]
    outputs = [engines.run(made, [[5, 6, 7], [8] * 20], max_tokens=8) for made in (fast, eager)]
    assert outputs[0] == outputs[1]
    assert all(map(torch.equal, *rows))
    assert programs
    assert None not in programs.values()


def test_a_step_that_torch_has_a_part_in_is_not_recorded(t_lm: Path, caplog: pytest.LogCaptureFixture) -> None:
    fast, eager = pair(t_lm)
    fast.runner._step.step.forward.__self__.norm = lambda x, residual: (x + residual, x)  # type: ignore[attr-defined]
    eager.runner._step.forward.__self__.norm = lambda x, residual: (x + residual, x)  # type: ignore[attr-defined]
    recorded(fast).clear()
    outputs = [engines.run(made, [[5, 6, 7], [8] * 20], max_tokens=8) for made in (fast, eager)]
    assert outputs[0] == outputs[1]
    assert set(recorded(fast).values()) == {None}
    said = [r.getMessage() for r in caplog.records if "not recorded" in r.getMessage()]
    assert len(said) == 1
    assert "aten.add" in said[0]


def test_memory_of_what_is_gone_is_taken_again() -> None:
    arena = Arena(1 << 16)
    first = arena.empty(3, 100, dtype=torch.float32)
    place, view = first.data_ptr(), first[1]
    del first
    assert arena.empty(3, 100, dtype=torch.float32).data_ptr() != place  # a view still holds it
    del view
    assert arena.empty(300, dtype=torch.float32).data_ptr() == place
    assert arena.empty(2, 0, dtype=torch.float32).shape == (2, 0)
    with pytest.raises(NotRecorded, match="more than 0 MiB"):
        arena.empty(1 << 16, dtype=torch.bfloat16)


def test_pieces_never_overlap_and_all_come_back() -> None:
    arena, chance = Arena(1 << 20), random.Random(0)
    held: list[tuple[torch.Tensor, int]] = []
    for number in range(2000):
        if held and chance.random() < 0.5:
            piece, value = held.pop(chance.randrange(len(held)))
            assert (piece == value).all()
        else:
            piece = arena.empty(chance.randrange(1, 400), dtype=torch.int64)
            held.append((piece.fill_(number), number))
    del piece
    held.clear()
    assert arena._free == [(0, 1 << 20)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_plan_counts_what_recorded_steps_work_in(t_lm: Path, t_bert: Path, dtype: str) -> None:
    decoder = engines.engine(t_lm, dtype=dtype, max_num_seqs=12)
    engines.run(decoder, [[5, 6, 7]] * 12, max_tokens=4)
    encoder = engines.engine(t_bert, dtype=dtype)
    engines.run(encoder, [[5] * 128])
    for made, rows in ((decoder, 12), (encoder, 128)):
        assert any(kind[0] == rows for kind in recorded(made))
        assert made.runner._step.kernels._arena.peak <= made.card["memory"]["graphs"]  # type: ignore[attr-defined]


def test_a_kernel_that_cannot_be_called_again_says_so(level: str) -> None:
    kernels = kernels_of(level)
    with pytest.raises(NotRecorded, match="anycore_sample"), kernels.recording():
        kernels.library.anycore_sample(None, 0, 0, *[None] * 5, 1, None, None)
    assert kernels.library.anycore_packed_size(32, 2, True) == 64
