"""The process of any rank but the first: `python -m anycore.ranks.follower`, started by the first rank or a launcher.

It plans and opens its device, joins the group, loads its part of the model, and then does what the first rank does.
It ends when it cannot go on, and as soon as the first rank has ended.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

import msgspec

from anycore.errors import AnycoreError
from anycore.ranks import meeting
from anycore.ranks.links import Link
from anycore.ranks.meeting import Meeting
from anycore.ranks.messages import BOOT, Boot, Failed, Go, Here
from anycore.ranks.watch import Pulse

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

    from anycore.contract.backend import Backend

PR_SET_PDEATHSIG = 1

log = logging.getLogger(__name__)


def main(met: Meeting | None) -> int:
    """Entry of the process; `met`: where a launcher has started it."""
    store: Store | None = None
    if met is None:
        boot = msgspec.json.decode(sys.stdin.buffer.readline(), type=Boot)
        die_with_leader(boot.bound)
    else:
        store = met.store()
        boot = msgspec.json.decode(store.get(BOOT), type=Boot)
        boot = msgspec.structs.replace(boot, rank=met.rank, leader=0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if met is None else signal.SIG_DFL)
    form = f"%(levelname)s rank {boot.rank} %(name)s: %(message)s"
    logging.basicConfig(level=max(logging.WARNING, logging.getLevelName(boot.log_level.upper())), format=form)
    link = Link(boot.turns, boot.rank)
    try:
        run(boot, link, store, met.on_host if met is not None else None)
        link.close()
        return 0
    except AnycoreError as error:
        link.answer(Failed(boot.rank, error.message, error.param, error.code))
    except Exception as error:
        log.exception("rank %d failed", boot.rank)
        link.answer(Failed(boot.rank, f"{type(error).__name__}: {error}"))
    link.close()
    return 1


def run(boot: Boot, link: Link, store: Store | None, on_host: int | None) -> None:
    """Open this rank's part of the model, and follow."""
    from anycore import plugins  # heavy imports start here, once the first rank is watched
    from anycore.engine.grammar import Grammars
    from anycore.engine.launch import build, prepare
    from anycore.engine.searches import Texts
    from anycore.engine.sharing import Rank
    from anycore.ranks.engines import FollowingEngine
    from anycore.text.grammar import vocabulary_of
    from anycore.text.tokenizer import Tokenizer

    prepared = prepare(boot.config, plugins.load(), rank=Rank(boot.rank, on_host))
    pulses: list[Pulse] = []

    def join(backend: Backend) -> None:
        link.answer(Here(boot.rank))
        told = link.receive()
        assert isinstance(told, Go), told
        pulses.append(Pulse(boot.beats, boot.rank, boot.leader, boot.silence))
        backend.join(store or meeting.file_store(boot.store, boot.size), boot.rank, boot.size, store is None)

    engine = build(prepared, join=join, kind=FollowingEngine)
    engine.grammars = Grammars(lambda: vocabulary_of(prepared.source, prepared.spec))
    engine.texts = Texts(lambda: Tokenizer.from_source(prepared.source))
    pulses[0].serve()
    assert isinstance(engine, FollowingEngine)
    engine.follow(link)


def die_with_leader(bound: bool) -> None:
    """Make sure that this process ends when the first rank does, even by SIGKILL: its standard input then ends too.

    Args:
        bound: the thread that started this process ends with its process, so that the system may be asked to look.
    """

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="leader-watch", daemon=True).start()
    if bound and sys.platform == "linux":  # also where native code never lets the thread run
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    code = main(meeting.from_environment())
    logging.shutdown()
    os._exit(code)
