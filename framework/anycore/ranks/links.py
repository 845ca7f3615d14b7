"""The two ends of what the first rank tells the others. Telling never waits: what they compute keeps them in step."""

from __future__ import annotations

import zmq

from anycore.ranks import messages
from anycore.ranks.messages import Answer, Told

LINGER_MS = 500  # how long last words may take to leave


class Hub:
    """The first rank's end. Other ranks go by their numbers."""

    def __init__(self, address: str, size: int) -> None:
        """`address` may leave the port open: "tcp://host:*"."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.bind(address)
        self.address = endpoint_of(self._socket)
        self._names = [name_of(rank) for rank in range(1, size)]

    def tell(self, message: Told) -> None:
        data = messages.encode(message)
        for name in self._names:
            self._socket.send_multipart((name, data), zmq.NOBLOCK)

    def hear(self, seconds: float) -> Answer | None:
        """What some rank has answered; None where none does within so many seconds."""
        if not self._socket.poll(int(1000 * seconds)):
            return None
        _, data = self._socket.recv_multipart()
        return messages.decode_answer(data)

    def close(self) -> None:
        self._context.destroy(linger=LINGER_MS)


class Link:
    """Another rank's end."""

    def __init__(self, address: str, rank: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.identity = name_of(rank)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.connect(address)

    def answer(self, message: Answer) -> None:
        self._socket.send(messages.encode(message))

    def receive(self) -> Told:
        """Wait for the next thing that is told."""
        return messages.decode_told(self._socket.recv())

    def close(self) -> None:
        """Let what was answered leave."""
        self._socket.close()
        self._context.term()


def endpoint_of(socket: zmq.Socket[bytes]) -> str:
    """Where a socket was bound, its port included."""
    found = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(found, bytes)
    return found.rstrip(b"\0").decode()


def name_of(rank: int) -> bytes:
    return b"rank-%d" % rank
