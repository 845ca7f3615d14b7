"""transformers as one of the engines that take turns (turns.py): engine_transformers.py embed|rerank FOLDER SHARE.

What sentence-transformers does: texts sorted by length, padded batches of 256, SDPA. It takes what memory it needs.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from measure import workload
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer
from turns import pairs, take_turns

BATCH = 256


def main() -> None:
    task, folder = sys.argv[1:3]
    kind = AutoModel if task == "embed" else AutoModelForSequenceClassification
    model: Any = kind.from_pretrained(folder, dtype="auto", attn_implementation="sdpa").cuda().eval()
    tokenizer = AutoTokenizer.from_pretrained(folder) if task == "rerank" else None

    @torch.inference_mode()
    def embed(prompts: list[list[int]]) -> None:
        prompts = sorted(prompts, key=len, reverse=True)
        for first in range(0, len(prompts), BATCH):
            ids, mask = padded(prompts[first : first + BATCH], 0)
            hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
            mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
            torch.nn.functional.normalize(mean.float()).cpu()

    @torch.inference_mode()
    def rerank(queries: list[str], documents: list[str]) -> None:
        assert tokenizer is not None
        coded = tokenizer(queries, documents, padding=False, truncation=True, max_length=512)["input_ids"]
        coded = sorted(coded, key=len, reverse=True)
        for first in range(0, len(coded), BATCH):
            ids, mask = padded(coded[first : first + BATCH], tokenizer.pad_token_id)
            model(input_ids=ids, attention_mask=mask).logits.float().sigmoid().cpu()

    def run(kind: str) -> float:
        given = pairs() if kind == "rerank" else (workload("embed", min(model.config.vocab_size, 150_000))[0],)
        torch.cuda.synchronize()
        start = time.perf_counter()
        (rerank if kind == "rerank" else embed)(*given)
        return time.perf_counter() - start

    run(task)
    take_turns(run)


def padded(rows: list[list[int]], filler: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of rows that are sorted, the longest first."""
    width = len(rows[0])
    ids = torch.tensor([row + [filler] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    return ids.cuda(non_blocking=True), mask.cuda(non_blocking=True)


if __name__ == "__main__":
    main()
