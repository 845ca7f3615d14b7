"""From requests to the tensors that `Ops.sample` takes, and the state that penalties need between steps.

Every draw is a function of (seed, sequence, position) alone, so batch mates, chunking and preemption cannot change it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from anycore.contract.backend import Memory
from anycore.contract.batch import IN_PROMPT, Penalties, Samples, Sampling
from anycore.contract.desk import Desk
from anycore.contract.sampling import GREEDY_BELOW
from anycore.engine.decodes import Array
from anycore.engine.grammar import GrammarState
from anycore.engine.masks import Masks
from anycore.engine.request import SamplingParams
from anycore.engine.sequence import Request

LOW_64 = 2**64 - 1
"""Keeps of Python's integers what a word holds."""

AHEAD = 32
"""Draws are made for so many steps at a time, at most: for a few rows that takes hardly longer than for one step."""


@dataclass
class SamplerState:
    """What sampling keeps of one sequence. Tensors live on the device and are made only if a parameter needs them."""

    numbers: tuple[float, float, float, float]  # temperature, top_k, top_p, min_p
    seed: int  # of the request and the sequence, mixed
    plain: bool  # nothing but these matters
    forbidden: Tensor | None = None  # int64 ids outside allowed_token_ids


Words = np.ndarray[Any, np.dtype[np.uint64]]


def mixed(z: Words) -> Words:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the result depends on every bit of z."""
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: Words = z ^ (z >> np.uint64(31))
    return out


def mixed_seeds(sequences: list[tuple[int, int]]) -> Words:
    """First round: a word for each (seed, index of the sequence)."""
    words = [(seed + (index + 1) * 0xD1B54A32D192ED03) & LOW_64 for seed, index in sequences]
    return mixed(np.array(words, dtype=np.uint64))


def draws(seeds: Words, positions: Words) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Second round: mixed seeds and positions [R] → numbers in [0, 1)."""
    z = mixed(seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    numbers: np.ndarray[Any, np.dtype[np.float64]] = (z >> np.uint64(11)) / 2.0**53
    return numbers


@dataclass
class Group:
    """The rows of a step and what does not change while the same requests are sampled."""

    seats: Array  # [R]: of their requests
    sampling: Sampling
    plain: bool  # all of them are
    lasts: float  # further steps in which only the draws change
    draws: np.ndarray[Any, Any]  # [steps, R]: of the next steps
    held: dict[int, GrammarState]  # of rows that keep to a grammar, whose masks change with every step
    drawn: int = 0  # of these steps


class Sampler:
    """Builds `Sampling` for a step's rows. `vocab` is the number of logits a row has.

    What it knows of a request it keeps by its seat: a step that goes on with others looks at no request one by one.
    """

    def __init__(
        self,
        vocab: int,
        device: torch.device,
        memory: Memory | None = None,
        draw_dtype: torch.dtype = torch.float64,
        seats: int = 1,
        desk: Desk | None = None,
    ) -> None:
        """`seats` is the most requests that run at a time. If there is a desk, temperatures and draws are laid on it,
        to be on the device once it was sent.
        """
        self.vocab = vocab
        self.device = device
        self.draw_dtype = draw_dtype
        self.memory = memory or Memory(device)
        self.desk = desk
        self._group: Group | None = None
        self._masks = Masks(vocab, seats, self.memory)
        self._numbers = np.zeros((seats, 4))  # of each seat, as in `SamplerState`
        self._seeds = np.zeros(seats, dtype=np.uint64)
        self._plain = np.zeros(seats, dtype=np.bool_)
        self._places = np.zeros(seats, dtype=np.uint64)  # of the token sampled next, within the output
        self._owners: list[Request | None] = [None] * seats  # whose they are
        self._counts: Tensor | None = None  # [seats, V], see `Penalties`; made when first needed
        self._counted: list[Request | None] = [None] * seats  # whose tokens each row counts

    def seat(self, request: Request, place: int) -> None:
        """Take note of a request before its first step in a seat, and of one that is not sampled in every step:
        `place` is that of the token which is sampled next, within the output, from 1 on.
        """
        seat = request.seat
        self._places[seat] = place
        if self._owners[seat] is not request:
            state = self._state(request)
            self._numbers[seat], self._seeds[seat], self._plain[seat] = state.numbers, state.seed, state.plain
            self._owners[seat] = request
            self._group = None

    def prepare(self, requests: list[Request], seats: Array) -> Sampling:
        """One row a request, in order. While requests stay the same, only their draws are made and sent anew."""
        group = self._group
        if group is not None and group.lasts > 0 and np.array_equal(group.seats, seats):
            group.lasts -= 1
        else:
            group = self._group = self._new_group(requests, seats)
        places = self._places[group.seats]
        self._places[group.seats] += np.uint64(1)
        if not group.sampling.all_greedy:
            uniforms = self._draws(group, places)
            if self.desk is not None:
                self.desk.lay("uniforms", uniforms)
            else:
                group.sampling = replace(group.sampling, uniforms=self.memory.upload(torch.from_numpy(uniforms)))
        return group.sampling

    @property
    def is_plain(self) -> bool:
        """Whether the rows of the last step prepared ask for nothing but temperatures and filters."""
        return self._group is None or self._group.plain

    def _draws(self, group: Group, places: Words) -> np.ndarray[Any, Any]:
        """In the device's type for them. What rounding would make 1 stays below it."""
        if group.drawn == len(group.draws):
            steps = np.arange(min(max(1, 2 * group.drawn), AHEAD), dtype=np.uint64)
            group.draws, group.drawn = draws(self._seeds[group.seats], places + steps[:, None]), 0
            if self.draw_dtype == torch.float32:
                below = np.nextafter(np.float32(1), np.float32(0))
                group.draws = np.minimum(group.draws.astype(np.float32), below)
        group.drawn += 1
        row: np.ndarray[Any, Any] = group.draws[group.drawn - 1]
        return row

    def _new_group(self, requests: list[Request], seats: Array) -> Group:
        sampling = self._sampling(self._numbers[seats])
        lasts = math.inf
        plain = bool(self._plain[seats].all())
        held: dict[int, GrammarState] = {}
        if not plain:
            held = {row: request.grammar for row, request in enumerate(requests) if request.grammar is not None}
            sampling = self._extras(requests, list(held), sampling)
            lasts = min(map(_lasts, requests))
        return Group(seats, sampling, plain, lasts, np.zeros((0, len(seats))), held)

    def _sampling(self, numbers: np.ndarray[Any, Any]) -> Sampling:
        """What every row has: temperature, and the filters that any row asks for."""
        temperature, top_k, top_p, min_p = numbers.T
        greedy = bool((temperature < GREEDY_BELOW).all())
        arrays = {} if self.desk is not None else {"temperature": temperature.astype(np.float32)}
        if not greedy and (top_k < self.vocab).any():
            arrays["top_k"] = top_k.astype(np.int64)
        if (top_p < 1).any():
            arrays["top_p"] = top_p.astype(np.float32)
        if (min_p > 0).any():
            arrays["min_p"] = min_p.astype(np.float32)
        sent = dict(zip(arrays, self.memory.upload_all(list(map(torch.from_numpy, arrays.values()))), strict=True))
        if self.desk is not None:
            sent["temperature"] = self.desk.lay("temperature", temperature)
            uniforms = self.desk.view("uniforms", len(numbers))
        else:
            uniforms = torch.zeros(len(numbers), dtype=self.draw_dtype, device=self.device)
        return Sampling(
            temperature=sent["temperature"],
            uniforms=uniforms,
            top_k=sent.get("top_k"),
            top_p=sent.get("top_p"),
            min_p=sent.get("min_p"),
            all_greedy=greedy,
        )

    def _extras(self, requests: list[Request], held: list[int], sampling: Sampling) -> Sampling:
        """What few rows have: penalties, ids made more or less likely, log-probabilities. Those `held` have masks."""
        params = [request.sampling for request in requests]
        wanted = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        return replace(
            sampling,
            penalties=self._penalties(requests, params),
            bias=self._bias(params),
            banned=self._banned(requests, params),
            masked=self._masked(held),
            logprobs=max(wanted.values()) if wanted else None,
            reported=self._longs(list(wanted)) if 0 < len(wanted) < len(params) else None,
        )

    def edits(self, requests: list[Request]) -> Sampling:
        """Penalties, biases and bans alone, for some of the requests of the step that `prepare` was called for."""
        params = [request.sampling for request in requests]
        none = torch.zeros(0, device=self.device)
        return Sampling(
            temperature=none,
            uniforms=none,
            penalties=self._penalties(requests, params),
            bias=self._bias(params),
            banned=self._banned(requests, params),
        )

    def _masked(self, rows: list[int]) -> tuple[Tensor, Tensor] | None:
        """Room for the masks of rows that keep to a grammar."""
        return (self._longs(rows), self._masks.room(len(rows))) if rows else None

    def start_masks(self) -> None:
        """Begin to make the masks of the step that `prepare` was called for, if any of its rows keeps to a grammar."""
        if self._group is not None and self._group.held:
            self._masks.start(list(self._group.held.values()))

    def settle(self) -> None:
        """Wait for these masks, and bring them where the step's sampling looks."""
        self._masks.settle()

    def take(self, ids: Callable[[], list[int]]) -> Future[None] | None:
        """Move grammars on by what the step was sampled that `prepare` was called for. `ids`, which is called on
        another thread, waits for one of each row. None if no row keeps to a grammar.
        """
        if self._group is None or not self._group.held:
            return None
        rows, states = list(self._group.held), list(self._group.held.values())

        def tokens() -> list[int]:
            every = ids()
            return [every[row] for row in rows]

        return self._masks.take(states, tokens)

    def observe(self, requests: list[Request], samples: Samples) -> None:
        """Count what was sampled, on the device and without waiting for it."""
        if self._group is None or self._group.sampling.penalties is None:
            return
        penalties = self._group.sampling.penalties
        at = penalties.places * self.vocab + samples.ids[penalties.rows]
        penalties.counts.view(-1).index_add_(0, at, torch.ones_like(at, dtype=torch.int32))

    def _penalties(self, requests: list[Request], params: list[SamplingParams]) -> Penalties | None:
        rows = [i for i, p in enumerate(params) if _is_penalised(p)]
        if not rows:
            return None
        if self._counts is None:
            shape = len(self._counted), self.vocab
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
        for i in rows:
            self._count(requests[i], self._counts)
        chosen = [params[i] for i in rows]
        return Penalties(
            rows=self._longs(rows),
            counts=self._counts,
            places=self._longs([requests[i].seat for i in rows]),
            repetition=self._floats([p.repetition_penalty for p in chosen]),
            presence=self._floats([p.presence_penalty for p in chosen]),
            frequency=self._floats([p.frequency_penalty for p in chosen]),
        )

    def _count(self, request: Request, counts: Tensor) -> None:
        """Count the sequence's tokens in the row of its seat, at its first sample there; `observe` goes on."""
        if self._counted[request.seat] is request:
            return
        self._counted[request.seat] = request
        row, tokens = counts[request.seat], request.tokens
        count = _count_here if row.is_cpu else self._count_there
        count(row, tokens[: request.num_prompt], tokens[request.num_prompt :])

    def _count_there(self, row: Tensor, prompt: array[int], output: array[int]) -> None:
        row.copy_(torch.bincount(self._longs(output.tolist()), minlength=self.vocab))
        row[self._longs(sorted(set(prompt)))] += IN_PROMPT

    def _bias(self, params: list[SamplingParams]) -> tuple[Tensor, Tensor, Tensor] | None:
        triples = [(row, i, value) for row, p in enumerate(params) for i, value in p.logit_bias.items()]
        if not triples:
            return None
        rows, ids, values = zip(*triples, strict=True)
        return self._longs(rows), self._longs(ids), self._floats(values)

    def _banned(self, requests: list[Request], params: list[SamplingParams]) -> tuple[Tensor, Tensor] | None:
        parts = []
        for row, (request, p) in enumerate(zip(requests, params, strict=True)):
            ids = []
            if request.num_output <= p.min_tokens:  # counts the token about to be sampled
                ids += [i for i in (*request.eos_ids, *p.stop_token_ids) if i < self.vocab]
            ids += [word[-1] for word in p.bad_words_ids if _completes(word, request)]
            if ids:
                parts.append((row, self._longs(ids)))
            if p.allowed_token_ids is not None:
                parts.append((row, self._forbidden(request, p.allowed_token_ids)))
        if not parts:
            return None
        rows = torch.cat([torch.full_like(ids, row) for row, ids in parts])
        return rows, torch.cat([ids for _, ids in parts])

    def _forbidden(self, request: Request, allowed: tuple[int, ...]) -> Tensor:
        state = self._state(request)
        if state.forbidden is None:
            mask = torch.ones(self.vocab, dtype=torch.bool, device=self.device)
            mask[self._longs(allowed)] = False
            state.forbidden = mask.nonzero()[:, 0]
        return state.forbidden

    def _state(self, request: Request) -> SamplerState:
        if request.sampler is None:
            request.sampler = self._new_state(request)
        state: SamplerState = request.sampler
        return state

    def _new_state(self, request: Request) -> SamplerState:
        p = request.sampling
        top_k = min(p.top_k, self.vocab) if p.top_k > 0 else self.vocab
        edits = p.logit_bias or p.bad_words_ids or p.min_tokens or p.allowed_token_ids is not None or p.grammar
        return SamplerState(
            numbers=(p.temperature, top_k, p.top_p, p.min_p),
            seed=int(mixed_seeds([(request.seed, request.index)])[0]),
            plain=not (_is_penalised(p) or edits or p.logprobs is not None or request.search is not None),
        )

    def _floats(self, values: list[float] | tuple[float, ...]) -> Tensor:
        return self.memory.upload(torch.tensor(values, dtype=torch.float32))

    def _longs(self, values: list[int] | tuple[int, ...]) -> Tensor:
        return self.memory.upload(torch.tensor(values, dtype=torch.int64))


def _count_here(row: Tensor, prompt: array[int], output: array[int]) -> None:
    """The same in the host's memory. For so many ids torch would wake threads of its own, one of which then looks for
    work on a core of ours for 4 ms.
    """
    seen = row.numpy()
    seen[:] = np.bincount(output, minlength=len(seen))
    seen[np.unique(prompt)] += IN_PROMPT


def _is_penalised(p: SamplingParams) -> bool:
    return p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0


def _lasts(request: Request) -> float:
    """For how many further steps the request's bans stay what they are, which is up to its least tokens.

    Those that depend on its last tokens, as words do, change with every step.
    """
    p = request.sampling
    if p.bad_words_ids:
        return 0
    return p.min_tokens - request.num_output if p.min_tokens >= request.num_output else math.inf


def _completes(word: tuple[int, ...], request: Request) -> bool:
    """Whether the next token could complete this bad word. All tokens are known: such requests need the host."""
    before = list(word[:-1])
    return not before or request.tokens[request.num_prompt :].tolist()[-len(before) :] == before
