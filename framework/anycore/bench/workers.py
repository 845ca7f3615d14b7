"""Spreads a load over processes, so that the generator is not what limits the figures."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection

from anycore.bench.client import Outcome, places, run_share, share
from anycore.bench.load import Body, Load
from anycore.errors import AnycoreError

LEAD_SECONDS = 0.2  # from the word to the start, so that all processes begin together


def run_load(load: Load, processes: int) -> tuple[list[Outcome], float]:
    """Send the whole load; return the outcomes, and the share of its time that the busiest process computed."""
    if processes == 1:
        return _run(load, share(load, 0, 1), places(load, 0, 1), time.monotonic())
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(processes)]
    workers = [
        context.Process(target=_work, args=(load, index, processes, end), daemon=True)
        for index, (_, end) in enumerate(pipes)
    ]
    for worker in workers:
        worker.start()
    for _, end in pipes:
        end.close()  # ours: the worker's end alone stays open, so that its death is seen
    try:
        for pipe, _ in pipes:
            pipe.recv()
        start = time.monotonic() + LEAD_SECONDS
        for pipe, _ in pipes:
            pipe.send(start)
        parts = [pipe.recv() for pipe, _ in pipes]
    except EOFError as error:
        raise AnycoreError("a process of the load generator ended early; its own message stands above") from error
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()
    return [outcome for outcomes, _ in parts for outcome in outcomes], max(busy for _, busy in parts)


def _work(load: Load, index: int, processes: int, pipe: Connection) -> None:
    requests = share(load, index, processes)
    pipe.send("ready")
    pipe.send(_run(load, requests, places(load, index, processes), pipe.recv()))


def _run(
    load: Load, requests: Iterable[tuple[float, list[Body]]], limit: int | None, start: float
) -> tuple[list[Outcome], float]:
    computed, began = time.process_time(), time.monotonic()
    outcomes = asyncio.run(run_share(load, requests, limit, start))
    return outcomes, (time.process_time() - computed) / (time.monotonic() - began)
