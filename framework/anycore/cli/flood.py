"""A client that drops what it reads, before which a front is measured: `front_times` starts it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass

END = b"data: [DONE]\n\n\r\n0\r\n\r\n"


@dataclass(frozen=True)
class Flow:
    """Requests through a front: so many connections, each with one request after the other."""

    streams: int
    requests: int  # of each connection
    prompt: int  # tokens of each
    tokens: int  # of each answer
    step: float = 0.0  # seconds of the engine's steps


async def client(port: int, model: str, vocabulary: int, flow: Flow) -> None:
    """Open all connections, wait for a line, send everything, and print how many events came."""
    prompt = [(vocabulary // 4 + place) % vocabulary for place in range(flow.prompt)]
    asked = {"model": model, "prompt": prompt, "max_tokens": flow.tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(asked | {"seed": round(1e6 * flow.step), "stream_options": {"include_usage": True}})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    sent = f"{head}\r\n\r\n{body}".encode()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
        events = 0
        for _ in range(flow.requests):
            writer.write(sent)
            last = b""
            while not last.endswith(END):
                data = await reader.read(1 << 16)
                last = (last + data)[-400:]
                if not data or last.startswith(b"HTTP/1.1 4"):
                    sys.stderr.buffer.write(last)
                    sys.exit(1)
                events += data.count(b"data: {")
        writer.close()
        return events

    ends = [await asyncio.open_connection("127.0.0.1", port) for _ in range(flow.streams)]
    print("ready", flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    print(sum(await asyncio.gather(*(stream(*end) for end in ends))))


if __name__ == "__main__":
    order = json.loads(sys.argv[2])
    asyncio.run(client(int(sys.argv[1]), order["model"], order["vocabulary"], Flow(**order["flow"])))
