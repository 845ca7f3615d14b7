"""The web console as files: what they are, how they are sent, and that nothing in them leads elsewhere."""

from __future__ import annotations

import re
from importlib.resources import files
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from hatchling.builders.wheel import WheelBuilder

from anycore.config import ServerConfig
from anycore.server.app import create_app
from anycore.server.auth import Guard
from anycore.server.console import TYPES
from anycore.server.keys import plain

FOLDER = Path(str(files("anycore"))) / "console"
NAMES = sorted(path.name for path in FOLDER.iterdir())
MOST_BYTES = 60_000


@pytest.fixture(scope="module")
def client() -> TestClient:
    """A server that asks for a key."""
    return TestClient(create_app(ServerConfig(), [], guard=Guard([plain("one", "secret")])))


def path_of(name: str) -> str:
    return "/" if name == "index.html" else f"/console/{name}"


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_open_typed_and_fenced_in(client: TestClient, name: str) -> None:
    response = client.get(path_of(name))
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[name.split(".")[-1]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["cache-control"] == "no-cache"
    rules = dict(rule.split(" ", 1) for rule in response.headers["content-security-policy"].split("; "))
    assert rules["default-src"] == rules["frame-ancestors"] == rules["base-uri"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"


def test_a_browser_that_has_a_file_is_not_sent_it_again(client: TestClient) -> None:
    etag = client.get("/").headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}'):
        again = client.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == etag
    assert client.get("/", headers={"if-none-match": '"other"'}).status_code == 200
    head = client.head("/")
    assert (head.status_code, head.content, head.headers["etag"]) == (200, b"", etag)


def test_only_the_files_are_open(client: TestClient) -> None:
    assert client.get("/v1/models").status_code == 401
    assert client.get("/console").status_code == 401
    for path in ("/console/", "/console/absent.js", "/console/index.html", "/console/%2e%2e/config.py"):
        assert client.get(path).status_code == 404
    assert client.get("/console/..%2fv1%2fmodels").status_code == 404
    assert client.post("/").status_code == 405


def test_it_can_be_left_out() -> None:
    client = TestClient(create_app(ServerConfig(console=False), []))
    assert {client.get(path_of(name)).status_code for name in NAMES} == {404}
    assert client.get("/v1/models").status_code == 200


def test_it_is_small_and_whole() -> None:
    texts = {name: (FOLDER / name).read_text(encoding="utf-8") for name in NAMES}
    assert sum(len(text.encode()) for text in texts.values()) < MOST_BYTES
    for name, text in texts.items():
        hosts = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not hosts, f"{name} names other hosts"
        for module in re.findall(r'(?:from|import) "\./(.+?)"', text):
            assert module in texts
    page = texts["index.html"]
    for path in re.findall(r'(?:src|href)="(?!#)(.+?)"', page):
        assert path.removeprefix("console/") in texts
    assert not re.findall(r"<script(?![^>]*\bsrc=)|\son\w+=|style=|<style", page)
    assert not re.findall(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Storage|cookie", "".join(texts.values())
    )


def test_a_wheel_carries_it() -> None:
    root = Path(__file__).parents[2]
    if not (root / "hatch_build.py").is_file():
        pytest.skip("not a source tree")
    carried = {entry.distribution_path for entry in WheelBuilder(str(root)).recurse_included_files()}
    assert {f"anycore/console/{name}" for name in NAMES} <= carried
