"""What one HTTP request does at the expense of its key: opened at the door of a route, closed when the answer ends."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from anycore.errors import BadRequest, RateLimited
from anycore.server.keys import Key
from anycore.server.ledger import REQUESTS, TOKENS, Ledger

BUSY_SECONDS = 1  # Retry-After where all that a key may have under way is: nobody knows when one ends


class Tenant(NamedTuple):
    """For whom the engine computes, and which share of a busy engine that one gets."""

    name: str = ""
    weight: float = 1.0


class Account:
    """One request's use of a key's limits; without a key, or without limits, nothing is counted."""

    def __init__(self, key: Key | None, ledger: Ledger) -> None:
        self.key = key
        self._ledger = ledger
        self._entered = False
        self._prompt = 0

    @property
    def tenant(self) -> Tenant:
        return Tenant() if self.key is None else Tenant(self.key.name, self.key.weight)

    def open(self) -> None:
        """Count the request.

        Raises:
            RateLimited: the key has too many under way, or has sent too many this minute.
        """
        key = self.key
        if key is None:
            return
        if key.max_concurrent is not None:
            if not self._ledger.enter(key.name, key.max_concurrent):
                raise RateLimited(
                    f"key {key.name} may have {key.max_concurrent} requests under way at a time and has",
                    code="concurrency_limit_exceeded",
                    retry_after=BUSY_SECONDS,
                )
            self._entered = True
        if key.requests_per_minute is not None:
            wait = self._ledger.take(key.name, REQUESTS, 1, key.requests_per_minute, time.monotonic())
            if wait:
                raise _limited(f"key {key.name} may send {key.requests_per_minute} requests a minute and has", wait)

    def take_prompt(self, tokens: int) -> None:
        """Count the prompt's tokens, before any is computed; 0 where only the answer will tell how many they are.

        Raises:
            RateLimited: the key has used too many this minute.
            BadRequest: so many are not to be had in any minute.
        """
        key = self.key
        if key is None or key.tokens_per_minute is None:
            return
        allowance = key.tokens_per_minute
        if tokens > allowance:
            raise BadRequest(
                f"the input has {tokens} tokens, key {key.name} may use {allowance} a minute: send less at a time",
                code="tokens_per_minute_exceeded",
            )
        wait = self._ledger.take(key.name, TOKENS, tokens, allowance, time.monotonic())
        if wait:
            raise _limited(
                f"key {key.name} may use {allowance} tokens a minute, too many are used for {tokens} more", wait
            )
        self._prompt += tokens

    def add_output(self, tokens: int) -> None:
        """Count tokens as they are produced; those over the limit are waited for before the next request."""
        self._use(tokens)

    def limit_output(self, asked: int | None, default: int | None) -> int | None:
        """Return max_tokens: what is asked for, else the default, which the key's cap may lower.

        Raises:
            BadRequest: more is asked for than the key may have.
        """
        cap = None if self.key is None else self.key.max_tokens
        if cap is None:
            return default if asked is None else asked
        if asked is None:
            return cap if default is None else min(default, cap)
        if asked > cap:
            assert self.key is not None
            raise BadRequest(
                f"max_tokens is {asked}, key {self.key.name} may have at most {cap} an answer", param="max_tokens"
            )
        return asked

    def close(self, *, refused: bool) -> None:
        """End the request; where it was refused before it was computed, its prompt is not counted."""
        if self._entered and self.key is not None:
            self._entered = False
            self._ledger.leave(self.key.name)
        if refused and self._prompt:
            self._use(-self._prompt)

    def _use(self, tokens: int) -> None:
        key = self.key
        if key is not None and key.tokens_per_minute is not None:
            self._ledger.use(key.name, TOKENS, tokens, key.tokens_per_minute, time.monotonic())


def _limited(what: str, wait: float) -> RateLimited:
    seconds = math.ceil(wait)
    return RateLimited(f"{what}; try again in {seconds} s", retry_after=seconds)
