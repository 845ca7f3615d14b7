"""llama.cpp's own server as a peer: a GGUF file, token ids in and out over HTTP. LLAMA_SERVER names the program."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anycore.cli.bench_offline import Numbers, medians, timed
from anycore.cli.workloads import GENERATIONS, Ids, corpus

START_SECONDS = 60
SEATS = {"G1": 1, "G2": 32, "G3": 16}
SEAT_TOKENS = 1536


class LlamaServer:
    """`llama-server`, as many seats as the workload has requests, no prompt kept from run to run."""

    name = "llama.cpp"

    def __init__(self, model: str, threads: int) -> None:
        self.model, self.threads = model, threads

    def measure(self, name: str, runs: int) -> dict[str, Numbers]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        seats, self.url = SEATS[name], f"http://127.0.0.1:{port}"
        words = [os.environ.get("LLAMA_SERVER", "llama-server"), "-m", self.model, "--port", str(port)]
        words += ["-t", str(self.threads), "-tb", str(self.threads), "-np", str(seats), "-c", str(seats * SEAT_TOKENS)]
        start = time.perf_counter()
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            while not self.ready():
                assert process.poll() is None, f"llama-server ended with code {process.poll()}"
                assert time.perf_counter() - start < START_SECONDS, "llama-server does not answer"
                time.sleep(0.02)
            ids = self.ask("tokenize", content=corpus())["tokens"]
            self.complete(GENERATIONS["G1"].prompts(ids, 99)[0], 1)
            first = time.perf_counter() - start
            return {name: medians([self.run(name, ids, number) for number in range(runs)]) | {"start_s": first}}
        finally:
            process.terminate()
            process.wait()

    def run(self, name: str, ids: Ids, number: int) -> Numbers:
        work = GENERATIONS[name]
        prompts = work.prompts(ids, number)
        answers: list[Any] = []

        def everything() -> None:
            with ThreadPoolExecutor(len(prompts)) as pool:
                answers.extend(pool.map(lambda prompt: self.complete(prompt, work.new_tokens), prompts))

        wall = timed(everything)
        made = sum(answer["timings"]["predicted_n"] for answer in answers)
        assert made == len(prompts) * work.new_tokens, f"{made} tokens came"
        row = {"out_tok_s": made / wall, "wall_s": wall}
        if len(prompts) == 1:
            times = answers[0]["timings"]
            row |= {"ttft_s": times["prompt_ms"] / 1e3, "decode_tok_s": times["predicted_per_second"]}
        return row

    def complete(self, prompt: Ids, count: int) -> Any:
        wanted = {"n_predict": count, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
        return self.ask("completion", prompt=prompt, **wanted)

    def ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/health", timeout=5).status == 200)
        except OSError:
            return False

    def ask(self, route: str, **body: Any) -> Any:
        data = json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{route}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as reply:
            return json.load(reply)
