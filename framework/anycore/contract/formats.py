"""How weights and KV caches are held, as plain numbers: what plans count and loaders make. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

SCHEMES = {
    "w8a8": "int8 weights with a scale a row; what they multiply is rounded to int8, too, a scale a token",
    "w4a16": "4-bit weights with a scale and a zero point a group of 32, 64 or 128 inputs",
    "fp8": "e4m3 weights with a scale a row; where the chip multiplies e4m3, a token's values are rounded to it, too",
    "gguf": "4- and 8-bit weights with scales a group of 16 or 32 inputs, as GGUF files bring them",
}
"""Quantised weights a row of the matrix may say it multiplies by as they are, without making them dense."""

KV_CACHES = {
    "int8": "a byte a number, whole numbers up to 127 times a scale for each token and KV head",
    "fp8": "a byte a number, e4m3 up to 448 times a scale for each token and KV head",
}
"""Rounded KV caches that a row of the matrix may say it stores and reads."""

KV_SCALE_BYTES = 2
"""Of a scale in a rounded KV cache: bfloat16."""


@dataclass(frozen=True, slots=True)
class Format:
    """One matrix's: "int8", "int4" or "fp8", and how many consecutive inputs of a row share a scale (0: all)."""

    kind: str
    group: int = 0

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix [rows, columns].

        A scale a row is float32. A group has a 16-bit scale, and where it is of 4 bits a 16-bit zero point. A backend's
        layout may pad, but may not take more otherwise.
        """
        elements = rows * (ceil(columns / 2) if self.kind == "int4" else columns)
        if not self.group:
            return elements + 4 * rows
        return elements + rows * ceil(columns / self.group) * (4 if self.kind == "int4" else 2)
