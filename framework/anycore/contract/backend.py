"""A live backend: a device, its memory and its operations. Subclass, override what you can do better."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anycore.contract.batch import Batch, Samples, Sampling
from anycore.contract.collective import Group
from anycore.contract.ops import Ops
from anycore.contract.rounded import TYPES, RoundedCache
from anycore.contract.sizes import KVSpec, Limits

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

__all__ = [
    "Backend",
    "Download",
    "Forward",
    "KVSpec",
    "Limits",
    "Memory",
    "ModelFiles",
    "Peak",
    "StepFn",
    "StepOutput",
    "WholeStep",
]


Download = Callable[[], "list[Tensor]"]
"""Waits for a transfer to the host and returns what it brought."""


@dataclass
class Peak:
    """Highest memory use seen inside a `Memory.peak()` block, above the use at its start, in bytes."""

    bytes: int = 0


class Memory:
    """The device's memory. All sizes in bytes."""

    typed = True  # a buffer is read as one data type only: some devices note a storage's and refuse to read another

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def total(self) -> int:
        """Bytes this process could ever use (a container's limit counts, not the host's)."""
        raise NotImplementedError

    def free(self) -> int:
        """Bytes that can be allocated now, with what other processes hold already taken off."""
        raise NotImplementedError

    def held(self) -> int | None:
        """Bytes that this process's tensors hold on the device now. The default knows nothing: None."""
        return None

    @contextmanager
    def peak(self) -> Iterator[Peak]:
        """Measure the highest use inside the block. The default knows nothing and reports 0."""
        yield Peak()

    def block_bytes(self, kv: KVSpec) -> int:
        """Bytes one block takes over all layers, padding of the backend's layout included."""
        return kv.bytes_per_token * kv.block_size

    def allocate_kv(self, kv: KVSpec, blocks: int) -> list[Any]:
        """Return one opaque handle a layer. Block 0 is scratch: rows that belong to nobody are stored there.

        The default handle is a tensor [2, blocks, block_size, kv_heads, head_dim] (K, then V), or a `RoundedCache` of
        such a one if `kv.rounded`, which only a backend is asked for whose table names that format.
        """
        shape = (2, blocks, kv.block_size, kv.kv_heads, kv.head_dim)
        if kv.rounded is None:
            dtype = getattr(torch, kv.dtype)
            return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(kv.layers)]
        return [
            RoundedCache(
                torch.zeros(shape, dtype=TYPES[kv.rounded], device=self.device),
                torch.zeros(shape[:-1], dtype=torch.bfloat16, device=self.device),
            )
            for _ in range(kv.layers)
        ]

    def upload(self, host: Tensor) -> Tensor:
        """Copy a host tensor to the device. May return before the copy ends; `host` must not be written again."""
        return host.to(self.device, non_blocking=True)

    def upload_all(self, hosts: Sequence[Tensor]) -> list[Tensor]:
        """`upload` of several small tensors, which a backend may make one transfer."""
        return [self.upload(host) for host in hosts]

    def renew(self, there: Tensor, here: Tensor) -> None:
        """Copy a host tensor over one on the device, in order with what is launched; `here` may be written at once."""
        there.copy_(here)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begin to copy tensors to the host; what is returned waits for these copies only and gives them.

        Work that is launched afterwards is not waited for, and may overwrite the tensors.
        """
        kept = [tensor.clone() for tensor in tensors]
        return lambda: [tensor.cpu() for tensor in kept]


@dataclass
class StepOutput:
    """What a step leaves on the device: samples when it sampled, else the wanted hidden rows."""

    rows: Tensor  # [R, H] hidden states of `batch.output_rows`, after the final norm
    samples: Samples | None = None


StepFn = Callable[[Batch, "Sampling | None"], StepOutput]
"""One whole step: embedding, layers, output rows and, if `Sampling` is given, logits and sampling.

What it leaves on the device may be overwritten by the next step.
"""


@dataclass(frozen=True)
class WholeStep:
    """The step function that backends are given. Its parts are there for those that treat them apart."""

    forward: Callable[[Batch], Tensor]  # hidden rows of `batch.output_rows`, the sampled ones first
    sample: Callable[[Tensor, Sampling], Samples]  # from sampled rows: logits, then ids

    def __call__(self, batch: Batch, sampling: Sampling | None) -> StepOutput:
        rows = self.forward(batch)
        if sampling is None:
            return StepOutput(rows)
        return StepOutput(rows, self.sample(rows[: len(sampling.temperature)], sampling))


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model as it lies on disk, for a backend that runs whole models instead of operations."""

    folder: Path  # config.json, weights, and what other formats came with them
    file: Path | None  # a GGUF file, which is then all there is
    architecture: str  # Hugging Face name
    dtype: str  # the row of the table that was chosen
    labels: int  # so many logits a request by the checkpoint's own head; 0: hidden rows are wanted
    token_types: bool  # batches carry segment ids
    pad_id: int  # an id for places that hold no token
    cache: Path  # the folder that a backend may keep a folder of its own in; may not exist yet
    progress: Callable[[str, float], None]  # told the name of a phase and how far it is, 0 to 1


Forward = Callable[[Batch], Tensor]
"""A whole model: the last hidden rows [T, H] of a batch, or logits [B, labels] of its requests, on `Backend.device`."""


class Backend:
    """A device that is open. The defaults make any torch device right, not fast."""

    name: str
    collective: str | None = None  # torch.distributed backend for several ranks: "nccl", "hccl", "gloo"
    self_check = True  # before it serves, the engine compares its operations with exact results
    overlap = False  # True: launches return early, so the engine prepares step n + 1 while step n runs

    def __init__(self, device: torch.device, memory: Memory, ops: Ops) -> None:
        self.device = device
        self.memory = memory
        self.ops = ops
        self.fallbacks: dict[str, int] = {}  # operation the device lacks -> calls that a slower stand-in computed

    def load_model(self, files: ModelFiles) -> Forward | None:
        """Load a model that this backend runs as a whole. Default: None, and it is built of `ops`.

        Asked for bidirectional models, which are computed in one piece and keep no cache. Pooling, scores and what
        else follows stay with anycore.
        """
        return None

    def join(self, store: Store, rank: int, size: int, one_host: bool) -> None:
        """Become one of `size` ranks that compute a model together, and wait for the others, which `store` leads to.

        Called before weights are loaded, on backends whose table says "tensor_parallel". From then on
        `Ops.all_reduce` and `Ops.all_gather` exchange.
        """
        assert self.collective is not None, f"backend {self.name} names no collective"
        self.ops.group = Group(self.collective, self.device, store, rank, size, one_host)

    def optimize(self, step: WholeStep, limits: Limits) -> StepFn:
        """Return a faster function that gives equal results (a captured graph, say). Default: `step` itself."""
        return step

    def synchronize(self) -> None:
        """Wait until everything launched has finished."""

    def close(self) -> None:
        """Give back what `open` took. Called once."""
