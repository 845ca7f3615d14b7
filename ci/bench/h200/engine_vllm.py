"""vLLM as one of the engines that take turns (turns.py): engine_vllm.py TASK FOLDER SHARE.

Its settings are those of the other engines; where it recommends one call for all inputs, it gets one.
"""

from __future__ import annotations

import os
import sys
import time

from measure import workload
from turns import pairs, take_turns


def main() -> None:
    from vllm import LLM, SamplingParams

    task, folder, share = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if task == "generate":
        llm = LLM(
            folder, skip_tokenizer_init=True, max_model_len=4096, gpu_memory_utilization=share, max_num_seqs=256,
            enable_prefix_caching=True, seed=0, quantization=os.environ.get("SCHEME"),
            tensor_parallel_size=int(os.environ.get("RANKS", "1")),
        )  # fmt: skip
    else:
        llm = LLM(
            folder, runner="pooling", max_model_len=512, gpu_memory_utilization=share, max_num_seqs=512,
            enable_prefix_caching=False,
        )  # fmt: skip
    vocab = min(llm.llm_engine.model_config.get_vocab_size(), 150_000)

    def generate(prompts: list[list[int]], lengths: list[int]) -> None:
        sampling = [
            SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False) for length in lengths
        ]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    def run(kind: str) -> float:
        if kind == "rerank":
            given = pairs()
            start = time.perf_counter()
            llm.score(*given, use_tqdm=False)
            return time.perf_counter() - start
        prompts, lengths = workload(kind, vocab)
        if kind != "embed":
            llm.reset_prefix_cache()
        start = time.perf_counter()
        if kind == "embed":
            llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        else:
            generate(prompts, lengths)
        return time.perf_counter() - start

    if task == "generate":
        generate(workload("single")[0], [1])
    elif task == "embed":
        llm.embed([{"prompt_token_ids": [100] * 16}], use_tqdm=False)
    else:
        llm.score("w100", "w101", use_tqdm=False)
    take_turns(run)


if __name__ == "__main__":
    main()
