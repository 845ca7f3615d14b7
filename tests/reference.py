"""What the model tests share: a backend of the contract's defaults, packed and paged forwards, Hugging Face results."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anycore.contract.backend import Backend, Memory
from anycore.contract.batch import Batch
from anycore.contract.ops import Ops
from anycore.models import loader
from anycore.models.source import Source
from anycore.models.spec import ModelSpec, read_spec

CPU = torch.device("cpu")
BLOCK_SIZE = 4


class HostMemory(Memory):
    """Sizes are never asked for in these tests."""

    def total(self) -> int:
        return 2**40

    def free(self) -> int:
        return 2**40


def plain_backend() -> Backend:
    return Backend(CPU, HostMemory(CPU), Ops())


def spec_of(folder: Path, **options: Any) -> ModelSpec:
    return read_spec(Source(str(folder), folder), **options)


def load(folder: Path, dtype: str = "float32") -> loader.Model:
    source = Source(str(folder), folder)
    return loader.load(source, read_spec(source), plain_backend(), dtype)


def edit(folder: Path, name: str = "config.json", drop: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a JSON file, which is made if there is none."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    old = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({key: value for key, value in (old | changes).items() if key not in drop}))


def prompts(vocab: int, *lengths: int, seed: int = 0) -> list[list[int]]:
    """Random token ids; 0 to 4 are left out, because they may be padding."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, vocab, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def packed(model: loader.Model, texts: list[list[int]], types: list[list[int]] | None = None) -> list[Tensor]:
    """Hidden states of several texts in one batch without a KV cache."""
    lengths = [len(text) for text in texts]
    batch = Batch(
        input_ids=torch.tensor(list(chain.from_iterable(texts))),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        query_lens=lengths,
        context_lens=[0] * len(texts),
        output_rows=None,
        causal=model.spec.attention == "causal",
        token_types=None if types is None else torch.tensor(list(chain.from_iterable(types))),
    )
    return list(model.forward(batch).split(lengths))


@torch.inference_mode()
def paged(model: loader.Model, texts: list[list[int]], chunks: list[int]) -> list[Tensor]:
    """Hidden states of several texts computed in steps over a paged cache, blocks in shuffled order.

    Text i gets `chunks[i]` tokens a step until its last three, which follow one by one as decoding does.
    """
    backend = plain_backend()
    longest = max(map(len, texts))
    width = -(-longest // BLOCK_SIZE)
    order = 1 + torch.randperm(width * len(texts), generator=torch.Generator().manual_seed(7))
    tables = order.view(len(texts), width).int()
    cache = backend.memory.allocate_kv(model.spec.kv(BLOCK_SIZE, "float32"), 1 + width * len(texts))
    done = [0] * len(texts)
    parts: list[list[Tensor]] = [[] for _ in texts]
    while any(done[i] < len(text) for i, text in enumerate(texts)):
        rows = [i for i, text in enumerate(texts) if done[i] < len(text)]
        counts = [max(1, min(chunks[i], len(texts[i]) - 3 - done[i])) for i in rows]
        positions = [torch.arange(done[i], done[i] + n) for i, n in zip(rows, counts, strict=True)]
        slots = [
            tables[i].long()[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
            for i, p in zip(rows, positions, strict=True)
        ]
        batch = Batch(
            input_ids=torch.tensor(
                [t for i, n in zip(rows, counts, strict=True) for t in texts[i][done[i] : done[i] + n]]
            ),
            positions=torch.cat(positions),
            query_lens=counts,
            context_lens=[done[i] for i in rows],
            output_rows=None,
            causal=True,
            slots=torch.cat(slots),
            block_tables=tables[rows],
            kv=cache,
            block_size=BLOCK_SIZE,
        )
        for i, n, hidden in zip(rows, counts, model.forward(batch).split(counts), strict=True):
            parts[i].append(hidden)
            done[i] += n
    return [torch.cat(part) for part in parts]


@torch.inference_mode()
def theirs(model: Any, text: list[int], **inputs: Any) -> Any:
    """Hugging Face's output for one text."""
    return model(torch.tensor([text]), **inputs)


def gap(ours: Tensor, other: Tensor) -> float:
    """Largest absolute difference."""
    assert ours.shape == other.shape, (ours.shape, other.shape)
    return float((ours - other).abs().max())
