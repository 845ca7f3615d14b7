"""What a server holds: processes, memory, KV blocks."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

from server.harness import Live


def processes(live: Live) -> list[int]:
    """Ids of the server's process and of all that it started; of none where it is a thread."""
    return [] if live.process is None else [live.process.pid, *live.engines()]


def resident(pids: list[int]) -> float:
    """MiB of memory that these processes have in use together."""
    found = [re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return sum(int(match[1]) for match in found if match) / 1024


def blocks_free(live: Live) -> int:
    """KV blocks that no request holds."""
    page = live.get("/metrics").text
    blocks = re.search(r'^anycore:cache_config_info{.*num_blocks="(\d+)"', page, re.MULTILINE)
    used = re.search(r"^anycore:kv_cache_usage_perc{.*} (\S+)$", page, re.MULTILINE)
    assert blocks
    assert used
    return round(int(blocks[1]) * (1 - float(used[1])))


def held(live: Live) -> float:
    """Sequences that run or wait in the engine."""
    wanted = r"^anycore:num_requests_(?:running|waiting){.*} (\S+)$"
    return sum(map(float, re.findall(wanted, live.get("/metrics").text, re.MULTILINE)))


def left_after(pids: list[int], seconds: float) -> list[int]:
    """Which of these processes still run after so many seconds."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def port_is_free(live: Live) -> bool:
    parts = urlsplit(live.url)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((parts.hostname, parts.port))
        except OSError:
            return False
    return True
