"""The listening socket, opened before anything slow, so that a port in use is known at once."""

from __future__ import annotations

import errno
import socket

from anycore.errors import ConfigError

BACKLOG = 2048


def listen(host: str, port: int, *, shared: bool = False, begin: bool = True) -> socket.socket:
    """Bind and listen. Connections wait in the kernel until the server takes them.

    A `shared` port may be listened to by several processes, among which the kernel divides connections. Without
    `begin` the port is bound and gets no connections yet.

    Raises:
        ConfigError: the port is in use or reserved, or the host is no address of this machine.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host!r} cannot be resolved: {error}", param="host") from error
    if not host:
        raise ConfigError("--host must not be empty; 0.0.0.0 listens on every address", param="host")
    family, kind, protocol, _, address = min(found, key=lambda entry: entry[0] is not socket.AF_INET)  # localhost: IPv4
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # restart right after a stop
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # `::` takes IPv4 too
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        if begin:
            listener.listen(BACKLOG)  # now, not later: two sockets may be bound to one port, but only one may listen
    except OSError as error:
        listener.close()
        raise _explain(error, host, port) from error
    return listener


def url_of(listener: socket.socket, secure: bool = False) -> str:
    """Return the address that clients on this machine use."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    scheme = "https" if secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _explain(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use: stop what listens there, or choose another --port (0 takes a free one)",
            param="port",
        )
    if error.errno == errno.EACCES:
        return ConfigError(f"port {port} needs privileges that this user lacks: choose --port above 1023", param="port")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror}", param="host")
