"""From hidden rows to vectors and scores: what embed and rerank do with the last hidden state."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from anycore.engine.request import PoolingParams
from anycore.models.spec import ModelSpec

EPSILON = 1e-12
"""Vectors are divided by max(norm, EPSILON), as sentence-transformers does."""


def finish_vector(vector: NDArray[np.float32], spec: ModelSpec, params: PoolingParams) -> NDArray[np.float32]:
    """Cut a pooled vector [H] to the dimensions asked for, then normalise it if the model or the request says so."""
    vector = vector[: params.dimensions or spec.usual_vector_size]
    normalize = params.normalize
    if normalize is None:
        normalize = spec.pooling.normalize if spec.pooling else True
    if normalize:
        wide = vector.astype(np.float64)
        vector = (wide / max(math.sqrt(wide @ wide), EPSILON)).astype(np.float32)
    return np.ascontiguousarray(vector, dtype="<f4")


def finish_scores(logits: NDArray[np.float32], spec: ModelSpec, params: PoolingParams) -> list[float]:
    """Turn a request's label logits into scores.

    "yes_no" logits are (no, yes): softmax over the two, which is sigmoid(yes - no). A classifier's activation comes
    from its files.
    """
    assert spec.score is not None
    wide = logits.astype(np.float64)
    if spec.score.kind == "yes_no":
        difference = wide[1] - wide[0]
        raw = params.raw_scores or spec.score.activation == "identity"
        return [float(difference if raw else _sigmoid(difference))]
    return activated(wide, "identity" if params.raw_scores else spec.score.activation)


def comparable(spec: ModelSpec) -> PoolingParams:
    """How vectors are asked for whose `similarity` is wanted."""
    cosine = spec.pooling is None or spec.pooling.similarity == "cosine"
    return PoolingParams(normalize=True if cosine else None)


def similarity(one: NDArray[np.float32], other: NDArray[np.float32], spec: ModelSpec) -> float:
    """How alike two `comparable` vectors are, as the model's files measure it: more is more, distances are below 0."""
    kind = spec.pooling.similarity if spec.pooling is not None else "cosine"
    first, second = one.astype(np.float64), other.astype(np.float64)
    if kind in ("cosine", "dot"):
        return float(first @ second)
    difference = first - second
    return -float(np.abs(difference).sum() if kind == "manhattan" else np.sqrt(difference @ difference))


def activated(logits: NDArray[np.float64], kind: str) -> list[float]:
    """Apply "identity", "softmax" over all, or "sigmoid" to each."""
    if kind == "softmax":
        powers = np.exp(logits - logits.max())
        return [float(x) for x in powers / powers.sum()]
    return [float(x if kind == "identity" else _sigmoid(x)) for x in logits]


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return float(1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x)))
