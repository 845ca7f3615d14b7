"""Every route asks for a scope: all of them are walked with keys of one scope each, and without keys."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI

from anycore.config import ServerConfig
from anycore.server import console
from anycore.server.app import ROUTERS, create_app
from anycore.server.auth import Guard
from anycore.server.keys import SCOPES, Key, Scope, hash_of

OPEN = {"/", "/health", "/ping", "/ready"}  # and the console's files
ANY = {"/version", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
ANY |= {"/v1/models", "/v1/models/{name:path}", "/v1/capabilities"}
METRICS = {"/metrics", "/load"}
ADMIN = {f"/v1/models/{{name:path}}/{change}" for change in ("reload", "unload", "load", "move")}
INFER = {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}
INFER |= {"/v1/responses", "/v1/responses/input_tokens", "/v1/messages", "/v1/messages/count_tokens"}
INFER |= {"/v1/embed", "/v2/embed", "/embed", "/similarity", "/predict", "/classify", "/v1/classify"}
INFER |= {"/v2/rerank", "/v1/rerank", "/rerank", "/v1/score", "/score"}
INFER |= {"/v1/tokenize", "/tokenize", "/v1/detokenize", "/detokenize"}

ELSEWHERE = "203.0.113.9"


def expected(path: str) -> set[Scope]:
    """The scopes that open a path; empty for those that need no key. A path that is nowhere above fails here."""
    if path in OPEN or path.startswith("/console/"):
        return set()
    (found,) = (scopes for paths, scopes in TABLE if path in paths)
    return found


TABLE: list[tuple[set[str], set[Scope]]] = [
    (ANY, {"infer", "metrics", "admin"}),
    (METRICS, {"metrics"}),
    (ADMIN, {"admin"}),
    (INFER, {"infer"}),
]


def app(*keys: Key) -> FastAPI:
    return create_app(ServerConfig(), [], guard=Guard(keys))


def ask(served: FastAPI, requests: list[tuple[str, str, dict[str, str]]], client: str = "127.0.0.1") -> list[Any]:
    """Send requests, all of them without a body; a route that let one pass says that there is no such model."""

    async def send() -> list[httpx.Response]:
        transport = httpx.ASGITransport(served, client=(client, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return [await http.request(method, path, headers=headers) for method, path, headers in requests]

    return asyncio.run(send())


def everything(served: FastAPI) -> list[tuple[str, str]]:
    """Each method and path there is."""
    routes: list[Any] = [route for router in (*ROUTERS, console.routes()) for route in router.routes]
    routes += [route for route in served.routes if hasattr(route, "methods")]
    found = [(method, route.path) for route in routes for method in sorted(route.methods)]
    assert {path.replace(":path", "") for _, path in found} >= set(served.openapi()["paths"])
    return list(dict.fromkeys(found))


def filled(path: str) -> str:
    return re.sub("{.*}", "lm", path)


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_every_route_opens_to_its_scopes_alone() -> None:
    served = app(*(Key(name=scope, sha256=hash_of(scope.encode()), scopes=frozenset((scope,))) for scope in SCOPES))
    routes = everything(served)
    assert {path for _, path in routes} >= OPEN | ANY | METRICS | ADMIN | INFER
    for scope in SCOPES:
        answers = ask(served, [(method, filled(path), bearer(scope)) for method, path in routes])
        for (method, path), answer in zip(routes, answers, strict=True):
            needed = expected(path)
            denied = bool(needed) and scope not in needed
            assert (answer.status_code == 403) == denied, f"{method} {path} with {scope}: {answer.status_code}"
            if denied and method != "HEAD":
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("permission_error", "insufficient_scope")
                assert scope in error["message"]
    answers = ask(served, [(method, filled(path), {}) for method, path in routes])
    for (method, path), answer in zip(routes, answers, strict=True):
        assert (answer.status_code == 401) == bool(expected(path)), f"{method} {path} without a key"


def test_a_key_may_have_several_scopes_or_none() -> None:
    both = Key(name="both", sha256=hash_of(b"both"), scopes=frozenset(("infer", "metrics")))
    none = Key(name="none", sha256=hash_of(b"none"), scopes=frozenset())
    asked = [("GET", "/metrics"), ("POST", "/v1/completions"), ("POST", "/v1/models/lm/load"), ("GET", "/version")]
    found = ask(app(both, none), [(m, p, bearer(key)) for key in ("both", "none") for m, p in asked])
    assert [answer.status_code == 403 for answer in found] == [False, False, True, False, True, True, True, True]


def router_of(nested: bool) -> APIRouter:
    """A router with a route that asks for nothing, its own or that of one it includes."""
    router = APIRouter()
    router.add_api_route("/v1/new", lambda: None)
    if not nested:
        return router
    outer = APIRouter()
    outer.include_router(router)
    return outer


@pytest.mark.parametrize("router", [router_of(nested=False), router_of(nested=True)], ids=["own", "nested"])
def test_a_route_that_names_no_scope_does_not_start(router: APIRouter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycore.server.app.ROUTERS", (*ROUTERS, router))
    with pytest.raises(TypeError, match="names no scope"):
        app()


def test_without_keys_what_an_admin_does_is_for_this_machine() -> None:
    routes = everything(app())
    for client, allowed in (("127.0.0.1", True), ("::1", True), (ELSEWHERE, False), ("2001:db8::1", False)):
        answers = ask(app(), [(method, filled(path), {}) for method, path in routes], client)
        for (method, path), answer in zip(routes, answers, strict=True):
            refused = answer.status_code == 403
            assert refused == (not allowed and path in ADMIN), f"{method} {path} from {client}"
            assert not refused or answer.json()["error"]["code"] == "needs_key"


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:3000", True),
        ("http://[::1]:8000", True),
        ("https://evil.example", False),
        ("http://localhost.evil.example", False),
        ("http://[", False),
        ("null", False),
        ("", False),
    ],
)
def test_without_keys_no_other_sites_page_is_an_admin(origin: str, allowed: bool) -> None:
    """A POST without a body is sent by browsers for any page, whatever CORS says."""
    (answer,) = ask(app(), [("POST", "/v1/models/lm/unload", {"origin": origin})])
    assert answer.status_code == (404 if allowed else 403)
    key = Key(name="a", sha256=hash_of(b"a"), scopes=frozenset(("admin",)))
    (answer,) = ask(app(key), [("POST", "/v1/models/lm/unload", {"origin": origin, **bearer("a")})], ELSEWHERE)
    assert answer.status_code == 404  # the page knows the key: whoever put it there meant it
