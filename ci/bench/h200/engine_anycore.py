"""anycore as one of the engines that take turns (turns.py): engine_anycore.py TASK FOLDER SHARE."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from measure import drain, request, workload
from turns import pairs, take_turns

BACKEND = "cuda"


def main() -> None:
    task, folder, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
    common = {"task": task, "backend": BACKEND, "memory_utilization": share, "max_queued": 8192}
    common["quantization"] = os.environ.get("SCHEME", "auto")
    common["quantization_group"] = int(os.environ.get("SCHEME_GROUP", "32"))
    common["tensor_parallel_size"] = int(os.environ.get("RANKS", "1"))
    if task == "rerank":
        from anycore.llm import LLM

        llm = LLM(folder, **common, max_model_len=512)
        llm.score("w100", ["w101"])
        take_turns(lambda kind: rerank(llm))
        return
    limits = {"max_model_len": 4096, "max_num_seqs": 256, "seed": 1} if task == "generate" else {"max_model_len": 512}
    engine = opened(model=folder, **common, **limits)
    drain(engine, [request(0, [100] * 128, 1 if task == "generate" else None)])
    vocab = min(engine.spec.vocab_size, 150_000)

    def run(kind: str) -> float:
        engine.reset_prefix_cache()
        prompts, lengths = workload(kind, vocab)
        wanted = lengths or [None] * len(prompts)
        requests = [request(i, p, n) for i, (p, n) in enumerate(zip(prompts, wanted, strict=True))]
        return embed(engine, requests) if kind == "embed" else drain(engine, requests)

    take_turns(run)


def opened(**settings: Any) -> Any:
    """An engine as `anycore serve` makes it, without a tokenizer."""
    from anycore import plugins
    from anycore.config import ModelConfig
    from anycore.engine.launch import prepare
    from anycore.ranks.leader import open_model

    return open_model(prepare(ModelConfig(**settings), plugins.load()))


def embed(engine: Any, requests: list[Any]) -> float:
    """Hand requests over as `LLM.embed` does: some steps ahead, so that the device begins with the first of them."""
    from anycore.llm import STEPS_AHEAD

    start = time.perf_counter()
    upcoming = iter(requests)
    done = 0
    while done < len(requests):
        rows = STEPS_AHEAD * engine.limits.max_num_batched_tokens
        while rows > 0 and (one := next(upcoming, None)) is not None:
            engine.add(one)
            rows -= len(one.token_ids)
        for delta in engine.step():
            assert delta.error is None, delta.error
            done += 1
    return time.perf_counter() - start


def rerank(llm: Any) -> float:
    """Tokenise and score every pair."""
    queries, documents = pairs()
    start = time.perf_counter()
    llm.score(queries, documents)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
