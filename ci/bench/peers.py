"""The peers of `anycore bench offline`, as their users run them: the same workloads and fields, one JSON line each.

python ci/bench/peers.py transformers MODEL --workload G1,G2 --dtype bfloat16
python ci/bench/peers.py sentence-transformers MODEL --workload E1,E2,R1 --dtype float32
python ci/bench/peers.py onnxruntime MODEL --workload E1,E2,R1 --dtype int8
python ci/bench/peers.py vllm MODEL --workload G2,G3
python ci/bench/peers.py llama.cpp FILE.gguf --workload G1,G2
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from anycore.cli.bench_offline import Numbers, emit, medians, peak_rss_mib, timed
from anycore.cli.workloads import GENERATIONS, SHORT_TOKENS, TEXT_TOKENS, Ids, corpus, texts

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")


class Transformers:
    """AutoModelForCausalLM.generate on a static batch, padded on the left; SDPA attention, its default."""

    name = "transformers"

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.ids = self.tokenizer.encode(corpus(), add_special_tokens=False)

    @torch.inference_mode()
    def generate(self, prompts: list[Ids], new_tokens: int) -> None:
        longest = max(map(len, prompts))
        ids = torch.zeros(len(prompts), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        fixed = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
        self.model.generate(ids, attention_mask=mask, **fixed)

    def measure(self, name: str, runs: int) -> dict[str, Numbers]:
        work = GENERATIONS[name]
        self.generate(GENERATIONS["G1"].prompts(self.ids, 99), 8)
        rows = []
        for number in range(runs):
            prompts = work.prompts(self.ids, number)
            wall = timed(lambda: self.generate(prompts, work.new_tokens))  # noqa: B023
            row = {"out_tok_s": len(prompts) * work.new_tokens / wall, "wall_s": wall}
            if len(prompts) == 1:
                row["ttft_s"] = timed(lambda: self.generate(prompts, 1))  # noqa: B023
                row["decode_tok_s"] = (work.new_tokens - 1) / (wall - row["ttft_s"])
            rows.append(row)
        return {name: medians(rows)}


class SentenceTransformers:
    """SentenceTransformer.encode and CrossEncoder.predict in batches of 32, their default."""

    name = "sentence-transformers"

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        self.path, self.dtype, self.threads = model, dtype, threads

    def embedder(self) -> tuple[Any, Callable[[list[str]], Any]]:
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(self.path, device="cpu", model_kwargs={"dtype": getattr(torch, self.dtype)})
        return model.tokenizer, lambda pile: model.encode(pile, normalize_embeddings=True, show_progress_bar=False)

    def reranker(self) -> tuple[Any, Callable[[list[tuple[str, str]]], Any]]:
        from sentence_transformers import CrossEncoder

        settings = {"dtype": getattr(torch, self.dtype)}
        model = CrossEncoder(self.path, device="cpu", max_length=512, model_kwargs=settings)
        return model.tokenizer, lambda pairs: model.predict(pairs, show_progress_bar=False)

    def measure(self, name: str, runs: int) -> dict[str, Numbers]:
        tokenizer, work = self.reranker() if name == "R1" else self.embedder()
        ids = tokenizer.encode(corpus(), add_special_tokens=False, verbose=False)

        def decode(piece: Ids) -> str:
            return str(tokenizer.decode(piece))

        if name == "R1":
            query = texts(ids, decode, 1, SHORT_TOKENS, seed=5)[0]
            pairs = [(query, document) for document in texts(ids, decode, 500)]
            work(pairs[400:])
            seconds = [timed(lambda at=100 * (i % 4): work(pairs[at : at + 100])) for i in range(runs)]
            return {name: medians([{"docs_s": 100 / s, "wall_s": s} for s in seconds])}
        if name == "E1":
            pile = texts(ids, decode, 512)
            work(pile[:64])
            seconds = [timed(lambda: work(pile)) for _ in range(runs)]
            length = TEXT_TOKENS + 2
            return {name: medians([{"texts_s": len(pile) / s, "tok_s": length * len(pile) / s} for s in seconds])}
        found = {}
        for tokens in (TEXT_TOKENS, SHORT_TOKENS):
            singles = texts(ids, decode, 200, tokens, seed=11)
            work(singles[:1])
            times = sorted(1e3 * timed(lambda text=text: work([text])) for text in singles)
            last = len(times) - 1
            found[f"{name} {tokens + 2}tok"] = {"p50_ms": times[round(0.5 * last)], "p99_ms": times[round(0.99 * last)]}
        return found


class OnnxRuntime(SentenceTransformers):
    """The same texts through an exported model."""

    name = "onnxruntime"

    def embedder(self) -> tuple[Any, Callable[[list[str]], Any]]:
        from peer_onnx import encoder

        return encoder(self.path, self.dtype, False, self.threads)

    def reranker(self) -> tuple[Any, Callable[[list[tuple[str, str]]], Any]]:
        from peer_onnx import encoder

        return encoder(self.path, self.dtype, True, self.threads)


def vllm(model: str, dtype: str, threads: int) -> Any:
    from peer_vllm import Vllm

    return Vllm(model, dtype, threads)


def llama(model: str, dtype: str, threads: int) -> Any:
    from peer_llama import LlamaServer

    return LlamaServer(model, threads)


PEERS: dict[str, Callable[[str, str, int], Any]] = {
    "transformers": Transformers,
    "sentence-transformers": SentenceTransformers,
    "onnxruntime": OnnxRuntime,
    "vllm": vllm,
    "llama.cpp": llama,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("model")
    parser.add_argument("--workload", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    start = time.perf_counter()
    peer = PEERS[options.peer](options.model, options.dtype, options.threads)
    loading = time.perf_counter() - start
    about = {"engine": peer.name, "model": options.model, "dtype": options.dtype}
    for name in options.workload.split(","):
        for label, numbers in peer.measure(name, options.runs).items():
            emit(about | {"workload": label} | numbers | {"load_s": loading, "peak_rss_mib": peak_rss_mib()})


if __name__ == "__main__":
    main()
