"""Servers as processes: port, signals, drain, deaths and orphans. The engines are scripted, all else is real."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server.harness import Live, patience, serve_scripted

from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError
from anycore.server.port import listen, url_of
from anycore.server.run import serve


def stream(live: Live, tokens: int, begun: threading.Event | None = None) -> str:
    """Send a streamed completion and return all of its events, or the error body."""
    body = {"model": "lm", "prompt": "a", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    text = ""
    with httpx.stream("POST", live.url + "/v1/completions", json=body, timeout=30, verify=False) as response:
        for part in response.iter_text():
            text += part
            if begun is not None:
                begun.set()
    return text


def start_streams(live: Live, pool: ThreadPoolExecutor, number: int, tokens: int) -> list[Future[str]]:
    """Start streams and return once each has begun."""
    events = [threading.Event() for _ in range(number)]
    futures = [pool.submit(stream, live, tokens, event) for event in events]
    assert all(event.wait(10) for event in events)
    return futures


def waiting(live: Live) -> int:
    """Read the gauge of waiting sequences."""
    found = re.search(r"^anycore:num_requests_waiting{.*} ([0-9.]+)$", live.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def gone(pids: list[int]) -> bool:
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        stat = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
        if stat.strip() and not stat.startswith("Z"):
            return False
    return True


def test_o07_a_drain_refuses_the_new_and_finishes_the_old(t_lm: Path) -> None:
    with (
        serve_scripted(t_lm, "step=0.02", "max_num_seqs=3", shutdown_timeout=30) as live,
        ThreadPoolExecutor(6) as pool,
    ):
        engines = live.engines()
        assert len(engines) == 1
        running = start_streams(live, pool, 3, 150)
        queued = [pool.submit(stream, live, 150) for _ in range(3)]
        live.wait(lambda: waiting(live) == 3, 3)
        live.signal(signal.SIGTERM)
        live.wait(lambda: live.get("/ready").status_code == 503, 2)
        assert live.get("/health").status_code == 200
        assert live.get("/health").json()["status"] == "draining"
        refused = live.post("/v1/completions", {"model": "lm", "prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert all('"shutting_down"' in future.result(10) for future in queued)
        assert not any(future.done() for future in running)
        assert all(future.result(10).endswith("data: [DONE]\n\n") for future in running)
        assert live.exit_code(3) == 0
        assert gone(engines)


def test_o07_the_limit_ends_what_still_runs_and_the_port_is_free(t_lm: Path) -> None:
    with serve_scripted(t_lm, "step=0.02", shutdown_timeout=0.5) as live, ThreadPoolExecutor(3) as pool:
        running = start_streams(live, pool, 2, 500)
        live.signal(signal.SIGTERM)
        started = time.monotonic()
        texts = [future.result(10) for future in running]
        assert live.exit_code(4) == 0
        assert time.monotonic() - started < (0.5 + 2) * patience()
        assert all('"error"' in text and '"shutting_down"' in text for text in texts)
        port = int(live.url.rsplit(":", 1)[1])
    listen("127.0.0.1", port).close()  # at once: nothing lingers


def test_o07_second_signal_stops_at_once(t_lm: Path) -> None:
    with serve_scripted(t_lm, "step=0.05", shutdown_timeout=60) as live, ThreadPoolExecutor(2) as pool:
        running = start_streams(live, pool, 1, 500)
        engines = live.engines()
        os.killpg(os.getpgid(live.process.pid), signal.SIGINT)  # type: ignore[union-attr]  # as Ctrl-C in a terminal
        live.wait(lambda: live.get("/ready").status_code == 503, 2)
        assert live.get("/health").status_code == 200  # the engine did not get the Ctrl-C
        live.signal(signal.SIGINT)
        assert live.exit_code(3) == 128 + signal.SIGINT
        assert gone(engines)
        with pytest.raises((AssertionError, httpx.TransportError)):
            assert "[DONE]" in running[0].result(5)


def test_o07_a_stop_while_loading_is_prompt(t_lm: Path) -> None:
    with serve_scripted(t_lm, "load=60", ready=False) as live:
        live.wait(lambda: live.get("/ready").json()["models"][0]["phase"] == "loading", 20)
        engines = live.engines()
        live.signal(signal.SIGTERM)
        assert live.exit_code(3) == 0
        assert gone(engines)


def test_o07_engines_do_not_outlive_a_killed_server(t_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("t")
    with serve_scripted(t_lm, names="a,b", tasks="generate,generate", env={"TMPDIR": str(folder)}) as live:
        engines = live.engines()
        assert len(engines) == 2
        live.signal(signal.SIGKILL)
        live.exit_code()
        end = time.monotonic() + 5 * patience()
        while not gone(engines):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert list(folder.iterdir()) == []


def test_o01_a_killed_engine_is_seen_and_ends_the_server(t_lm: Path) -> None:
    with serve_scripted(t_lm, "step=0.05", engine_restarts=0) as live, ThreadPoolExecutor(1) as pool:
        running = start_streams(live, pool, 1, 500)
        os.kill(live.engines()[0], signal.SIGKILL)
        live.wait(lambda: live.get("/health").status_code == 503 and live.get("/ready").status_code == 503, 2)
        assert "SIGKILL" in live.get("/health").json()["models"][0]["reason"]
        assert '"engine_dead"' in running[0].result(10)
        assert live.exit_code(6) == 1


def test_a_second_server_takes_the_port_over(t_lm: Path) -> None:
    """New connections all the time, and streams that run across the change: all are answered."""
    body = {"model": "lm", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
    stop = threading.Event()

    def keep_asking(live: Live) -> list[int]:
        found = []
        with httpx.Client(transport=httpx.HTTPTransport(retries=1), timeout=30) as client:
            while not stop.is_set():
                headers = {"connection": "close"}
                found.append(client.post(live.url + "/v1/completions", json=body, headers=headers).status_code)
        return found

    words = ("step=0.01", "max_num_seqs=16", "max_queued=64")
    with serve_scripted(t_lm, *words, reuse_port=True) as old, ThreadPoolExecutor(8) as pool:
        port = int(old.url.rsplit(":", 1)[1])
        asking = [pool.submit(keep_asking, old) for _ in range(3)]
        running = start_streams(old, pool, 3, 150)
        with serve_scripted(t_lm, *words, reuse_port=True, port=port) as new:
            new.wait(lambda: "listening now" in "".join(new.output), 20)
            old.signal(signal.SIGTERM)
            assert all(future.result(20).endswith("data: [DONE]\n\n") for future in running)
            assert old.exit_code(10) == 0
            answered = new.post("/v1/completions", body)
            assert answered.status_code == 200
            stop.set()
            codes = [code for future in asking for code in future.result(20)]
            assert set(codes) == {200}
            assert len(codes) > 3
            assert "Traceback" not in "".join(old.output + new.output)


def test_a_model_that_is_refused_ends_the_server_with_its_reason(t_lm: Path) -> None:
    with serve_scripted(t_lm, "refuse=no room for this model", ready=False) as live:
        assert live.exit_code(20) == 2
    assert "anycore: no room for this model\n" in live.output


def test_o08_a_port_in_use_is_refused_before_anything_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        program = (
            "import sys\n"
            "from anycore.config import ModelConfig, ServerConfig\n"
            "from anycore.errors import ConfigError\n"
            "from anycore.server.run import serve\n"
            "try:\n"
            f"    serve(ServerConfig(port={port}), [ModelConfig(model='none')])\n"
            "except ConfigError as error:\n"
            "    print(error)\n"
            "heavy = {'torch', 'transformers', 'fastapi'} & set(sys.modules)\n"
            "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
        )
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
        assert f"port {port} on 127.0.0.1 is in use" in done.stdout


def test_o08_hosts_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert port > 0
        assert url_of(listener) == f"http://127.0.0.1:{port}"
    with listen("127.0.0.1", port) as again:  # right after a stop
        assert again.getsockname()[1] == port
    with listen("localhost", 0) as listener:
        assert listener.family is socket.AF_INET
    with listen("0.0.0.0", 0) as listener:
        assert url_of(listener).startswith("http://127.0.0.1:")
    for host in ("no such host.invalid", "", "203.0.113.7"):
        with pytest.raises(ConfigError) as caught:
            listen(host, 0)
        assert caught.value.param == "host"

    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match=r"port 80 needs privileges.*above 1023"):
        listen("127.0.0.1", 80)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_o08_ipv6() -> None:
    try:
        listener = listen("[::1]", 0)
    except ConfigError as error:
        pytest.skip(str(error))
    with listener:
        assert url_of(listener) == f"http://[::1]:{listener.getsockname()[1]}"
    with listen("::", 0) as both, socket.create_connection(("127.0.0.1", both.getsockname()[1]), 2):
        pass


def test_two_models_under_one_name_are_refused() -> None:
    models = [ModelConfig(model=m, served_model_name=("same",)) for m in ("a", "b")]
    with pytest.raises(ConfigError, match="'same' is used twice"):
        serve(ServerConfig(port=0), models)
