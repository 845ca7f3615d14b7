"""How a checkpoint says that its weights are quantised. Read before any weight, so that plans are exact. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anycore.errors import Unsupported
from anycore.models.quantization import Stored

if TYPE_CHECKING:
    from anycore.models.source import Source
    from anycore.models.spec import ModelSpec


def stored(source: Source, config: dict[str, Any], spec: ModelSpec) -> Stored | None:
    """Return the formats that a checkpoint's weights have; None where they are dense.

    Raises:
        Unsupported: they are quantised by a method that nothing here reads.
    """
    wanted = config.get("quantization_config")
    if not wanted:
        return None
    method = wanted.get("quant_method", "an unnamed method")
    raise Unsupported(f"the checkpoint is quantised ({method}), which is not supported: use the unquantised one")
