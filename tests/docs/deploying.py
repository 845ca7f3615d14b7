"""The files of docs/deploy, read: instructions of Dockerfiles, the unit's settings, command lines, rendered charts."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.pages import ROOT

FOLDER = ROOT / "docs" / "deploy"
KINDS = ("cpu", "cuda", "ascend")
CHART = FOLDER / "helm" / "anycore"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
ROLES = {"HOME", "PATH", "HF_HOME", "HF_HUB_OFFLINE", "TRITON_CACHE_DIR", "XDG_RUNTIME_DIR"}
ROLES |= {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES"}
"""Variables that files may set although anycore does not list them: other programs read them."""


def tool(name: str) -> bool:
    return shutil.which(name) is not None


needs_helm = pytest.mark.skipif(not tool("helm"), reason="no helm: see ci/deploy_tools")


def dockerfile(kind: str) -> list[tuple[str, str]]:
    """Instructions of a Dockerfile with their arguments, continued lines joined."""
    text = (FOLDER / "docker" / f"{kind}.Dockerfile").read_text()
    text = re.sub(r"^#.*\n", "", text, flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def last(kind: str, instruction: str) -> str:
    """The last argument of an instruction: what holds for the image."""
    return [argument for name, argument in dockerfile(kind) if name == instruction][-1]


def entry_point(kind: str) -> list[str]:
    """The words that start the server, without what a shell does before."""
    words: list[str] = json.loads(last(kind, "ENTRYPOINT"))
    if words[:2] == ["/bin/bash", "-c"]:
        script = words[2].split("exec ", 1)[1]
        assert script.endswith(' "$@"')
        assert len(words) == 4  # $0, so that "$@" holds all that follows
        words = shlex.split(script.removesuffix(' "$@"'))
    return words


def variables(kind: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(last(kind, "ENV")))


def compose(name: str = "compose.yaml") -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load((FOLDER / "compose" / name).read_text())["services"]
    return services


def unit() -> dict[str, list[str]]:
    """The values of each key of the systemd unit."""
    found: dict[str, list[str]] = {}
    for line in (FOLDER / "systemd" / "anycore.service").read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def helm(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["helm", *map(str, words)], capture_output=True, text=True, timeout=60, check=False)


def render(*words: str | Path) -> dict[str, dict[str, Any]]:
    """The chart's objects by kind, of config maps only the settings."""
    done = helm("template", "chat", CHART, "--namespace", "models", *words)
    assert done.returncode == 0, done.stderr
    objects = [found for found in yaml.safe_load_all(done.stdout) if found]
    return {found["kind"]: found for found in objects if not found["metadata"]["name"].endswith("-dashboard")}


def leaves(values: dict[str, Any], place: str = "") -> Iterator[str]:
    """Names of values, as templates spell them; maps that are handed on whole are one."""
    for name, value in values.items():
        nested = isinstance(value, dict) and place + name not in ("config", "strategy", "resources")
        if nested and value and "labels" not in name:
            yield from leaves(value, f"{place}{name}.")
        else:
            yield place + name
