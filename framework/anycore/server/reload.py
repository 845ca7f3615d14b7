"""What SIGHUP does: keys and certificate are read again. What is wrong is said, and what was there before stays."""

from __future__ import annotations

import logging
from collections.abc import Callable

from anycore.config import ServerConfig
from anycore.errors import ConfigError
from anycore.server.auth import Guard, read_keys
from anycore.server.logs import hide
from anycore.server.tls import Certificate

log = logging.getLogger(__name__)


class Reload:
    """Called for each SIGHUP, between two turns of the event loop; requests under way notice nothing."""

    def __init__(
        self,
        config: ServerConfig,
        guard: Guard,
        certificate: Certificate | None,
        further: Callable[[], None] = lambda: None,
    ) -> None:
        """`further` lets the other fronts do the same."""
        self._config = config
        self._guard = guard
        self._certificate = certificate
        self._further = further

    @property
    def is_needed(self) -> bool:
        """Whether there is anything to read again; without, SIGHUP keeps its meaning: the terminal is gone."""
        return self._config.api_key_file is not None or self._certificate is not None

    def __call__(self) -> None:
        if self._config.api_key_file is not None:
            self._read_keys()
        if self._certificate is not None:
            self._read_certificate(self._certificate)
        self._further()

    def _read_keys(self) -> None:
        try:
            keys, secrets = read_keys(self._config)
        except ConfigError as error:
            log.error("keys stay as they were: %s", error.message)
            return
        hide(secrets)
        self._guard.replace(keys)
        log.info("%d keys: %s", len(keys), ", ".join(key.name for key in keys))

    def _read_certificate(self, certificate: Certificate) -> None:
        try:
            certificate.reload()
        except ConfigError as error:
            log.error("the certificate stays as it was: %s", error.message)
            return
        log.info("the certificate was read again; it is shown to connections from now on")
