"""Which steps are measured: how many requests decode over how much, and which prompts come to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from anycore.contract.sizes import Limits
from anycore.errors import ConfigError

MARGIN = 64
"""Tokens of a sequence that are left for decoding while it is measured."""
SHORT, USUAL = 64, 1024
"""Contexts that are measured beside the longest one and a quarter of it."""

Chunks = tuple[tuple[int, int], ...]
"""Prompt chunks of a step: (tokens computed before, rows)."""


@dataclass(frozen=True, slots=True)
class Scene:
    """Requests that decode, over a context each, and the prompts that come to them one after the other."""

    decodes: int
    context: int
    arrivals: tuple[Chunks, ...] = ()


def scenes(limits: Limits) -> list[Scene]:
    """Numbers of requests by doubling, at a few contexts; prompts alone, several at once, and beside decodes."""
    budget, size = limits.max_num_batched_tokens, limits.block_size
    room = (limits.blocks - 1) * size
    longest = limits.max_model_len - MARGIN
    if longest < SHORT:
        raise ConfigError(f"--max-model-len must be at least {SHORT + MARGIN} to measure steps", param="max_model_len")
    contexts = sorted(c for c in {SHORT, USUAL, max(SHORT, longest // 4), longest} if c <= longest)
    found = []
    for decodes in doubling(1, limits.max_num_seqs):
        for context in contexts:
            if decodes * (context + MARGIN) > 0.9 * room:
                continue
            beside: tuple[Chunks, ...] = ()
            left = min(budget - decodes, longest, room - decodes * (context + MARGIN) - MARGIN)
            if context == contexts[0] and decodes < limits.max_num_seqs:
                beside = tuple(((0, rows),) for rows in doubling(16, left, 4))
            found.append(Scene(decodes, context, beside))
    most = min(budget, longest)
    alone: list[Chunks] = [((0, rows),) for rows in doubling(16, most)]
    for context in contexts[1:]:
        start = context // 2 // size * size
        alone += [((start, rows),) for rows in doubling(16, min(most, longest - start), 4)]
    for rows in (16, 64, 256):
        together = min(4, limits.max_num_seqs)
        if together * rows <= budget and rows <= longest:
            alone.append(((0, rows),) * together)
    return [*found, Scene(0, 0, tuple(alone))]


def doubling(first: int, last: int, times: int = 2) -> Sequence[int]:
    """`first`, so many times as much, and so on up to `last`, which is always there unless it is below `first`."""
    if last < first:
        return []
    found = [first]
    while found[-1] * times < last:
        found.append(found[-1] * times)
    return found if found[-1] == last else [*found, last]
