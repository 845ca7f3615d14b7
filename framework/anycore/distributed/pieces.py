"""The messages between a front and an engine's actor: msgpack in the values that Ray carries."""

from __future__ import annotations

from typing import Any

import msgspec

from anycore.engine.request import Delta, NewRequest
from anycore.engine.stats import Stats
from anycore.server import wire


class Met(msgspec.Struct):
    """What a front has to know of a model before it takes requests for it."""

    planned: wire.Planned
    card: dict[str, Any]


class Piece(msgspec.Struct, omit_defaults=True):
    """A piece of an answer; the first one says who answers, and the last one may say why it ends early."""

    replica: str = ""
    deltas: list[Delta] = []
    stats: Stats | None = None  # of the engine, at the end of an answer
    refused: wire.Refusal | None = None


_encoder = msgspec.msgpack.Encoder()
_met = msgspec.msgpack.Decoder(Met)
_piece = msgspec.msgpack.Decoder(Piece)
_request = msgspec.msgpack.Decoder(NewRequest)


def encode(message: Met | Piece | NewRequest) -> bytes:
    return _encoder.encode(message)


def decode_met(data: bytes) -> Met:
    return _met.decode(data)


def decode_piece(data: bytes) -> Piece:
    return _piece.decode(data)


def decode_request(data: bytes) -> NewRequest:
    return _request.decode(data)
