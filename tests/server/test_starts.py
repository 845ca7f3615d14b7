"""The start of a server: engine processes begin before they are told what to do, and the front imports no torch."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from server.harness import serve_process

from anycore.models.source import Source
from anycore.server import ahead, spares
from anycore.server.spares import Spares
from anycore.text.tokenizer import Tokenizer

WAITS = (sys.executable, "-c", "import sys; sys.stdin.read()")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what a process has loaded from /proc")
def test_the_front_has_no_torch_after_a_chat(t_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"ANYCORE_CACHE": str(tmp_path), "ANYCORE_CPU_KERNELS": "none"}  # nothing to compile
    monkeypatch.setenv("ANYCORE_CACHE", str(tmp_path))
    Tokenizer.from_source(Source(str(t_lm), t_lm))  # an earlier start
    words = (str(t_lm), "--backend", "cpu", "--max-model-len", "64", "--served-model-name", "lm")
    with serve_process(*words, env=own) as live:
        body = {"model": "lm", "messages": [{"role": "user", "content": "a b"}], "max_tokens": 2}
        reply = live.post("/v1/chat/completions", body)
        assert reply.status_code == 200, reply.text
        assert live.process is not None
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in (live.process.pid, *live.engines())]
    assert "libtorch" not in maps[0]
    assert any("libtorch" in loaded for loaded in maps[1:])  # so it would be seen


def test_a_spare_is_taken_once_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> tuple[list[int], list[int | None]]:
        waiting = Spares()
        await waiting.start(3)
        first = await waiting.take()
        left = list(waiting.processes)
        left[0].kill()
        await left[0].wait()
        second = await waiting.take()  # not the dead one
        third = await waiting.take()  # a new one
        await waiting.start(1)
        unused = waiting.processes[0]
        await waiting.end()
        taken = [first, second, third]
        alive = [process.returncode for process in taken]
        for process in taken:
            process.kill()
            await process.wait()
        assert second is left[1]
        assert unused.returncode == -9
        return [process.pid for process in taken], alive

    monkeypatch.setattr(spares, "COMMAND", WAITS)
    pids, alive = asyncio.run(run())
    assert len(set(pids)) == 3
    assert alive == [None, None, None]


def test_spares_are_not_told_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def run() -> bytes:
        process = await spares.start()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        return told.read_bytes()

    told = tmp_path / "told"
    program = f"import os; open({str(told)!r}, 'w').write(' '.join(os.environ))"
    monkeypatch.setattr(spares, "COMMAND", (sys.executable, "-c", program))
    monkeypatch.setenv("ANYCORE_API_KEY", "secret")
    found = asyncio.run(run()).split()
    assert b"PATH" in found
    assert b"ANYCORE_API_KEY" not in found


def test_an_engine_process_without_settings_ends() -> None:
    alone = subprocess.run(spares.COMMAND, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert alone.returncode == 1
    assert "anycore serve" in alone.stderr
    left = subprocess.run(spares.COMMAND, input="", capture_output=True, text=True, timeout=60)
    assert (left.returncode, left.stderr) == (1, "")


AHEAD = """
import gc, sys, threading
from pathlib import Path
from anycore.server import ahead

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._C":
            print("libtorch_cpu" in Path("/proc/self/maps").read_text())

sys.meta_path.insert(0, Watch())
ahead.begin()
print("torch" in sys.modules, gc.isenabled())
next(thread for thread in threading.enumerate() if thread.name == "import-ahead").join()
looked = []
gc.callbacks.append(lambda phase, info: looked.append(info))
kept = [[] for _ in range(2000)]
print("anycore.models.loader" in sys.modules, gc.isenabled(), len(gc.get_objects()) < 50_000, bool(looked))
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="tells what a process has loaded from /proc")
def test_what_engines_are_built_with_is_imported_ahead() -> None:
    done = subprocess.run((sys.executable, "-c", AHEAD), capture_output=True, text=True, timeout=60)
    first, library, then = done.stdout.splitlines()
    assert first == "False False"  # it goes on beside
    assert library == str(not any((Path(place_of_torch()).parent / "lib").glob("libc10_*")))
    assert then == "True True True True"


def place_of_torch() -> str:
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    return found.origin


def test_libraries_of_builds_for_devices_are_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class System:
        def dlopen(self, path: bytes, flags: int) -> None:
            opened.append(Path(path.decode()).name)

    opened: list[str] = []
    spec = ModuleSpec("torch", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    monkeypatch.setattr("ctypes.CDLL", lambda name: System())
    ahead.load_libraries()  # there are none
    (tmp_path / "lib").mkdir()
    for name, _ in ahead.LIBRARIES:
        (tmp_path / "lib" / name).touch()
    ahead.load_libraries()
    assert opened == ["libtorch_global_deps.so", "libtorch_cpu.so"]
    (tmp_path / "lib" / "libc10_device.so").touch()
    ahead.load_libraries()
    spec.origin = None
    ahead.load_libraries()
    assert len(opened) == 2


BEFORE_ENGINES = """
import os, sys
from anycore.cli import main
from anycore.server.spares import Spares

async def start(self, count):
    heavy = {'numpy', 'jinja2', 'zmq', 'fastapi', 'pydantic', 'importlib.metadata', 'pluggy', 'torch'}
    print(count, sorted(heavy & set(sys.modules)), flush=True)
    os._exit(0)

Spares.start = start
main.main(['serve', 'none', '--port', '0'])
"""


def test_nothing_heavy_is_imported_before_engines_begin() -> None:
    done = subprocess.run((sys.executable, "-c", BEFORE_ENGINES), capture_output=True, text=True, timeout=60)
    assert done.stdout == "1 []\n", done.stderr
