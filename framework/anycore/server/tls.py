"""TLS as the server speaks it: one context, whose certificate can be replaced while it is in use."""

from __future__ import annotations

import ssl

from anycore.config import ServerConfig
from anycore.errors import ConfigError


class Certificate:
    """The certificate of --ssl-certfile and what clients must show."""

    def __init__(self, config: ServerConfig) -> None:
        """
        Raises:
            ConfigError: a file cannot be read, or key and certificate do not belong together.
        """
        assert config.ssl_certfile is not None
        self._files = (config.ssl_certfile, config.ssl_keyfile)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self._load(self.context)
        if config.ssl_ca_certs is not None:
            try:
                self.context.load_verify_locations(config.ssl_ca_certs)
            except OSError as error:
                raise ConfigError(
                    f"--ssl-ca-certs {config.ssl_ca_certs} cannot be read: {_reason(error)}", param="ssl_ca_certs"
                ) from error
            self.context.verify_mode = ssl.CERT_REQUIRED

    def reload(self) -> None:
        """Read the files again, for connections that begin from now on.

        Raises:
            ConfigError: they cannot be used; the certificate stays as it was.
        """
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))  # first where nothing can be broken
        self._load(self.context)

    def _load(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
        except OSError as error:  # ssl.SSLError is one
            named = certificate if key is None else f"{certificate} with --ssl-keyfile {key}"
            raise ConfigError(
                f"--ssl-certfile {named} cannot be used: {_reason(error)}", param="ssl_certfile"
            ) from error


def certificate_of(config: ServerConfig) -> Certificate | None:
    return None if config.ssl_certfile is None else Certificate(config)


def _no_password() -> str:
    raise OSError("the private key has a password; a server that starts by itself needs one without")


def _reason(error: OSError) -> str:
    return error.strerror or getattr(error, "reason", None) or str(error)
