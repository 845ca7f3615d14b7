"""The messages between the front process and an engine process: msgpack lists of tagged structs over ZeroMQ."""

from __future__ import annotations

from typing import Any

import msgspec

from anycore.config import ModelConfig
from anycore.engine.request import Delta, NewRequest
from anycore.engine.stats import Stats


class Boot(msgspec.Struct, kw_only=True):
    """The first line an engine process reads from its standard input, which then stays open while the parent lives."""

    config: ModelConfig
    commands: str  # ZeroMQ address the engine process binds and reads
    reports: str  # ZeroMQ address it connects to and writes
    directory: str  # where the sockets live until they are connected
    log_level: str = "info"
    log_format: str = "text"
    log_prompts: bool = False
    strict: bool = False
    at_least: dict[str, int] = {}  # numbers of the card below which it is not worth loading


class Load(msgspec.Struct, tag="load"):
    """Every model of the server can be served: read the weights now."""


class Submit(msgspec.Struct, tag="submit"):
    request: NewRequest


class Abort(msgspec.Struct, tag="abort"):
    id: str
    index: int | None = None  # of one sequence; None: the whole request


class Attach(msgspec.Struct, tag="attach"):
    """A further front listens at `reports`, and begins the ids of its requests with its number and a colon."""

    front: int
    reports: str


class Drain(msgspec.Struct, tag="drain"):
    """Refuse the requests that have not run yet."""


class Stop(msgspec.Struct, tag="stop"):
    """Leave the loop and exit."""


Command = Load | Submit | Abort | Attach | Drain | Stop


class Planned(msgspec.Struct, tag="planned"):
    """What the model will be served as; sent before any weight is read."""

    card: dict[str, Any]
    source: str  # the model as the user wrote it
    folder: str
    gguf: str | None = None


class Progress(msgspec.Struct, tag="progress"):
    name: str  # what is being done: "weights", "warm-up", …
    fraction: float  # 0..1


class Ready(msgspec.Struct, tag="ready"):
    card: dict[str, Any]
    stats: Stats


class Failed(msgspec.Struct, tag="failed"):
    """The engine process gives up and exits with `exit_code`."""

    message: str
    param: str | None = None
    code: str | None = None
    exit_code: int = 1


class Refusal(msgspec.Struct):
    """A request that was not admitted, or was dropped unrun: the error of its envelope."""

    id: str
    message: str
    code: str | None
    param: str | None = None
    kind: str = ""  # the exception's class
    retry_after: int = 1  # seconds, where it is worth trying again


class Output(msgspec.Struct, tag="output"):
    """What one turn of the loop brought: at most one message a step, however many requests run."""

    deltas: list[Delta] = []
    admitted: list[str] = []
    refused: list[Refusal] = []
    stats: Stats | None = None


Report = Planned | Progress | Ready | Failed | Output

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(list[Command])
_report = msgspec.msgpack.Decoder(Report)


def encode(message: Report | list[Command]) -> bytes:
    return _encoder.encode(message)


def decode_commands(data: bytes) -> list[Command]:
    return _commands.decode(data)


def decode_report(data: bytes) -> Report:
    return _report.decode(data)
