"""A model that another OpenAI-compatible server answers for: whether it can be reached, and what it costs and brings.

`passing` sends requests there. Nothing of the model is known here but what that server says.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any
from urllib.parse import urlsplit

from anycore.config import ModelConfig
from anycore.contract.declare import Task
from anycore.engine.request import NewRequest, RequestRecord
from anycore.errors import AnycoreError, ConfigError, DeadlineExceeded, Unavailable, Unsupported
from anycore.server import visits
from anycore.server.phases import Phase
from anycore.server.slot import NOT_CHECKED, Slot
from anycore.server.stream import Observer
from anycore.server.tally import Tally

try:
    import aiohttp
except ImportError as error:
    raise ConfigError(
        f"url: needs a package that is missing: pip install 'anycore[proxy]' ({error})", param="url"
    ) from error

CONNECT_SECONDS = 5.0

log = logging.getLogger(__name__)

PROBE_SECONDS = 5.0  # between two looks at a server that answers, and the most that one may take
AGAIN_SECONDS = 1.0  # before the next look at one that does not
FAILURES = 2  # looks in a row that fail, before a server that answered counts as gone


class Passage:
    """One request on its way to the other server and back; told what comes, it counts it."""

    def __init__(self, remote: Remote, request: NewRequest, sequences: int) -> None:
        self.request = request
        self.error: AnycoreError | None = None  # why we gave it up
        self.finish = "abort"  # until it is known better
        self.prompt = self.cached = self.output = 0
        self._remote = remote
        self._sequences = sequences
        self._began = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._work: asyncio.Task[Any] | None = None
        self._visit = visits.current()
        remote.passages.add(self)
        remote.tally.add(running=1)

    def end(self) -> None:
        """It is back, or given up."""
        self._remote.passages.discard(self)
        self._remote.tally.add(
            running=-1, prompt_tokens=self.prompt, cached_tokens=self.cached, output_tokens=self.output
        )
        record = RequestRecord(
            id=self.request.id,
            model=self._remote.name,
            task=self.request.task,
            prompt_tokens=self.prompt,
            cached_tokens=self.cached,
            output_tokens=self.output,
            sequences=self._sequences,
            finish=self.finish,
            queue_seconds=0.0,
            first_token_seconds=None if self._first is None else self._first - self._began,
            total_seconds=self.seconds,
            last_token_seconds=None if self._last is None else self._last - self._began,
            longest_output=self.output // self._sequences,
        )
        self._remote.observer.finished(record, self.request)
        if self._visit is not None:
            self._visit.finished(record, self.request)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def came(self) -> None:
        """A piece of the answer is there."""
        now = time.monotonic()
        if self._last is not None and self._sequences == 1:
            self._remote.observer.token_after(now - self._last)
        self._first = self._first or now
        self._last = now

    def used(self, usage: dict[str, Any]) -> int:
        """Take note of the tokens that the other server counted; return how many are new."""
        before = self.prompt + self.output
        details = usage.get("prompt_tokens_details") or {}
        self.prompt = usage.get("prompt_tokens") or usage.get("total_tokens") or 0
        self.output = usage.get("completion_tokens") or 0
        self.cached = details.get("cached_tokens") or 0
        return self.prompt + self.output - before

    async def wait(self, work: Any) -> Any:
        """Await something of the other server, unless the request is given up.

        Raises:
            AnycoreError: it was, or the server cannot be reached, or takes too long.
        """
        url = self._remote.config.url
        self._work = asyncio.ensure_future(work)
        if self.error is not None:
            self._work.cancel()
        try:
            return await self._work
        except asyncio.CancelledError:
            if self.error is None:
                raise  # the client is gone
            failure = self.error
        except aiohttp.ConnectionTimeoutError:
            failure = Unavailable(f"{url} takes no connection within {CONNECT_SECONDS:g} s", code="remote_unreachable")
        except asyncio.TimeoutError:
            limit = self.request.deadline
            code = "deadline_exceeded" if limit is not None and self.seconds >= limit else "remote_stalled"
            failure = DeadlineExceeded(f"{url} has not answered within {self.seconds:.1f} s", code=code)
        except (aiohttp.ClientError, OSError) as error:
            failure = Unavailable(
                f"{url} cannot be reached, or has ended the connection ({type(error).__name__})",
                code="remote_unreachable",
            )
        self.finish = "error"
        raise failure

    def give_up(self, error: AnycoreError) -> None:
        self.error = error
        if self._work is not None:
            self._work.cancel()


class Remote(Slot):
    """A slot without an engine."""

    def __init__(self, config: ModelConfig, observer: Observer, stall: float, tally: Tally) -> None:
        """`stall` is how long the other server may be silent in the middle of an answer; 0 for ever."""
        super().__init__(config)
        assert config.url is not None
        self.observer = observer
        self.tally = tally
        self.passages: set[Passage] = set()
        self._root = config.url.rstrip("/").removesuffix("/v1")
        self._stall = stall
        self._failures = 0
        self._watcher: asyncio.Task[None] | None = None
        task = Task(config.task).value
        self._card = {
            "tasks": [task],
            "possible_tasks": [task],
            "backend": "remote",
            "device": urlsplit(config.url).netloc,
            "remote": config.url,
            "support": NOT_CHECKED,
        }

    @property
    def serves(self) -> bool:
        return not self._closed and self._stated.phase is Phase.READY

    @property
    def live(self) -> int:
        return len(self.passages)

    def refusal(self) -> Unavailable:
        if self._closed:
            return super().refusal()
        return Unavailable(f"model {self.name!r}: {self._stated.reason or 'not asked yet'}", code=self._stated.code)

    # --- the other server ---------------------------------------------------------------------------------------

    def passage(self, request: NewRequest, sequences: int) -> Passage:
        """Begin to count a request. It is to be ended."""
        return Passage(self, request, sequences)

    @property
    def headers(self) -> dict[str, str]:
        """What every request there carries."""
        name = self.config.url_api_key_env
        return {} if name is None else {"authorization": f"Bearer {os.environ[name]}"}

    async def post(self, path: str, body: bytes, headers: dict[str, str], seconds: float | None) -> Any:
        """Send a request; return its response as soon as its headers are there. No redirect gets the key."""
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=CONNECT_SECONDS, sock_read=self._stall or None)
        headers = {**headers, **self.headers, "content-type": "application/json"}
        return await self._session.post(
            self._root + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def _probe(self) -> tuple[str, str]:
        """Look whether the server is there and serves the model; return a code and the reason, or ready."""
        timeout = aiohttp.ClientTimeout(total=PROBE_SECONDS)
        try:
            url = f"{self._root}/v1/models"
            async with self._session.get(url, headers=self.headers, timeout=timeout, allow_redirects=False) as response:
                if response.status in (401, 403):
                    return "remote_key_refused", f"{self.config.url} refuses the key of url_api_key_env"
                if response.status != 200:
                    return "remote_unreachable", f"{url} answers with status {response.status}"
                entries = {entry["id"]: entry for entry in (await response.json())["data"]}
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            return "remote_unreachable", f"{self.config.url} does not answer ({type(error).__name__})"
        except (ValueError, KeyError, TypeError):
            return "remote_unreachable", f"{url} does not answer as this API does"
        if self.config.model not in entries:
            return "remote_model_missing", f"{self.config.url} serves no {self.config.model!r}: {', '.join(entries)}"
        longest = entries[self.config.model].get("max_model_len")
        if isinstance(longest, int):
            self._card["max_model_len"] = longest
        return "ready", ""

    async def _look(self) -> None:
        code, reason = await self._probe()
        self._failures = 0 if code == "ready" else self._failures + 1
        if code == "ready":
            if self._stated.phase is not Phase.READY:
                self._state(Phase.READY, "ready")
        elif code != self._stated.code and (self._failures >= FAILURES or self._stated.phase is not Phase.READY):
            log.warning("%s: %s", self.name, reason)
            self._state(Phase.DEGRADED, code, reason)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(PROBE_SECONDS if not self._failures else AGAIN_SECONDS)
            await self._look()

    # --- the server's life --------------------------------------------------------------------------------------

    async def plan(self) -> None:
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), raise_for_status=False)

    async def load(self) -> None:
        self.observer.begin(self._card, lambda: self.tally.stats)
        await self._look()
        self._watcher = asyncio.create_task(self._watch())

    def fail_all(self, error: AnycoreError) -> None:
        for passage in list(self.passages):
            passage.give_up(error)

    async def stop(self) -> None:
        self._closed = True
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        if hasattr(self, "_session"):
            await self._session.close()

    # --- changes ------------------------------------------------------------------------------------------------

    async def reload(self, checkpoint: str | None = None) -> None:
        raise self._elsewhere()

    async def move(self, backend: str, devices: tuple[int, ...] = (0,)) -> None:
        raise self._elsewhere()

    async def unload(self) -> None:
        raise self._elsewhere()

    async def bring_back(self) -> None:
        raise self._elsewhere()

    def _elsewhere(self) -> Unsupported:
        return Unsupported(f"model {self.name!r} is served by {self.config.url}: change it there", param="model")
