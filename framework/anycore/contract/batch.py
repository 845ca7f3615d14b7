"""What one step hands to the model and the backend: plain arrays, nothing about requests or policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor


@dataclass
class Batch:
    """T rows (tokens) of B requests, packed one request after the other.

    The runner fills every field but `plan` and `padding`. Lengths live on the host, because planners want them there;
    device copies are made on first use. Block 0 is scratch and belongs to nobody; every slot is in range.
    """

    input_ids: Tensor  # [T] int64, device
    positions: Tensor  # [T] int64, device: position of each row within its request
    query_lens: list[int]  # [B] host: rows of each request in this step; sums to T
    context_lens: list[int]  # [B] host: tokens of each request that were computed before this step
    output_rows: Tensor | None  # [R] int64, device: rows whose hidden states are wanted; None: all, in order
    causal: bool  # row t of a request attends to 0 … position(t); otherwise to all rows of its request
    slots: Tensor | None = None  # [T] int64, device: block * block_size + offset; None when there is no KV cache
    block_tables: Tensor | None = None  # [B, P] int32, device: padded with block 0
    kv: list[Any] | None = None  # one opaque handle a layer; None when there is no KV cache
    block_size: int = 0  # tokens per block; 0 when there is no KV cache
    token_types: Tensor | None = None  # [T] int64, device: segment ids of BERT-like encoders
    # Of a batch that only decodes: so many first tokens (a multiple of block_size) lie in the same blocks for all
    # requests and were computed before. A backend may read them once for all, or ignore this.
    shared_tokens: int = 0
    # Of a batch that only decodes: [B] int32, device: its requests, the longest first. Programs that start in this
    # order end together; None: nobody has sorted them.
    order: Tensor | None = None
    plan: Any = None  # the backend's own, from Ops.plan
    padding: int = 0  # rows computed beside these for nothing: whoever pads writes them here, and they are counted

    def wanted(self, x: Tensor) -> Tensor:
        """[T, ..] → [R, ..]: the rows of `output_rows`."""
        return x if self.output_rows is None else x.index_select(0, self.output_rows)

    @property
    def decode_only(self) -> bool:
        """Whether every request has exactly one row and a history: backends may take a shorter way."""
        return self.kv is not None and self.query_lens.count(1) == len(self.query_lens)

    @cached_property
    def seq_lens(self) -> list[int]:
        """[B] host: tokens of each request after this step."""
        return [c + q for c, q in zip(self.context_lens, self.query_lens, strict=True)]

    @cached_property
    def query_starts(self) -> list[int]:
        """[B + 1] host: first row of each request; the last entry is T."""
        return [0, *accumulate(self.query_lens)]

    @cached_property
    def seq_lens_device(self) -> Tensor:
        """[B] int32, device."""
        return torch.tensor(self.seq_lens, dtype=torch.int32, device=self.input_ids.device)

    @cached_property
    def query_starts_device(self) -> Tensor:
        """[B + 1] int32, device."""
        return torch.tensor(self.query_starts, dtype=torch.int32, device=self.input_ids.device)

    @cached_property
    def shared_tokens_device(self) -> Tensor:
        """[1] int32, device."""
        return torch.full((1,), self.shared_tokens, dtype=torch.int32, device=self.input_ids.device)


@dataclass
class Sampling:
    """How the R output rows of a step are sampled. A field that no row asks for is None, so its work is skipped.

    Per-row tensors are [R] on the device. Sparse edits are (row, id, value) triples: penalties and biases touch few
    of the V ids, so no [R, V] table is built on the host.
    """

    temperature: Tensor  # float32; 0 means greedy
    uniforms: Tensor  # Ops.draw_dtype in [0, 1): a draw a row, from (seed, position), so batch mates cannot change it
    top_k: Tensor | None = None  # int64; V means off
    top_p: Tensor | None = None  # float32; 1 means off
    min_p: Tensor | None = None  # float32; 0 means off
    penalties: Penalties | None = None
    bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows int64 [N], ids int64 [N], values float32 [N], added
    banned: tuple[Tensor, Tensor] | None = None  # rows, ids: probability 0 (min_tokens, allowed ids)
    masked: tuple[Tensor, Tensor] | None = None  # rows int64 [K], words int32 [K, ceil(V / 32)]: see `allowed`
    logprobs: int | None = None  # how many alternatives to report (0: only the sampled id); None: no logprobs at all
    all_greedy: bool = False  # host hint: every temperature is 0
    # Rows int64 [K] that want log-probabilities; None: all. What a backend reports of others is not read.
    reported: Tensor | None = None

    @property
    def filtered(self) -> bool:
        """Whether some ids may be left out of draws."""
        return not self.all_greedy and any(x is not None for x in (self.top_k, self.top_p, self.min_p))

    @property
    def edited(self) -> bool:
        """Whether logits are changed before an id is chosen."""
        return any(x is not None for x in (self.penalties, self.bias, self.banned, self.masked))


IN_PROMPT = 1 << 30
"""What an id of the prompt has in `Penalties.counts` beside the number of times it was generated."""


@dataclass
class Penalties:
    """Penalties of the rows in `rows` ([K] int64), each with what it has seen in a row of a table.

    The table is the sampler's, which keeps it up to date in place; operations only read it.
    """

    rows: Tensor
    counts: Tensor  # [S, V] int32: how often each id was generated, and IN_PROMPT for ids of the prompt
    places: Tensor  # [K] int64: rows of `counts`
    repetition: Tensor  # [K] float32, for ids in prompt or output; 1 means off
    presence: Tensor  # [K] float32; 0 means off
    frequency: Tensor  # [K] float32; 0 means off

    def parts(self, size: int) -> Iterator[Penalties]:
        """The same, `size` rows at a time."""
        names = ("rows", "places", "repetition", "presence", "frequency")
        for columns in zip(*(getattr(self, name).split(size) for name in names), strict=True):
            yield replace(self, **dict(zip(names, columns, strict=True)))


@dataclass
class Samples:
    """What sampling a step gives back, on the device. N = number of alternatives asked for."""

    ids: Tensor  # [R] int64
    finite: Tensor  # [R] bool: False where the row's logits held NaN or only -inf
    logprobs: Tensor | None = None  # [R] float32 of the sampled id, before any processing ("raw")
    ranks: Tensor | None = None  # [R] int64: 1 for the most likely id
    top_ids: Tensor | None = None  # [R, N] int64
    top_logprobs: Tensor | None = None  # [R, N] float32
    # [2, R or more] int64: ids and finite once more, from a backend that has them side by side to travel as one.
    together: Tensor | None = None
