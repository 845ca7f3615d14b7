"""long-first: which part of the waiting prompts a step has to take so that no answer ends later than it could.

A step reads all weights however few rows it has, so rows of a prompt cost least beside requests that decode. Prompts of
short answers can wait: until the longest answer ends, many steps come that have room.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from anycore.engine.request import Request


def rows_due(running: Iterable[Request], waiting: Iterable[Request]) -> int:
    """Rows of prompts for the next step, at least.

    The longest answer under way takes so many steps yet. A request whose answer is shorter has the difference to get
    its prompt computed, and all that is ahead of it; the one with the least room decides.

    Args:
        running: in any order; those in the middle of their prompt have to get on, too.
        waiting: the longest answers first.
    """
    running = list(running)
    horizon = max((request.max_total - len(request.tokens) for request in running if request.prefilled), default=0)
    rows = due = 0
    for request in chain((request for request in running if not request.prefilled), waiting):
        rows += request.remaining
        steps = max(1, horizon - (request.max_total - request.num_prompt))
        due = max(due, -(-rows // steps))
    return due
