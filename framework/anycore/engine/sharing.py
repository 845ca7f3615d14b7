"""What the ranks of one model have to settle before they load it: who has which device, and what all have room for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anycore.choose import Choice
from anycore.config import ModelConfig
from anycore.engine.memory import MemoryPlan
from anycore.errors import ConfigError
from anycore.models.spec import ModelSpec

if TYPE_CHECKING:
    from anycore.contract.collective import Collective


@dataclass(frozen=True, slots=True)
class Rank:
    """One of the ranks of a model."""

    number: int = 0
    on_host: int | None = None  # its number among those of its host; None: all are on this one


def place(choice: Choice, config: ModelConfig, rank: Rank) -> Choice:
    """The choice with a rank's own device: ranks take those from --device on, or share a host's processor.

    Raises:
        ConfigError: there are not enough devices here.
    """
    ranks = config.tensor_parallel_size
    if ranks == 1 or choice.spec.shared_device:
        return choice
    devices = {device.index: device for device in choice.spec.probe().devices}
    mine = choice.device.index + (rank.number if rank.on_host is None else rank.on_host)
    last = choice.device.index + ranks - 1 if rank.on_host is None else mine
    missing = [index for index in range(choice.device.index, last + 1) if index not in devices]
    if missing:
        raise ConfigError(
            f"--tensor-parallel-size {ranks} needs devices {choice.device.index} to {last} of backend "
            f"{choice.spec.name}, one a rank; seen here: {', '.join(map(str, devices))}",
            param="tensor_parallel_size",
        )
    return replace(choice, device=devices[mine])


def sharing(choice: Choice, spec: ModelSpec) -> int:
    """How many ranks divide one device's memory."""
    return spec.shard.ranks if spec.shard is not None and choice.spec.shared_device else 1


def agree(draft: MemoryPlan, group: Collective) -> MemoryPlan:
    """A plan that every rank has room for: schedules follow from its limits, and have to be the same."""
    if group.size == 1:
        return draft
    limits = draft.limits
    seqs, rows, longest, blocks = group.least(
        [limits.max_num_seqs, limits.max_num_batched_tokens, limits.max_model_len, limits.blocks]
    )
    limits = replace(limits, max_num_seqs=seqs, max_num_batched_tokens=rows, max_model_len=longest, blocks=blocks)
    return replace(draft, limits=limits, kv=blocks * draft.block_bytes)
