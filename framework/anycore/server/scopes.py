"""What a key must be allowed to do for a route: each route names one of these among its dependencies.

A route that names none does not start: `create_app` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.routing import APIRoute
from starlette.routing import BaseRoute

from anycore.errors import Forbidden
from anycore.server.auth import is_open
from anycore.server.keys import Scope


class Needs:
    """Lets a request pass whose key has one of the scopes.

    Without keys everybody may do everything, but what an admin does, which only clients on this machine may, and of
    those no browser that shows another machine's page: such a page can send requests here, though not read the answer.
    """

    def __init__(self, *scopes: Scope) -> None:
        self.scopes = frozenset(scopes)

    async def __call__(self, request: Request) -> None:
        key = request.state.account.key
        named = " or ".join(sorted(self.scopes))
        if key is None:
            if self.scopes == {"admin"} and not is_of_this_machine(request):
                raise Forbidden(
                    "without keys this route is for clients on the server's own machine: set --api-key-file",
                    code="needs_key",
                )
        elif not key.scopes & self.scopes:
            has = ", ".join(sorted(key.scopes)) or "none"
            raise Forbidden(f"this route needs a key with scope {named}; key {key.name} has {has}")


def is_of_this_machine(request: Request) -> bool:
    """Whether both the client and, in a browser, the page that sends the request are this machine's."""
    origin = request.headers.get("origin")
    from_here = request.client is None or is_loopback(request.client.host)  # no client: a local socket
    return from_here and (origin is None or is_loopback(host_of(origin)))


def host_of(origin: str) -> str:
    try:
        return urlsplit(origin).hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


INFER = Depends(Needs("infer"))
METRICS = Depends(Needs("metrics"))
ADMIN = Depends(Needs("admin"))
ANY = Depends(Needs("infer", "metrics", "admin"))


def scopes_of(route: APIRoute) -> frozenset[Scope]:
    """Return what a route asks for; nothing for an open one."""
    asked = [d.dependency.scopes for d in route.dependencies if isinstance(d.dependency, Needs)]
    return frozenset().union(*asked)


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """Refuse routes that say nothing about scopes and are not open. FastAPI's own, such as /docs, take any key."""
    for route in routes:
        path = getattr(route, "path", repr(route))
        if not is_open(path) and not (isinstance(route, APIRoute) and scopes_of(route)):
            raise TypeError(f"{path} names no scope among its dependencies (server/scopes.py)")
