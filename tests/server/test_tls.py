"""HTTPS: which certificate is shown, which clients are let in, and what SIGHUP changes. Certificates are made here."""

from __future__ import annotations

import shutil
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.fake_child import scripted
from server.harness import Live, serve_here, serve_scripted

from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError
from anycore.server.tls import Certificate

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="the openssl command is not installed: it makes certificates")


def make(folder: Path, name: str, *options: str) -> tuple[str, str]:
    """Make a certificate that signs itself, and its key; return their files."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    made = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2", "-subj", f"/CN={name}")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=critical,digitalSignature,keyCertSign")
    files = ("-out", str(certificate), "-keyout", str(key))
    command = [OPENSSL or "", "req", "-x509", *made, *names, *files, *(options or ("-nodes",))]
    subprocess.run(command, check=True, capture_output=True)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    found = {name: make(folder, name) for name in ("first", "second", "client", "stranger")}
    return found | {"locked": make(folder, "locked", "-passout", "pass:x")}


@pytest.fixture(scope="module")
def live(t_lm: Path, made: dict[str, tuple[str, str]]) -> Iterator[Live]:
    certificate, key = made["first"]
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    with serve_here(model, launch=scripted(str(t_lm)), ssl_certfile=certificate, ssl_keyfile=key) as live:
        yield live


def served(made: dict[str, tuple[str, str]], name: str, authority: str | None = None) -> Certificate:
    certificate, key = made[name]
    ca = made[authority][0] if authority else None
    return Certificate(ServerConfig(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=ca))


def shake(certificate: Certificate, client: ssl.SSLContext) -> bytes:
    """Have a client and the server meet without a network; return the certificate that was shown.

    Raises:
        ssl.SSLError: one of them would not.
    """
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(back, there, server_hostname="127.0.0.1"),
        certificate.context.wrap_bio(there, back, server_side=True),
    ]
    for _ in range(4):  # more turns than a handshake takes
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    shown = ends[0].getpeercert(binary_form=True)
    assert shown is not None
    return shown


def client(made: dict[str, tuple[str, str]], trusts: str, shows: str | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=made[trusts][0])
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # what Python 3.13 asks for
    if shows is not None:
        context.load_cert_chain(*made[shows])
    return context


def bytes_of(path: str) -> bytes:
    """What is shown on the wire of the certificate in a file."""
    return ssl.PEM_cert_to_DER_cert(Path(path).read_text())


def test_clients_that_trust_the_certificate_are_answered(live: Live, made: dict[str, tuple[str, str]]) -> None:
    assert live.url.startswith("https://")
    with httpx.Client(verify=client(made, "first")) as http:
        body = {"model": "lm", "prompt": [7], "max_tokens": 3}
        assert http.post(live.url + "/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert http.get(live.url + "/health").status_code == 200
    with httpx.Client(verify=client(made, "stranger")) as http, pytest.raises(httpx.ConnectError, match="self-signed"):
        http.get(live.url + "/health")


def test_plain_http_is_not_spoken_there_and_disturbs_nobody(live: Live) -> None:
    with pytest.raises(httpx.TransportError):
        httpx.get(live.url.replace("https", "http") + "/health")
    host, port = live.url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), 5):  # says nothing
        assert live.get("/health").status_code == 200


def test_old_versions_of_tls_are_not_spoken(made: dict[str, tuple[str, str]]) -> None:
    old = client(made, "first")
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    old.set_ciphers("ALL:@SECLEVEL=0")  # what would let the client
    assert shake(served(made, "first"), old)
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(ssl.SSLError, match=r"(?i)version|protocol"):
        shake(served(made, "first"), old)


def test_clients_must_show_a_certificate_where_authorities_are_named(made: dict[str, tuple[str, str]]) -> None:
    server = served(made, "first", authority="client")
    assert shake(server, client(made, "first", shows="client"))
    for shows in (None, "stranger"):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
            shake(server, client(made, "first", shows))


def test_files_that_cannot_be_used_are_named(made: dict[str, tuple[str, str]], tmp_path: Path) -> None:
    (first, key), (_, other), (locked, lock) = made["first"], made["second"], made["locked"]
    nothing = tmp_path / "empty.pem"
    nothing.touch()
    refused = [
        ({"ssl_certfile": first, "ssl_keyfile": other}, "(?i)mismatch"),
        ({"ssl_certfile": first}, "ssl-certfile"),
        ({"ssl_certfile": "absent.pem", "ssl_keyfile": key}, "absent.pem.* No such file"),
        ({"ssl_certfile": str(nothing), "ssl_keyfile": key}, "empty.pem"),
        ({"ssl_certfile": locked, "ssl_keyfile": lock}, "has a password"),
        ({"ssl_certfile": first, "ssl_keyfile": key, "ssl_ca_certs": "absent"}, "--ssl-ca-certs absent .*No such file"),
        ({"ssl_certfile": first, "ssl_keyfile": key, "ssl_ca_certs": str(nothing)}, "--ssl-ca-certs .*empty.pem"),
    ]
    for settings, said in refused:
        with pytest.raises(ConfigError, match=said):
            Certificate(ServerConfig(**settings))  # type: ignore[arg-type]
    for settings in ({"ssl_keyfile": key}, {"ssl_ca_certs": first}):
        with pytest.raises(ConfigError, match="needs --ssl-certfile"):
            ServerConfig(**settings)  # type: ignore[arg-type]


def test_sighup_shows_another_certificate_and_a_bad_one_changes_nothing(
    made: dict[str, tuple[str, str]], t_lm: Path, tmp_path: Path
) -> None:
    certificate, key = tmp_path / "server.pem", tmp_path / "server.key"

    def put(name: str) -> None:
        for source, target in zip(made[name], (certificate, key), strict=True):
            shutil.copyfile(source, target)

    put("first")
    with serve_scripted(t_lm, ready=False, ssl_certfile=str(certificate), ssl_keyfile=str(key)) as live:
        address = ("127.0.0.1", int(live.url.rsplit(":", 1)[1]))
        live.wait(lambda: live.get("/health").status_code == 200, 20)

        def shown() -> bytes:
            return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(address))

        assert shown() == bytes_of(made["first"][0])
        put("second")
        live.signal(signal.SIGHUP)
        live.wait(lambda: shown() == bytes_of(made["second"][0]), 20)
        shutil.copyfile(made["first"][0], certificate)  # without its key
        live.signal(signal.SIGHUP)
        live.wait(lambda: "the certificate stays as it was" in "".join(live.output), 20)
        assert shown() == bytes_of(made["second"][0])
        assert live.get("/health").status_code == 200
