"""What the loader asks of a checkpoint, whatever its files are, and which reader opens which."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from anycore.contract.formats import Format
from anycore.contract.weights import QuantisedWeight
from anycore.models.source import Source


@dataclass(frozen=True, slots=True)
class Ordered:
    """A quantised matrix whose columns were put in another order, so that those of a group stand side by side.

    Its column j is column order[j] of the matrix that the checkpoint means: what is multiplied by it is reordered too.
    """

    weight: QuantisedWeight
    order: Tensor  # [in] int64, a permutation


Entry = Tensor | QuantisedWeight | Ordered
"""One logical tensor of a checkpoint."""


class Checkpoint(Protocol):
    """Where the loader's tensors come from: a folder of safetensors shards, or a GGUF file.

    Names are Hugging Face's ("model.layers.0.self_attn.q_proj.weight"; prefixes such as "model." may be there or not).
    A quantised matrix is one logical tensor, however many the files hold of it: its name ends with ".weight".
    Opening a checkpoint reads headers only and raises WeightsError for whatever is damaged in them.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Name to logical shape of every tensor, in the order in which reading is cheapest."""
        ...

    @property
    def formats(self) -> Mapping[str, Format]:
        """Name to format of every quantised matrix, as the headers have it: the others are dense."""
        ...

    def tensors(self) -> Iterator[tuple[str, Entry]]:
        """Yield (name, tensor on the host) once for each name of `shapes`, in its order.

        What `formats` names comes as a quantised weight of that format, of any `dtype`; everything else as a dense
        tensor, which may be a view of the file or be dequantised on the spot. Either stays as it is while others are
        asked for.
        """
        ...

    def file_of(self, name: str) -> str:
        """The file that holds a tensor, for messages."""
        ...


def open_checkpoint(source: Source, whole: bool = True) -> Checkpoint:
    """Open the weights of a located model, of which all will be read, or parts if not `whole`.

    Raises:
        WeightsError: they are damaged, or not what the model's small files say.
    """
    if source.gguf is None:
        from anycore.models.quantised.folder import open_folder

        return open_folder(source, ahead=whole)
    from anycore.models.gguf.weights import GgufCheckpoint

    return GgufCheckpoint(source.gguf)
