"""Sampling in plain torch: the default of `Ops.sample`.

Order, the same as in Hugging Face transformers: penalties, bias, bans, masks, temperature, top-k, top-p, min-p, draw.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from anycore.contract.batch import IN_PROMPT, Penalties, Samples, Sampling
from anycore.contract.costs import SAMPLED_ROWS

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them only overflows."""


def sample(logits: Tensor, params: Sampling) -> Samples:
    """Choose one id a row from logits [R, V] float32 (overwritten). The draw depends on the row alone."""
    finite = row_is_finite(logits)
    raw = raw_of(logits, params)
    adjust(logits, params)
    ids = logits.argmax(-1) if params.all_greedy else draw(logits, params)
    samples = Samples(ids=ids, finite=finite)
    if raw is not None and params.logprobs is not None:
        samples.logprobs, samples.ranks, samples.top_ids, samples.top_logprobs = report(raw, ids, params.logprobs)
    return samples


def raw_of(logits: Tensor, params: Sampling) -> Tensor | None:
    """The logits that log-probabilities are of, out of the way of `adjust`; None if nobody wants any."""
    if params.logprobs is None:
        return None
    return logits.clone() if params.edited else logits


def row_is_finite(logits: Tensor) -> Tensor:
    """[R] bool: False where a row holds NaN or +inf, or nothing but -inf."""
    return torch.isfinite(logits.max(dim=-1).values)


def adjust(logits: Tensor, params: Sampling) -> None:
    """Apply penalties, bias and bans in place."""
    if params.penalties is not None:
        for part in params.penalties.parts(SAMPLED_ROWS):
            logits[part.rows] = penalised(logits[part.rows], part)
    if params.bias is not None:
        rows, ids, values = params.bias
        logits.index_put_((rows, ids), values, accumulate=True)
    if params.banned is not None:
        logits.index_put_(params.banned, torch.tensor(float("-inf"), device=logits.device))
    if params.masked is not None:
        constrain(logits, *params.masked)


def constrain(logits: Tensor, rows: Tensor, words: Tensor) -> None:
    """Leave rows [K] of logits [R, V] only the ids that words [K, ceil(V / 32)] allow, in place."""
    logits[rows] = logits[rows].masked_fill_(~allowed(words, logits.shape[1]), float("-inf"))


def allowed(words: Tensor, vocab: int) -> Tensor:
    """[K, ceil(V / 32)] int32 → [K, V] bool: bit b of word w stands for id 32 w + b."""
    octets = words.view(torch.uint8).long()  # the low ones first, as hosts and devices of this field store them
    return _bits(words.device)[octets].flatten(1)[:, :vocab]


@cache
def _bits(device: torch.device) -> Tensor:
    """[256, 8] bool: the bits of every octet, the low ones first."""
    octets = torch.arange(256, device=device)
    return (octets[:, None] >> torch.arange(8, device=device) & 1).bool()


def penalised(logits: Tensor, p: Penalties) -> Tensor:
    """[K, V] → [K, V]. Repetition divides positive and multiplies negative logits (Keskar et al., 2019, as in
    transformers) of ids in prompt or output; presence and frequency count generated ids only (OpenAI's formula).
    """
    counts = p.counts[p.places]
    generated = counts & (IN_PROMPT - 1)
    factor = p.repetition[:, None]
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    logits = torch.where(counts > 0, repeated, logits)
    logits = logits - p.frequency[:, None] * generated
    return logits - p.presence[:, None] * (generated > 0)


def draw(logits: Tensor, params: Sampling) -> Tensor:
    """[R, V] → [R]: inverse of the cumulative distribution at `uniforms`, or the maximum where greedy."""
    parts = []
    for start in range(0, len(logits), SAMPLED_ROWS):
        rows = slice(start, start + SAMPLED_ROWS)
        filters = [None if x is None else x[rows] for x in (params.top_k, params.top_p, params.min_p)]
        parts.append(_draw(logits[rows], params.temperature[rows], params.uniforms[rows], *filters))
    return torch.cat(parts)


def _draw(
    logits: Tensor,
    temperature: Tensor,
    uniforms: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    greedy = temperature < GREEDY_BELOW
    best = logits.argmax(-1)
    scaled = logits / torch.where(greedy, 1.0, temperature)[:, None]
    probs = filtered(scaled, top_k, top_p, min_p).to(uniforms.dtype)
    edges = probs.cumsum(-1)
    # The draw is strictly below the total, so the id found has a probability above 0.
    target = uniforms * edges[:, -1]
    ids = torch.searchsorted(edges, target[:, None], right=True)[:, 0].clamp_(max=logits.shape[-1] - 1)
    # Rounding may leave the draw on a dead tail (probability 0): fall back to the most likely id.
    alive = probs.gather(1, ids[:, None])[:, 0] > 0
    return torch.where(greedy | ~alive, best, ids)


def filtered(scaled: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """[R, V] scaled logits → [R, V] probabilities that are 0 for what top-k, top-p and min-p leave out.

    At least one id always stays. A top-p of 0 keeps the most likely id alone.
    """
    if top_k is not None or top_p is not None:
        ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
        keep = torch.ones_like(ranked, dtype=torch.bool)
        if top_k is not None:
            keep &= torch.arange(ranked.shape[-1], device=ranked.device) < top_k[:, None]
        if top_p is not None:
            probs = ranked.masked_fill(~keep, float("-inf")).softmax(-1)
            before = probs.cumsum(-1) - probs  # mass of the more likely ids
            keep &= before < top_p[:, None]
        keep[:, 0] = True
        scaled = scaled.masked_fill(~torch.empty_like(keep).scatter_(1, order, keep), float("-inf"))
    probs = scaled.softmax(-1)
    if min_p is not None:
        probs = probs.masked_fill(probs < min_p[:, None] * probs.max(-1, keepdim=True).values, 0.0)
    return probs


def report(
    raw: Tensor, ids: Tensor, count: int, normaliser: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return logprob and rank of `ids` [R] by logits `raw` [R, V], and the `count` most likely ids.

    `normaliser` [R] is the logarithm of each row's sum of exponents, where it is known.
    """
    if normaliser is None:
        normaliser = torch.cat([part.logsumexp(-1) for part in torch.split(raw, SAMPLED_ROWS)])
    chosen = raw.gather(1, ids[:, None])
    ranks = (raw > chosen).sum(-1) + 1
    logprobs = chosen[:, 0] - normaliser
    if count == 0:
        return logprobs, ranks, None, None
    top = raw.topk(min(count, raw.shape[-1]), dim=-1)
    return logprobs, ranks, top.indices, top.values - normaliser[:, None]
