"""Keys: where they come from, what they guard, and that they show up nowhere."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from server.fake_child import scripted
from server.harness import Live, serve_here, serve_scripted

from anycore.config import ModelConfig, ServerConfig, shown
from anycore.errors import ConfigError
from anycore.server.auth import read_keys

KEY, OTHER = "key-7a31c9", "schlüssel-2"
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/lm"),
    ("GET", "/v1/capabilities"),
    ("GET", "/version"),
    ("GET", "/metrics"),
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/no/such/route"),
    ("POST", "/v1/completions"),
    ("POST", "/health/../v1/completions"),
]


@pytest.fixture(scope="module")
def live(t_lm: Path) -> Iterator[Live]:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",))
    with serve_here(model, keys=(KEY, OTHER), launch=scripted(str(t_lm))) as live:
        yield live


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_every_route_needs_a_key(live: Live, method: str, path: str) -> None:
    for header in (None, "Bearer wrong", "Bearer", f"Basic {KEY}", KEY, f"Bearer {KEY}x", f"Bearer {KEY[:-1]}"):
        headers = {} if header is None else {"authorization": header}
        response = httpx.request(method, live.url + path, headers=headers, verify=False)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text


def test_keys_open_and_probes_need_none(live: Live) -> None:
    for key in (KEY, OTHER):
        assert live.get("/v1/models", headers={"authorization": b"bearer " + key.encode()}).status_code == 200
    for path in ("/health", "/ready", "/ping"):
        assert live.get(path).status_code == 200
        assert live.get(path + "/").status_code == 401


def test_keys_come_from_flag_environment_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# comment\nfrom-file\n\n  spaced  \n")
    config = ServerConfig(api_key=("from-flag",), api_key_file=str(file))
    keys, secrets = read_keys(config, {"ANYCORE_API_KEY": "env-1, env-2, from-flag,"})
    assert [key.name for key in keys] == ["flag-1", "env-1", "env-2", "line-1", "line-2"]
    assert secrets == ["from-flag", "env-1", "env-2", "from-flag", "from-file", "spaced"]
    assert read_keys(ServerConfig(), {"ANYCORE_API_KEY": ""}) == ([], [])
    file.write_text("first\n", encoding="utf-8-sig")  # as Windows' tools write it
    assert read_keys(ServerConfig(api_key_file=str(file)), {}).secrets == ["first"]


def test_a_key_that_would_open_to_all_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    for config in (
        ServerConfig(api_key=(" ",)),
        ServerConfig(api_key_file=str(tmp_path / "empty")),
        ServerConfig(api_key_file=str(tmp_path / "absent")),
    ):
        with pytest.raises(ConfigError) as caught:
            read_keys(config, {})
        assert caught.value.param in ("api_key", "api_key_file")


def test_o06_secrets_and_prompts_are_nowhere(t_lm: Path, tmp_path: Path) -> None:
    token, marker = "hf_secret_9911", "marker-prompt-5577"
    file = tmp_path / "keys"
    file.write_text(KEY + "\n")
    environment = {"ANYCORE_API_KEY": "env-key-8123", "HF_TOKEN": token, "ANYCORE_CACHE": str(tmp_path / "cache")}
    settings = {"api_key_file": str(file), "log_level": "debug", "engine_restarts": "0"}
    with serve_scripted(t_lm, "fail_step=8", env=environment, **settings) as live:
        headers = {"authorization": f"Bearer {KEY}"}
        bodies = [live.get("/metrics", headers=headers).text]
        listing = subprocess.run(["ps", "-A", "-o", "args="], capture_output=True, text=True, check=True).stdout
        for body in ({"prompt": marker, "max_tokens": 2}, {"prompt": marker, "max_tokens": "x"}, {"prompt": marker}):
            bodies.append(live.post("/v1/completions", {"model": "lm", **body}, headers=headers).text)
        wrong = {"authorization": "Bearer env-key-8123-wrong"}
        bodies.append(live.get("/v1/models", headers=wrong).text)
        assert live.exit_code(20) == 1  # the engine crashed in its eighth step
    log = "".join(live.output)
    assert "fail" in log
    for secret in (KEY, "env-key-8123", token):
        assert secret not in log + listing
        assert not any(secret in body for body in bodies)
    assert marker not in log
    assert not any(marker in body for body in bodies[1:])
    cached = [path.read_bytes() for path in tmp_path.rglob("cache/**/*") if path.is_file()]
    assert not any(secret.encode() in data for data in cached for secret in (KEY, token, marker))


def test_o06_settings_show_stars() -> None:
    config = ServerConfig(api_key=(KEY,))
    assert KEY not in repr(config)
    assert shown(config) == {"api_key": "***"}
