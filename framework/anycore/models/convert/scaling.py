"""Scales between matrices and what makes their inputs, such that both are hurt little by rounding.

Inputs that are large are scaled up in a matrix of 4 bits, so that rounding hurts them less (Lin et al., "AWQ:
Activation-aware Weight Quantization", 2023), or in one of 8 bits, so that they hide the small ones less when they are
rounded themselves (Xiao et al., "SmoothQuant", 2022); and down in the norm or the matrix that makes them. The product
is the same. How much is searched for, matrix by matrix.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from anycore.contract.formats import Format
from anycore.models.convert.products import Inputs, Product, eight_bits
from anycore.models.quantised.rounding import quantise

EXPONENTS = tuple(i / 10 for i in range(1, 11))
"""Powers of an input's size that are tried."""


def search(product: Product, inputs: Inputs, wanted: Format) -> Tensor | None:
    """The scale of each row of the makers whose change of the product is least; None: as they are."""
    if not product.makers:
        return None
    rows, weight = torch.cat(inputs.some), product.held.weight
    exact = rows @ weight.T
    sizes = exact.pow(2).mean(-1, keepdim=True)
    counts = 1 / (sizes + sizes.median())  # a token with a large product makes the next layers heed its errors less
    best, least = None, float("inf")
    for scale in candidates(product, inputs, wanted.kind):
        columns = product.columns(scale)
        rounded = quantise(weight * columns, wanted).dense()
        scaled = rows / columns
        scaled = eight_bits(scaled, wanted.group) if wanted.kind == "int8" else scaled
        loss = float(((scaled @ rounded.T - exact).pow(2) * counts).mean())
        if loss < least:
            best, least = scale, loss
    return best


def candidates(product: Product, inputs: Inputs, kind: str) -> Iterator[Tensor]:
    """Powers of how large the inputs are; the first is 1."""
    mean = product.rows(inputs.sizes / inputs.count)
    yield torch.ones_like(mean)
    for size in (mean, product.rows(inputs.largest)) if kind == "int8" else (mean,):
        for exponent in EXPONENTS[1::2] if kind == "int8" else EXPONENTS:
            scale = size.clamp(min=1e-4) ** exponent
            yield scale / (scale.max() * scale.min()).sqrt()


def fold(product: Product, scale: Tensor) -> None:
    """Multiply the matrix's columns in place, and divide what makes its inputs."""
    product.held.weight *= product.columns(scale)
    for _, maker in product.makers:
        maker /= scale[:, None] if maker.dim() == 2 else scale
