"""Files of measured steps: what `anycore bench kernels --steps` prints, how it is read, and which model it is of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from anycore.errors import ConfigError
from anycore.models.spec import ModelSpec

FORMAT = "anycore step times 1"


class Measured(msgspec.Struct, frozen=True):
    """One kind of step and what it took, each time that it was run."""

    decodes: int  # requests that decode
    context: int  # tokens that these look back on, together
    chunks: list[tuple[int, int]]  # of prompts: (tokens computed before, rows)
    seconds: list[float]
    launch: list[float] = []  # of these, what the host took until it had launched it, where devices overlap

    @property
    def rows(self) -> int:
        return self.decodes + sum(rows for _, rows in self.chunks)


class FrontTimes(msgspec.Struct, frozen=True):
    """Seconds that a front process is busy."""

    request: float = 0.0  # with each request, from its first byte to the end of its answer
    prompt: float = 0.0  # and with each token of its prompt
    wake: float = 0.0  # each time that it wakes for what an engine reports: once a step, unless it is late
    chunk: float = 0.0  # with each piece of an answer that it sends
    token: float = 0.0  # and with each token, however many are in a piece

    def work(self, requests: int, prompts: int, chunks: int, tokens: int) -> float:
        """Seconds of work that so much is, wakes left out."""
        return self.request * requests + self.prompt * prompts + self.chunk * chunks + self.token * tokens


class StepTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Steps, and what they were measured on."""

    format: str
    anycore: str
    time: str
    model: str
    architecture: str
    shape: dict[str, int]
    backend: str
    device: str
    chip: str
    ranks: int
    threads: int
    dtype: str
    quantization: str | None
    kv_cache_dtype: str | None
    overlap: bool  # the device computes a step while the host prepares the next
    limits: dict[str, int]
    sampling: dict[str, Any]
    steps: list[Measured]
    front: FrontTimes | None = None

    @property
    def where(self) -> str:
        return f"{self.model} in {self.quantization or self.dtype} on {self.device} ({self.backend})"

    def about(self) -> dict[str, Any]:
        """All but the steps."""
        found: dict[str, Any] = msgspec.to_builtins(msgspec.structs.replace(self, steps=[]))
        del found["steps"]
        return found


def read(path: Path) -> StepTimes:
    """Read a file of step times.

    Raises:
        ConfigError: it is none.
    """
    try:
        found = msgspec.json.decode(path.read_bytes(), type=StepTimes)
    except OSError as error:
        raise ConfigError(f"--step-times {path}: {error.strerror}", param="step_times") from error
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--step-times {path} is not what `anycore bench kernels MODEL --steps` prints: {error}", param="step_times"
        ) from error
    if found.format != FORMAT:
        raise ConfigError(f"--step-times {path} is {found.format!r}, this version reads {FORMAT!r}", param="step_times")
    return found


def shape_of(spec: ModelSpec) -> dict[str, int]:
    """What two models must agree in for the steps of one to take as long as those of the other."""
    names = ("layers", "hidden_size", "intermediate_size", "heads", "kv_heads", "head_dim", "vocab_size")
    return {name: int(getattr(spec, name)) for name in names}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What step times have to be of."""

    shape: dict[str, int]
    backend: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str | None
    ranks: int

    def differences(self, times: StepTimes) -> list[str]:
        """What they are not of, in words."""
        names = [name for name in self.__slots__ if name != "shape"]
        pairs = [(name, getattr(times, name), getattr(self, name)) for name in names]
        pairs += [(name, times.shape.get(name), value) for name, value in self.shape.items()]
        return [f"{name} is {theirs}, not {ours}" for name, theirs, ours in pairs if theirs != ours]

    def check(self, times: StepTimes) -> None:
        """Refuse the step times of something else.

        Raises:
            ConfigError: naming what differs.
        """
        found = self.differences(times)
        if found:
            raise ConfigError(
                f"--step-times is of {times.where}, which is something else: {'; '.join(found)}", param="step_times"
            )

    def catalogued(self, folder: Path, device: str) -> StepTimes | None:
        """The newest step times of a folder that are of this, on a device."""
        every = [read(path) for path in sorted(folder.glob("*.json"))]
        fitting = [times for times in every if times.device == device and not self.differences(times)]
        return max(fitting, key=lambda times: times.time, default=None)
