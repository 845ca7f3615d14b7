"""How language models that score a query and a document are asked about them. Profiles are data.

A checkpoint whose chat template has the roles "query" and "document" brings its own; others are known by their
architecture.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from anycore.errors import Unsupported
from anycore.models.spec import ModelSpec

INSTRUCTION, QUERY, DOCUMENT = "ANYCOREinstruction", "ANYCOREquery", "ANYCOREdocument"
"""What stands for them while a template is read."""
ROLES = re.compile(r"""["']query["'].*["']document["']|["']document["'].*["']query["']""", re.DOTALL)

Render = Callable[[list[dict[str, str]]], str]
"""A chat template: messages -> text."""


@dataclass(frozen=True, slots=True)
class RerankProfile:
    """A prompt in two parts, with the document, which alone is ever cut, between them."""

    name: str
    architectures: tuple[str, ...]
    phrase: str  # stands in the chat template of a checkpoint made for this prompt
    head: str  # with {instruction} and {query}
    suffix: str  # the same
    instruction: str | None  # where the request brings none; None: the model takes none

    def around(self, query: str, instruction: str | None) -> tuple[str, str]:
        """What comes before and after a document."""
        given = {"instruction": instruction or self.instruction, "query": query}
        return self.head.format(**given), self.suffix.format(**given)


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


def profile_of(spec: ModelSpec, template: str | None, render: Render) -> RerankProfile | None:
    """Return the profile of a reranker; None for one that takes plain pairs.

    A causal model with a classifier head is asked like its yes/no parent if its chat template says so.

    Args:
        template: the model's chat template as text.
        render: the same, to be used.

    Raises:
        Unsupported: it answers yes or no, but how it is asked is not known.
    """
    if spec.score is None or spec.attention != "causal" or spec.score.kind == "cosine":
        return None
    if template is not None and ROLES.search(template):
        return profile_from(render)
    candidates = [profile for profile in PROFILES if spec.architecture in profile.architectures]
    if spec.score.kind == "classifier":
        candidates = [p for p in candidates if template is not None and p.phrase in template]
    if not candidates and spec.score.kind == "yes_no":
        known = ", ".join(profile.name for profile in PROFILES)
        raise Unsupported(
            f"{spec.architecture} answers yes or no, but no prompt for it is known here (known: {known}), and its chat "
            'template has no roles "query" and "document"'
        )
    return candidates[0] if candidates else None


def profile_from(render: Render) -> RerankProfile:
    """Read the profile that a chat template with the roles "query" and "document" stands for.

    An instruction is its system message; where there is none the template may bring its own.

    Raises:
        Unsupported: it does not show the query, or the document other than once.
    """
    pair = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}]
    told, bare = render([{"role": "system", "content": INSTRUCTION}, *pair]), render(pair)
    if told.count(DOCUMENT) != 1 or bare.count(DOCUMENT) != 1 or QUERY not in bare:
        raise Unsupported("the chat template does not show a query, and a document once, as a reranker's has to")
    before, after = told.split(INSTRUCTION) if told.count(INSTRUCTION) == 1 else (told, "")
    default = None
    if told != bare:
        if told.count(INSTRUCTION) != 1 or not (bare.startswith(before) and bare.endswith(after)):
            raise Unsupported("the chat template is another one without a system message, which is not supported")
        default = bare[len(before) : len(bare) - len(after)]
    escaped = told.replace("{", "{{").replace("}", "}}")
    head, suffix = escaped.replace(INSTRUCTION, "{instruction}").replace(QUERY, "{query}").split(DOCUMENT)
    return RerankProfile("chat template", (), "", head, suffix, default)
