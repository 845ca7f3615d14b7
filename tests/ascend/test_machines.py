"""Other machines: chips, CANN versions, device counts and memory sizes; no device, no CANN, no memory left.

Each is a process of its own on a scripted machine, started as a user starts it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from rig.machine import A2, A3, INFERENCE, Machine
from server.harness import serve_process

LIBRARIES = Path(os.environ.get("STANDIN_LIBRARIES", "."))

EMBED = """
import sys, json
from pathlib import Path
from engines import engine, run
made = engine(Path(sys.argv[1]), backend="ascend", dtype="float16", device=int(sys.argv[2]))
output = run(made, [[7, 8, 9]])[0]
print(json.dumps({"tokens": output.tokens, "device": str(made.runner.backend.device), "blocks": made.pool.size}))
"""


def python(code: str, *words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (Path(__file__).parent.parent,)))
    environ = {**env, "PYTHONPATH": paths}
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=environ, timeout=200, check=False)


def anycore(*words: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "anycore.cli.main", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=200, check=False)


def probed(env: dict[str, str]) -> dict[str, Any]:
    """What `anycore doctor` says about the backend."""
    found = json.loads(anycore("doctor", "--json", env=env).stdout)
    return next(backend["probe"] for backend in found["backends"] if backend["name"] == "ascend")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_lm(tmp_path_factory.mktemp("t-lm"), layers=1, kv_heads=1)


@pytest.mark.parametrize(
    ("machine", "index"),
    [(A2, 0), (replace(A3, devices=2), 1), (replace(A2, soc="Ascend910B4", cann="8.5.0", memory_mib=1792), 0)],
    ids=["910B3", "910C-second-of-two", "910B4-cann-8.5-1792MiB"],
)
def test_generates_on_other_machines(model: Path, tmp_path: Path, machine: Machine, index: int) -> None:
    done = python(EMBED, str(model), str(index), env=machine.write(tmp_path / "machine", LIBRARIES))
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["device"] == f"npu:{index}"
    assert len(found["tokens"]) == 12


@pytest.mark.parametrize("devices", [1, 3])
def test_devices_are_found_with_name_and_memory(tmp_path: Path, devices: int) -> None:
    probe = probed(replace(A2, devices=devices, memory_mib=65536).write(tmp_path / "machine", LIBRARIES))
    assert [device["index"] for device in probe["devices"]] == list(range(devices))
    assert {device["chip"] for device in probe["devices"]} == {"910B"}
    assert {device["memory"] for device in probe["devices"]} == {2**36}
    assert probe["versions"]["cann"].startswith("9.1.0")


def test_h01_no_device_is_said_in_words_of_npus(tmp_path: Path) -> None:
    probe = probed(replace(A2, devices=0).write(tmp_path / "machine", LIBRARIES))
    assert not probe["devices"]
    assert "/dev/davinci" in probe["reason"]
    assert "driver" in probe["advice"]
    assert "GPU" not in probe["reason"] + probe["advice"]


def test_h01_cann_without_its_environment_is_said_and_the_script_named(model: Path, tmp_path: Path) -> None:
    env = A2.write(tmp_path / "machine", LIBRARIES)
    for name in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "ASCEND_OPP_PATH", "LD_LIBRARY_PATH"):
        del env[name]
    done = anycore("serve", str(model), "--backend", "ascend", "--port", "0", env=env)
    assert done.returncode != 0
    assert "set_env.sh" in done.stderr + done.stdout


def test_h03_an_old_driver_and_an_old_cann_are_refused_with_what_is_needed(tmp_path: Path) -> None:
    old_driver = probed(replace(A2, driver="23.0.1").write(tmp_path / "driver", LIBRARIES))
    assert "23.0.1" in old_driver["reason"]
    assert "needs" in old_driver["reason"]
    old_cann = probed(replace(A2, cann="7.0.0").write(tmp_path / "cann", LIBRARIES))
    assert "7.0.0" in old_cann["reason"]
    assert not old_driver["devices"]
    assert not old_cann["devices"]


def test_h08_a_chip_that_is_not_supported_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "model", layers=1)
    (folder / "model.safetensors").write_bytes(b"not read")
    env = INFERENCE.write(tmp_path / "machine", LIBRARIES)
    done = anycore("serve", str(folder), "--backend", "ascend", "--port", "0", env=env)
    assert done.returncode != 0
    assert "310P" in done.stderr + done.stdout


def test_genuine_lack_of_memory_is_an_error_with_numbers(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "model", layers=2)
    env = replace(A2, memory_mib=24).write(tmp_path / "machine", LIBRARIES)
    done = anycore("serve", str(folder), "--backend", "ascend", "--port", "0", "--kv-cache-memory", "64MiB", env=env)
    assert done.returncode != 0
    said = done.stderr + done.stdout
    assert "MiB" in said
    assert "Traceback" not in said


def test_the_server_answers_on_ascend(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path / "model", layers=1)
    env = A2.write(tmp_path / "machine", LIBRARIES)
    words = ("--backend", "ascend", "--dtype", "float16", "--kv-cache-memory", "4MiB", "--served-model-name", "lm")
    with serve_process(str(folder), *words, env=env) as live:
        body = {"model": "lm", "prompt": "Paris is", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = live.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 8
        assert "ascend" in live.get("/v1/models").text


def test_an_embedding_server_answers_on_ascend(t_bert: Path, tmp_path: Path) -> None:
    env = A2.write(tmp_path / "machine", LIBRARIES)
    with serve_process(str(t_bert), "--backend", "ascend", "--served-model-name", "emb", env=env) as live:
        answer = live.post("/v1/embeddings", json={"model": "emb", "input": ["a river", "the capital"]}).json()
        assert [len(item["embedding"]) for item in answer["data"]] == [64, 64]
