"""Who looks after the ranks: a thread in each, that gives signs of life and misses those of others.

A rank that has ended, or is silent for too long, ends the group: no rank can go on without it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from subprocess import Popen

import zmq

from anycore.ranks.links import endpoint_of, name_of

BEAT = 0.4  # seconds between two signs of life
SILENCE = 3.0  # seconds without any from a rank that serves
STARTING = 120.0  # the same of one that loads: compilers and drivers may keep it from everything else
LAST_RESORT = 0.5  # seconds in which a process ends by itself once its group is lost

log = logging.getLogger(__name__)


class Watch:
    """The first rank's: hears of all others.

    Args:
        address: ZeroMQ address to bind.
        processes: those ranks that were started here.
        silence: seconds that a rank which serves may be silent.
        last_resort: called a moment after a rank was lost, where whoever waits for it may wait forever.
    """

    def __init__(
        self,
        address: str,
        size: int,
        processes: Mapping[int, Popen[bytes]],
        silence: float = SILENCE,
        last_resort: Callable[[], None] | None = None,
    ) -> None:
        self.size = size
        self.processes = processes
        self.failure = ""  # why the group is lost
        self.lost = threading.Event()
        self._silence = silence
        self._limit = STARTING
        self._last_resort = last_resort
        self._heard: dict[int, float] = {}
        self._closed = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.bind(address)
        self.address = endpoint_of(self._socket)
        self._thread = threading.Thread(target=self._run, name="ranks-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def serve(self) -> None:
        """From now on every rank is to be heard of often."""
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._limit = self._silence

    def close(self) -> None:
        """End all ranks that were started here, without a word."""
        self._closed = True
        self._end_processes()
        if self._thread.is_alive() and not self.lost.is_set():
            self._thread.join(2 * BEAT)

    def _run(self) -> None:
        names = {name_of(rank): rank for rank in range(1, self.size)}
        while not self._closed:
            self._hear(names)
            reason = self._ended() or self._silent(names)
            if reason and not self._closed:
                self._lose(reason)
                break
        self._socket.close()
        self._context.term()

    def _hear(self, names: Mapping[bytes, int]) -> None:
        """Take signs of life for a while, and answer each."""
        end = time.monotonic() + BEAT
        while (left := end - time.monotonic()) > 0 and self._socket.poll(int(1000 * left) + 1):
            name, *_ = self._socket.recv_multipart()
            if name in names:
                self._heard[names[name]] = time.monotonic()
                self._socket.send_multipart((name, b""), zmq.NOBLOCK)

    def _ended(self) -> str:
        for rank, process in self.processes.items():
            code = process.poll()
            if code is not None:
                how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
                return f"rank {rank} of {self.size} has ended: {how}"
        return ""

    def _silent(self, names: Mapping[bytes, int]) -> str:
        found = self._quiet()
        if found is not None:
            self._hear(names)  # if it was this process that stood still, what was said is heard now
            found = self._quiet()
        if found is None:
            return ""
        return f"rank {found} of {self.size} has given no sign of life for {self._limit:g} s"

    def _quiet(self) -> int | None:
        now = time.monotonic()
        return next((rank for rank, heard in self._heard.items() if now - heard > self._limit), None)

    def _lose(self, reason: str) -> None:
        self.failure = reason
        log.error("%s: the other ranks end with it", reason)
        self._end_processes()
        self.lost.set()
        if self._last_resort is not None:
            time.sleep(LAST_RESORT)
            if not self._closed:  # whoever waited has been told by an error, and is on the way out
                self._last_resort()

    def _end_processes(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait()


class Pulse:
    """Another rank's: hears of the first one, and ends this process with it.

    Args:
        leader: the first rank's process, to be ended where it hangs; 0: it is not ours to end.
    """

    def __init__(self, address: str, rank: int, leader: int, silence: float) -> None:
        self.rank = rank
        self.leader = leader
        self._silence = silence
        self._limit = STARTING
        self._heard = time.monotonic()
        self._address = address
        threading.Thread(target=self._run, name="ranks-pulse", daemon=True).start()

    def serve(self) -> None:
        self._heard = time.monotonic()
        self._limit = self._silence

    def _run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        socket = context.socket(zmq.DEALER)
        socket.identity = name_of(self.rank)
        socket.linger = 0
        socket.connect(self._address)
        late = False
        while True:
            socket.send(b"")
            if socket.poll(int(1000 * BEAT)):
                socket.recv()
                self._heard = time.monotonic()
                time.sleep(BEAT)
            quiet = time.monotonic() - self._heard > self._limit
            if quiet and late:
                break
            late = quiet
        log.error("the first rank has given no sign of life for %g s: rank %d ends", self._limit, self.rank)
        if self.leader and os.getppid() == self.leader:
            os.kill(self.leader, signal.SIGKILL)
        os._exit(1)
