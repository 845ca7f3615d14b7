"""Addresses of servers, as flags give them."""

from __future__ import annotations

from urllib.parse import urlsplit

from anycore.config import flag
from anycore.errors import ConfigError


def address(url: str, name: str) -> str:
    """Return the address of a server without a slash at its end.

    Raises:
        ConfigError: it is none; `name` is the flag's.
    """
    try:
        parts = urlsplit(url)
        plain = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0  # the port is read here
    except ValueError:  # a port that is none, half an IPv6 address
        plain = False
    if not plain or not url.isprintable() or set(url) & set(" ?#"):
        raise ConfigError(
            f"{flag(name)} must be an address such as http://127.0.0.1:8000/v1, with http:// or https://, not {url!r}",
            param=name,
        )
    return url.rstrip("/")
