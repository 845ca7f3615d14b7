"""How language models that answer yes or no are asked about a query and a document. Profiles are data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from anycore.errors import Unsupported
from anycore.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class RerankProfile:
    """A prompt in three parts; only the document between head and suffix is ever cut."""

    name: str
    architectures: tuple[str, ...]
    phrase: str  # stands in the chat template of a checkpoint made for this prompt
    head: str  # with {instruction} and {query}
    suffix: str
    instruction: str  # where the request brings none


PROFILES = (
    RerankProfile(
        name="qwen3-reranker",
        architectures=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
        phrase="Judge whether the Document meets the requirements",
        head=(
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
            "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
        ),
        suffix="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        instruction="Given a web search query, retrieve relevant passages that answer the query",
    ),
)


def profile_of(spec: ModelSpec, chat_templates: Iterable[str]) -> RerankProfile | None:
    """Return the profile of a reranker; None for one that takes plain pairs.

    A causal model with a classifier head is asked like its yes/no parent if its chat template says so.

    Raises:
        Unsupported: it answers yes or no, but how it is asked is not known.
    """
    if spec.score is None or spec.attention != "causal" or spec.score.kind == "cosine":
        return None
    candidates = [profile for profile in PROFILES if spec.architecture in profile.architectures]
    if spec.score.kind == "classifier":
        candidates = [p for p in candidates if any(p.phrase in template for template in chat_templates)]
    if not candidates and spec.score.kind == "yes_no":
        known = ", ".join(profile.name for profile in PROFILES)
        raise Unsupported(f"{spec.architecture} answers yes or no, but no prompt for it is known here (known: {known})")
    return candidates[0] if candidates else None
