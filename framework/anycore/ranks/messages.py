"""What the first rank tells the others, and what they answer: msgpack of tagged structs."""

from __future__ import annotations

import msgspec

from anycore.config import ModelConfig
from anycore.engine.request import NewRequest


class Boot(msgspec.Struct, kw_only=True):
    """The one line that a rank reads from its standard input, or finds under BOOT where ranks meet over the network."""

    config: ModelConfig
    size: int  # ranks in all
    turns: str  # ZeroMQ address of what the first rank tells
    beats: str  # and of the signs of life that ranks exchange
    rank: int = 0
    store: str = ""  # file in which ranks of one host find one another; "": they have met already
    leader: int = 0  # process to end where the first rank hangs; 0: it is not ours to end
    bound: bool = True  # the thread that started this rank lives as long as its process
    silence: float = 0.0  # seconds after which a rank that serves and gives no sign of life counts as lost
    log_level: str = "info"


BOOT = "anycore/boot"


class Here(msgspec.Struct, tag="here"):
    """A rank has planned and opened its device."""

    rank: int


class Failed(msgspec.Struct, tag="failed"):
    """A rank gives up, and why."""

    rank: int
    message: str
    param: str | None = None
    code: str | None = None


class Go(msgspec.Struct, tag="go"):
    """All are here: join the group, and load."""


class End(msgspec.Struct, tag="end"):
    """The first rank is done."""


class Add(msgspec.Struct, tag="add"):
    """A request was admitted, and when by the first rank's clock."""

    request: NewRequest
    now: float


class Abort(msgspec.Struct, tag="abort"):
    id: str
    index: int | None = None


class Forget(msgspec.Struct, tag="forget"):
    """Cached blocks that no request holds were given up."""


Event = Add | Abort | Forget


class Turn(msgspec.Struct, tag="turn"):
    """A step: what came before it, in order, and what its clock says."""

    now: float
    events: list[Event] = []


class Compiled(msgspec.Struct, tag="compiled"):
    """Within a step: requests whose grammar is ready, and those whose grammar failed, with error and code."""

    ready: list[str] = []
    failed: list[tuple[str, str, str | None]] = []


Told = Go | Turn | Compiled | End
Answer = Here | Failed

_encoder = msgspec.msgpack.Encoder()
_told = msgspec.msgpack.Decoder(Told)
_answer = msgspec.msgpack.Decoder(Answer)


def encode(message: Told | Answer) -> bytes:
    return _encoder.encode(message)


def decode_told(data: bytes) -> Told:
    return _told.decode(data)


def decode_answer(data: bytes) -> Answer:
    return _answer.decode(data)
