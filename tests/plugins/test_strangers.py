"""Serving on the CPU, with everything installed beside it that a plugin can do wrong, each with a higher priority."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from installed import anycore, install
from server.harness import serve_process

BACKEND = """
from anycore import hookimpl
from anycore.contract.declare import BackendSpec, Device, Level, Probe, Support, Task

ROWS = [(tuple(Task), "causal"), ((Task.EMBED, Task.RERANK), "bidirectional")]
FEATURES = ("chunked_prefill", "prefix_caching", "token_types")

def probe():
    {probe}

def open_device(index):
    raise OSError("the device is there and does not answer")

@hookimpl
def register_backends():
    rows = tuple(Support(t, a, ("float32",), Level.NATIVE, features=FEATURES) for t, a in ROWS)
    return [BackendSpec("{name}", {api}, rows, probe, open_device, priority=99)]
"""
SEEN = 'return Probe(devices=(Device(0, "stranger", "chip", 2**33),))'


def code(name: str, api: tuple[int, int] = (1, 0), probe: str = SEEN) -> str:
    return BACKEND.format(name=name, api=api, probe=probe)


STRANGERS = {
    "broken": ('raise ImportError("libstrange.so.3: cannot open shared object file")', "libstrange.so.3: cannot open"),
    "leaves": ("import os, sys\nsys.exit(3)", "SystemExit: 3"),
    "hangs": ("import time\ntime.sleep(600)", "did not answer within"),
    "duplicate": (code("cpu"), "the name is already taken by anycore"),
    "future": (code("future", api=(9, 0)), "needs contract 9.0"),
    "blind": (code("blind", probe="import time; time.sleep(600)"), "did not answer within"),
    "raises": (code("raises", probe="raise OSError('no such bus')"), "OSError: no such bus"),
    "shut": (code("shut"), "the device is there and does not answer"),
}
"""What each plugin does, and what is told of it."""


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of them installed."""
    folder = tmp_path_factory.mktemp("crowd")
    for name, (text, _) in STRANGERS.items():
        install(folder, f"{name}-device", "1.0", name, f"stranger_{name}", text)
    return folder


SECONDS = {"ANYCORE_PLUGIN_SECONDS": "1"}
WORDS = ["--dtype", "float32", "--max-model-len", "64"]


@pytest.mark.slow
def test_h01_h03_auto_takes_the_cpu_and_tells_of_every_stranger(crowd: Path, t_lm: Path) -> None:
    done = anycore("generate", str(t_lm), "Paris", *WORDS, "--max-tokens", "3", path=crowd, env=SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    for name, (_, told) in STRANGERS.items():
        assert told in done.stderr, f"{name} is not told of:\n{done.stderr}"
    assert "falling back to cpu (--backend auto): backend shut (shut-device 1.0) cannot open device 0" in done.stderr


def test_h01_the_matrix_tells_of_every_stranger(crowd: Path) -> None:
    done = anycore("matrix", path=crowd, env=SECONDS)
    assert done.returncode == 0, done.stderr
    for name, (_, told) in STRANGERS.items():
        assert told in done.stdout or name == "shut", f"{name} is not told of:\n{done.stdout}"
    assert any(line.startswith("cpu (anycore ") for line in done.stdout.splitlines())


@pytest.mark.slow
def test_h06_an_explicit_backend_that_does_not_open_is_refused_and_not_replaced(crowd: Path, t_lm: Path) -> None:
    done = anycore("generate", str(t_lm), "Paris", *WORDS, "--backend", "shut", path=crowd, env=SECONDS)
    assert done.returncode != 0
    assert "the device is there and does not answer" in done.stderr
    assert "falling back" not in done.stderr


@pytest.mark.slow
def test_serving_on_the_cpu_goes_on_with_strangers_beside_it(crowd: Path, t_bert: Path) -> None:
    path = os.pathsep.join(filter(None, [str(crowd), os.environ.get("PYTHONPATH", "")]))
    words = [str(t_bert), "--task", "embed", "--dtype", "float32", "--backend", "cpu", "--served-model-name", "small"]
    with serve_process(*words, env={"PYTHONPATH": path, **SECONDS}) as live:
        reply = live.post("/v1/embeddings", {"model": "small", "input": "Paris"})
        assert reply.status_code == 200
        assert live.get("/v1/models").json()["data"][0]["backend"] == "cpu"
