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
    if params.dimensions is not None:
        vector = vector[: params.dimensions]
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
        return [float(difference if params.raw_scores else _sigmoid(difference))]
    return activated(wide, "identity" if params.raw_scores else spec.score.activation)


def activated(logits: NDArray[np.float64], kind: str) -> list[float]:
    """Apply "identity", "softmax" over all, or "sigmoid" to each."""
    if kind == "softmax":
        powers = np.exp(logits - logits.max())
        return [float(x) for x in powers / powers.sum()]
    return [float(x if kind == "identity" else _sigmoid(x)) for x in logits]


def _sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return float(1 / (1 + np.exp(-x)) if x >= 0 else np.exp(x) / (1 + np.exp(x)))
