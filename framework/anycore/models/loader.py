"""From a located model to a running one: every parameter loaded or tied, nothing damaged, nothing left as it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from torch import Tensor


class Checkpoint(Protocol):
    """Where the loader's tensors come from: a folder of safetensors shards, or a GGUF file.

    Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight"; prefixes such as "model." may be there or not).
    Opening a checkpoint reads headers only and raises WeightsError for whatever is damaged in them.
    """

    shapes: Mapping[str, tuple[int, ...]]
    """Name to shape of every tensor, in the order in which reading is cheapest."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, host tensor) once for each name of `shapes`, in its order.

        A tensor may be a view of the file or be dequantised on the spot: the loader copies it before it asks for the
        next one.
        """
        ...

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...
