"""Requests for models of other servers: sent on as they came but for the model's name, and answered in the same way.

Our schemas are not asked: what the other server understands may be said to it.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import msgspec
from fastapi import Request
from fastapi.responses import Response

from anycore.contract.declare import Task
from anycore.engine.request import NewRequest
from anycore.errors import AnycoreError, BadRequest, Overloaded, Unavailable
from anycore.server import visits
from anycore.server.door import Call, caller_of
from anycore.server.protocol import whole
from anycore.server.scopes import Needs
from anycore.server.sse import EventStream, encode, first_of, unless_gone
from anycore.server.state import ServedModel, ServerState, state_of

if TYPE_CHECKING:
    from anycore.server.remote import Passage, Remote

ROUTES: dict[str, tuple[Task, ...]] = {
    "/v1/chat/completions": (Task.GENERATE,),
    "/v1/completions": (Task.GENERATE,),
    **dict.fromkeys(("/v1/embeddings", "/v1/embed", "/v2/embed"), (Task.EMBED,)),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score"), (Task.RERANK,)),
    **dict.fromkeys(("/classify", "/v1/classify"), (Task.RERANK,)),
    **dict.fromkeys(("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"), tuple(Task)),
}
"""What is passed on, and the tasks that it is for."""

PASSED_ON = ("traceparent", "tracestate", "accept")
MOST_LINE = 16 * 2**20  # bytes of one event
FINISHES = {"length": "length"}  # how an answer ended, in our words; all that is not named is a stop

Fields = dict[str, msgspec.Raw]
_fields = msgspec.json.Decoder(Fields)
_decode = msgspec.json.decode


class Named(msgspec.Struct):
    """What decides to whom a request goes."""

    model: str | None = None


class RemoteFailed(AnycoreError):
    """The other server answered with what is no answer of this API."""

    status = 502
    code = "remote_failed"


async def passed_on(request: Request) -> Response | None:
    """Answer a request that is for another server's model; None for all others, and what is no JSON object.

    Raises:
        AnycoreError: as the other server says, or because it does not.
    """
    state = state_of(request)
    if not any(model.remote for model in state.models) or request.url.path not in ROUTES:
        return None
    body = await request.body()
    try:
        model = remote_of(state, _decode(body, type=Named).model, ROUTES[request.url.path])
        if model is None:
            return None
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    await Needs("infer")(request)
    call = await caller_of(request, request.headers.get("x-request-timeout"))
    model.check_ready()
    call.account.take_prompt(0)
    return await _Forwarding(request, model, call, fields).answer()


def remote_of(state: ServerState, name: str | None, tasks: tuple[Task, ...]) -> ServedModel | None:
    """The other server's model that a request is for, if it is for one; without a name, the only one for the tasks."""
    fitting = [model for model in state.models if model.card and model.task in tasks]
    if name is not None:
        fitting = [model for model in fitting if name in model.names]
    return fitting[0] if len(fitting) == 1 and fitting[0].remote else None


class _Forwarding:
    """One request for another server."""

    def __init__(self, request: Request, model: ServedModel, call: Call, fields: Fields) -> None:
        self._request = request
        self._remote = cast("Remote", model.slot)
        self._call = call
        self._name = model.names[0] if "model" not in fields else _decode(fields["model"])
        self._generates = request.url.path in ("/v1/chat/completions", "/v1/completions")
        self._lists = request.url.path == "/rerank" and "texts" in fields  # as text-embeddings-inference has it
        self._hides_usage = False
        self._fields = fields
        fields["model"] = _raw(model.slot.config.model)
        sequences = whole(_value(fields, "n"))
        self._sequences = sequences if isinstance(sequences, int) and sequences > 0 else 1
        if self._generates:
            self._limit()
            if _value(fields, "stream") is True:
                self._count_streams()
        new = NewRequest(id=f"remote-{uuid.uuid4().hex}", task=model.task, token_ids=[])
        self._new = call.in_time(new, model)

    def _limit(self) -> None:
        """Hold the answer to what the key may have, whichever field the other server reads and as what.

        Raises:
            BadRequest: more is asked for, or what cannot be compared.
        """
        cap = self._call.account.limit_output(None, None)
        if cap is None:
            return
        asked = {name: _value(self._fields, name) for name in ("max_tokens", "max_completion_tokens")}
        for name, value in asked.items():
            if value is not None and type(value) is not int:
                raise BadRequest(f"{name} must be a whole number", param=name)
            self._call.account.limit_output(value, None)
        if all(value is None for value in asked.values()):
            self._fields["max_tokens"] = _raw(cap)

    def _count_streams(self) -> None:
        """Let the other server count a stream's tokens; what the client has not asked for is not sent on to it."""
        options = _value(self._fields, "stream_options") or {}
        if isinstance(options, dict) and not options.get("include_usage"):
            self._hides_usage = True
            self._fields["stream_options"] = _raw({**options, "include_usage": True})

    async def answer(self) -> Response:
        passage = self._remote.passage(self._new, self._sequences)
        streams = False
        try:
            response = await unless_gone(self._request.receive, passage.wait(self._post()))
            kind = response.headers.get("content-type", "")
            streams = response.status == 200 and kind.startswith("text/event-stream")
            if not streams:
                whole = await unless_gone(self._request.receive, self._whole(passage, response))
                return Response(whole, media_type="application/json")
        finally:
            if not streams:
                passage.end()
        return EventStream(await first_of(self._request, self._events(passage, response)))

    async def _post(self) -> Any:
        headers = {name: value for name in PASSED_ON if (value := self._request.headers.get(name)) is not None}
        headers["x-request-id"] = self._request.state.request_id
        return await self._remote.post(self._request.url.path, encode(self._fields), headers, self._new.deadline)

    async def _whole(self, passage: Passage, response: Any) -> bytes:
        """Read an answer to its end.

        Raises:
            AnycoreError: it is an error.
        """
        try:
            body: bytes = await passage.wait(response.read())
        finally:
            response.close()
        if response.status != 200:
            passage.finish = "error"
            raise error_of(response.status, body, response.headers.get("retry-after"), self._remote.config.url or "")
        try:
            answer = msgspec.json.decode(body, type=list[msgspec.Raw] if self._lists else Fields)
        except msgspec.DecodeError:
            passage.finish = "error"
            kind = "list" if self._lists else "object"
            raise RemoteFailed(f"{self._remote.config.url} answered with what is not a JSON {kind}") from None
        passage.came()
        if isinstance(answer, dict):
            self._note(passage, answer)
        passage.finish = "stop" if passage.finish == "abort" else passage.finish
        return encode(answer)

    async def _events(self, passage: Passage, response: Any) -> AsyncIterator[bytes]:
        """The lines of a stream. Leaving early ends the request there."""
        try:
            rest = b""
            while chunk := await passage.wait(response.content.readany()):
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > MOST_LINE:
                    raise RemoteFailed(f"{self._remote.config.url} sent an event of more than {MOST_LINE} bytes")
                if piece := b"".join(self._lines(passage, lines)):
                    yield piece
            if rest:
                yield b"".join(self._lines(passage, [rest]))
        except RemoteFailed:
            passage.finish = "error"
            raise
        finally:
            response.close()
            passage.end()

    def _lines(self, passage: Passage, lines: list[bytes]) -> Iterator[bytes]:
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:") or not data.startswith(b"{"):
                yield line + b"\n"
                continue
            try:
                fields = _fields.decode(data)
            except msgspec.DecodeError:
                raise RemoteFailed(f"{self._remote.config.url} sent an event that is not JSON") from None
            self._note(passage, fields)
            if self._hides_usage and _value(fields, "choices") == [] and "usage" in fields:
                continue
            passage.came()
            yield b"data: " + encode(fields) + b"\n"

    def _note(self, passage: Passage, fields: Fields) -> None:
        """Give an object our name of the model, and count what it says."""
        if "model" in fields:
            fields["model"] = _raw(self._name)
        if (usage := _usage(fields)) is not None:
            self._call.account.add_output(passage.used(usage))
        if isinstance(error := _value(fields, "error"), dict):
            passage.finish = "error"
            visits.failed(AnycoreError(str(error.get("message")), code=str(error.get("code") or "remote_failed")))
        if self._generates and isinstance(choices := _value(fields, "choices"), list):
            for reason in (choice.get("finish_reason") for choice in choices if isinstance(choice, dict)):
                if reason is not None:
                    passage.finish = FINISHES.get(reason, "stop")


def error_of(status: int, body: bytes, retry_after: str | None, url: str) -> AnycoreError:
    """Make our error of another server's. That it refuses our key is not the client's fault."""
    if status in (401, 403):
        return RemoteFailed(f"{url} refuses the key of url_api_key_env", code="remote_key_refused")
    found: Any = None
    with suppress(msgspec.DecodeError):
        found = _decode(body)
    found = found.get("error", found) if isinstance(found, dict) else None
    if status < 400 or not isinstance(found, dict) or not isinstance(found.get("message"), str):
        return RemoteFailed(f"{url} answered with status {status} and no error of this API")
    message, param, code = found["message"], found.get("param"), found.get("code")
    code = code if isinstance(code, str) else None
    error: AnycoreError
    if status == 429:
        after = int(retry_after) if retry_after is not None and retry_after.isdigit() else 1
        error = Overloaded(message, param=param, code=code, retry_after=after)
    elif status == 503:
        error = Unavailable(message, param=param, code=code)
    else:
        error = AnycoreError(message, param=param, code=code or "remote_error")
    error.status = status
    if isinstance(found.get("type"), str):
        error.type = found["type"]
    return error


def _usage(fields: Fields) -> dict[str, Any] | None:
    """What an answer says it took, be it in Cohere's words."""
    usage, meta = _value(fields, "usage"), _value(fields, "meta")
    if isinstance(usage, dict):
        return usage
    billed = meta.get("billed_units") if isinstance(meta, dict) else None
    tokens = billed.get("input_tokens") if isinstance(billed, dict) else None
    return {"prompt_tokens": tokens} if isinstance(tokens, int) else None


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(encode(value))


def _value(fields: Fields, name: str) -> Any:
    """One field's value; None where there is none."""
    return _decode(fields[name]) if name in fields else None
