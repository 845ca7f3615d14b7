"""The files of docs/deploy against the program: flags, settings, routes, variables; and one server is started so."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml
from docs.deploying import FOLDER, KINDS, ROLES, compose, dockerfile, entry_point, last, tool, unit, variables
from docs.pages import ROOT
from installed import anycore, own_cache
from server.harness import serve_process

from anycore.cli.main import parser_of
from anycore.cli.settings import gather, read_file
from anycore.config import ENVIRONMENT, ServerConfig
from anycore.errors import ConfigError, Unsupported
from anycore.server.auth import OPEN_ROUTES, Guard
from anycore.server.reload import Reload

GRACE = ServerConfig().shutdown_timeout
DIGEST = re.compile(r"@sha256:[0-9a-f]{64}(?=\}?$)")


def served(words: list[str]) -> ServerConfig:
    """Read a command line as the program does."""
    assert words[0].rsplit("/", 1)[-1] == "anycore"
    assert words[1] == "serve"
    options = parser_of("serve").read(words[2:])
    options.config = None  # a path of another machine
    options.model = getattr(options, "model", "demo")
    return gather(options).server


@pytest.mark.parametrize("kind", KINDS)
def test_images_serve_to_the_outside_what_they_are_told_to(kind: str) -> None:
    server = served([*entry_point(kind), *json.loads(last(kind, "CMD"))])
    assert server.host == "0.0.0.0"
    assert str(server.port) == last(kind, "EXPOSE")
    probed = re.search(r"http://127.0.0.1:(\d+)(/\w+)", last(kind, "HEALTHCHECK"))
    assert probed is not None
    assert int(probed[1]) == server.port
    assert probed[2] in OPEN_ROUTES


@pytest.mark.parametrize("kind", KINDS)
def test_images_run_as_a_user_who_may_write_the_cache_and_nothing_else(kind: str) -> None:
    user = last(kind, "USER").split(":")
    runs = " ".join(argument for name, argument in dockerfile(kind) if name == "RUN")
    assert user[0] == user[1] != "0"
    assert f"useradd --uid {user[0]} --gid {user[1]}" in runs
    assert f"install -d -o {user[0]} -g {user[1]} /cache " in runs
    kept = {name: value for name, value in variables(kind).items() if "/cache" in value}
    assert kept.keys() >= {"HOME", "ANYCORE_CACHE", "HF_HOME"}
    assert all(value == "/cache" or value.startswith("/cache/") for value in kept.values())
    names = [name for name, _ in dockerfile(kind)]
    assert names.index("USER") > len(names) - 1 - names[::-1].index("COPY")  # what is copied stays root's


@pytest.mark.parametrize("kind", KINDS)
def test_bases_are_arguments_and_have_digests(kind: str) -> None:
    bases = [argument for name, argument in dockerfile(kind) if name == "FROM"]
    assert bases == ["${BASE} AS build", "${BASE}"]
    given = next(argument for name, argument in dockerfile(kind) if name == "ARG" and argument.startswith("BASE"))
    assert given == "BASE" or DIGEST.search(given)


def test_other_images_have_digests() -> None:
    for name in ("prometheus", "grafana"):
        assert DIGEST.search(compose()[name]["image"])


@pytest.mark.parametrize("kind", KINDS)
def test_builds_see_what_they_copy_and_no_more(kind: str) -> None:
    text = (FOLDER / "docker" / f"{kind}.Dockerfile.dockerignore").read_text()
    assert text == (FOLDER / "docker" / "cpu.Dockerfile.dockerignore").read_text()
    seen = {line[1:] for line in text.splitlines() if line.startswith("!")}
    copies = [
        argument.split()[:-1] for name, argument in dockerfile(kind) if name == "COPY" and "--from" not in argument
    ]
    assert {path for paths in copies for path in paths} == seen
    assert all((ROOT / path).exists() for path in seen)


def test_variables_are_known() -> None:
    named = {name for kind in KINDS for name in variables(kind)}
    named |= {pair.split("=")[0] for line in unit()["Environment"] for pair in line.split()}
    named |= set(compose()["anycore"]["environment"])
    assert named <= {*ENVIRONMENT, *ROLES}
    assert {"ANYCORE_CACHE", "HF_HOME"} <= named


def test_compose_gives_the_server_what_it_needs() -> None:
    service = compose()["anycore"]
    server = served([*entry_point("cpu"), *service["command"]])
    mounts = [volume.split(":") for volume in service["volumes"]]
    targets = {target for _, target, *_ in mounts}
    options = parser_of("serve").read([*entry_point("cpu")[2:], *service["command"]])
    assert {options.config, server.api_key_file, "/cache"} == targets
    assert int(service["stop_grace_period"].removesuffix("s")) > GRACE
    assert service["read_only"]
    assert service["tmpfs"] == ["/tmp"]
    assert service["ports"] == [
        f"127.0.0.1:{server.port}:{server.port}"
    ]  # open only here: the pages say how to change it
    for name in ("anycore", "prometheus", "grafana"):
        for source, *_ in (volume.split(":") for volume in compose()[name]["volumes"]):
            made = source in ("./keys.yaml", "./prometheus.key")  # by `anycore key new`, as the page says
            assert made or not source.startswith(".") or (FOLDER / "compose" / source).exists(), source
    build = compose("compose.cuda.yaml")["anycore"]["build"]["dockerfile"]
    assert (ROOT / build).exists()
    assert (ROOT / service["build"]["dockerfile"]).exists()


def test_composed_monitoring_finds_the_server_and_the_dashboard() -> None:
    config = yaml.safe_load((FOLDER / "compose" / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["job_name"] == "anycore"  # the rules ask for it
    assert job["static_configs"] == [{"targets": ["anycore:8000"]}]
    mounted = [volume.split(":")[1] for volume in compose()["prometheus"]["volumes"]]
    assert job["authorization"]["credentials_file"] in mounted
    assert [f"/etc/prometheus/{name}" for name in config["rule_files"]] == [m for m in mounted if "rules" in m]
    provisioning = FOLDER / "compose" / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "anycore.yml").read_text())["providers"]
    dashboards = [volume.split(":")[1] for volume in compose()["grafana"]["volumes"] if ".json" in volume]
    assert [path.rsplit("/", 1)[0] for path in dashboards] == [provider["options"]["path"]]


def test_the_unit_starts_reloads_and_stops_as_the_server_does() -> None:
    (start,), (reload,) = unit()["ExecStart"], unit()["ExecReload"]
    server = served(start.split())
    sources = "".join(path.read_text() for path in (ROOT / "framework" / "anycore" / "server").glob("*.py"))
    assert unit()["Type"] == (["notify"] if "NOTIFY_SOCKET" in sources else ["exec"])
    assert reload.endswith("kill -HUP $MAINPID")
    assert Reload(server, Guard([]), None).is_needed  # else SIGHUP would end it
    assert int(unit()["TimeoutStopSec"][0]) > server.shutdown_timeout
    assert unit()["RestartPreventExitStatus"] == [f"{ConfigError.exit_code} {Unsupported.exit_code}"]
    (folder,) = unit()["CacheDirectory"]
    paths = [pair.split("=")[1] for line in unit()["Environment"] for pair in line.split()]
    assert all(Path(path).is_relative_to(f"/var/cache/{folder}") for path in paths)


def test_the_composed_server_starts_reloads_and_stops(t_lm: Path, t_bert: Path, tmp_path: Path) -> None:
    """The image's entry point, its variables, compose's command and settings; tiny models in the place of the real."""
    settings = yaml.safe_load((FOLDER / "compose" / "models.yaml").read_text())
    for model, folder in zip(settings["models"], (t_lm, t_bert), strict=True):
        model |= {"model": str(folder), "kv-cache-memory": "8MiB", "threads": 1}
        model.pop("max-model-len", None)
    (tmp_path / "models.yaml").write_text(yaml.safe_dump(settings))
    keys = tmp_path / "keys.yaml"
    secrets = [
        anycore("key", "new", name, "--scopes", name, "--file", str(keys)).stdout.strip()
        for name in ("infer", "metrics")
    ]
    words = [*entry_point("cpu")[2:], *compose()["anycore"]["command"]]
    words = [word.replace("/etc/anycore", str(tmp_path)) for word in words]
    own_cache(tmp_path / "cache" / "anycore")
    home = {name: value.replace("/cache", str(tmp_path / "cache")) for name, value in variables("cpu").items()}
    home |= {"XDG_RUNTIME_DIR": str(tmp_path)}
    del home["PATH"]
    infer, metrics = ({"authorization": f"Bearer {secret}"} for secret in secrets)
    with serve_process(*words, env=home) as live:
        assert {live.get(route).status_code for route in sorted(OPEN_ROUTES)} == {200}
        asked = {"model": "chat", "prompt": [5], "max_tokens": 2}
        assert live.post("/v1/completions", asked).status_code == 401
        assert live.post("/v1/completions", asked, headers=infer).status_code == 200
        assert live.post("/v1/embeddings", {"model": "embed", "input": "a"}, headers=infer).status_code == 200
        assert "anycore:num_requests_waiting" in live.get("/metrics", headers=metrics).text
        keys.write_text("".join(line for line in keys.read_text().splitlines(True) if "metrics" in line))
        live.signal(signal.SIGHUP)
        live.wait(lambda: live.post("/v1/completions", asked, headers=infer).status_code == 401, 5)
        live.signal(signal.SIGTERM)
        assert live.exit_code() == 0
    assert [path.name for path in (tmp_path / "cache").iterdir()] == ["anycore"]


def test_settings_of_compose_are_settings() -> None:
    assert len(read_file(FOLDER / "compose" / "models.yaml").models) == 2


@pytest.mark.skipif(not tool("hadolint"), reason="no hadolint: see ci/deploy_tools")
def test_hadolint_finds_nothing_in_the_dockerfiles(tmp_path: Path) -> None:
    files = [FOLDER / "docker" / f"{kind}.Dockerfile" for kind in KINDS]
    done = subprocess.run(["hadolint", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN cd /tmp && pip install torch\n")
    assert subprocess.run(["hadolint", tmp_path / "Dockerfile"], capture_output=True, check=False).returncode == 1


@pytest.mark.skipif(not tool("docker-compose"), reason="no docker-compose: see ci/deploy_tools")
@pytest.mark.parametrize("more", [[], ["-f", "compose.cuda.yaml"]], ids=["cpu", "cuda"])
def test_docker_compose_reads_the_files(more: list[str]) -> None:
    command = ["docker-compose", "-f", "compose.yaml", *more, "config", "-q"]
    done = subprocess.run(command, cwd=FOLDER / "compose", capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not tool("promtool"), reason="no promtool: see ci/promtool")
def test_promtool_accepts_the_composed_prometheus(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("ak-x")
    text = (
        (FOLDER / "compose" / "prometheus.yml")
        .read_text()
        .replace("/etc/prometheus/anycore-key", str(tmp_path / "key"))
    )
    (tmp_path / "prometheus.yml").write_text(text)
    (tmp_path / "rules.yml").write_text((FOLDER / "observability" / "rules.yml").read_text())
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not tool("systemd-analyze"), reason="no systemd-analyze: Debian's package systemd has it")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    text = (FOLDER / "systemd" / "anycore.service").read_text()
    path = tmp_path / "anycore.service"
    for line, code in (("", 0), ("Typ=exec\n", 0), ("ExecStart=serve\n", 1)):
        path.write_text(
            text.replace("/opt/anycore/bin/anycore", "/bin/true").replace("Type=exec\n", f"Type=exec\n{line}")
        )
        command = ["systemd-analyze", "verify", "--man=no", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == code, done.stderr
        assert bool(done.stderr) == bool(line), done.stderr  # an unknown key is only warned of
