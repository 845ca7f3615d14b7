"""What embed and rerank read, put into words: texts to embed, pairs to score, queries and documents on their own.

These are drafts, which `Renderer.each` turns into tokens many at a time.
"""

from __future__ import annotations

from typing import Any

from anycore.errors import BadRequest
from anycore.models.spec import ModelSpec
from anycore.text.cut import Cutter, Truncate
from anycore.text.draft import Draft, Rendered, fitted_ids, known_ids
from anycore.text.prompts import document_prompt, prompt_of, query_prompt, refuse_instruction
from anycore.text.rerank_profiles import RerankProfile, profile_of
from anycore.text.template import ChatTemplates


class PooledDrafts:
    """Drafts for one model. `truncate` and `side` of all methods are as `cut.Cutter` has them, `param` is for errors.

    Args:
        templates: for models that are asked by messages.
        max_model_len: longest sequence in tokens.

    Raises:
        Unsupported: a reranker for which no prompt is known.
    """

    def __init__(self, spec: ModelSpec, templates: ChatTemplates, max_model_len: int) -> None:
        self.spec = spec
        self.max_model_len = max_model_len
        self._templates = templates
        self.profile = profile_of(spec, templates.usual, self._shown)

    def embedding(
        self,
        item: str | list[int],
        prompt_name: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        *,
        param: str = "input",
    ) -> Draft | Rendered:
        """A text to embed: the named prompt, or the model's default one, is put before it.

        Token ids are used as they are: no prompt, no special tokens.

        Raises:
            BadRequest: there is no such prompt, or none can be put there; the text is empty; an id is not the model's.
        """
        if not isinstance(item, str):
            if prompt_name is not None:
                raise BadRequest("a prompt can only be put before text, not before token ids", param="prompt_name")
            return fitted_ids(known_ids(item, self.spec.vocab_size, param), self._cutter(truncate, side, param))
        if not item:
            raise BadRequest(f"{param} must not be an empty string", param=param)
        return self._vector(prompt_of(self.spec.pooling, prompt_name), item, self._cutter(truncate, side, param))

    def pair(
        self,
        query: str,
        document: str,
        instruction: str | None = None,
        truncate: Truncate = None,
        side: str = "right",
        apply_template: bool = True,
        *,
        param: str = "documents",
        query_param: str = "query",
    ) -> Draft:
        """A query and a document for a model that reads both at once. Only the document is ever cut.

        With `apply_template=False` a yes/no reranker gets query + document as they are, already templated.

        Raises:
            BadRequest: the model takes no instruction.
        """
        cutter = self._cutter(truncate, side, param, query_param)
        if self.profile is not None:
            return self._question(self.profile, query, document, instruction, apply_template, cutter)
        refuse_instruction(instruction)
        prompt = self.spec.score.prompt if self.spec.score is not None else ""
        return Draft(prompt + query, cutter, pair=document)

    def query(self, text: str, instruction: str | None = None, truncate: Truncate = None, side: str = "right") -> Draft:
        """A query for a bi-encoder, whose score is the cosine of two vectors. Put `document` beside it.

        Raises:
            BadRequest: the model takes no instruction.
        """
        prompt = query_prompt(self.spec.pooling, instruction)
        return self._vector(prompt, text, self._cutter(truncate, side, "query"))

    def document(self, text: str, truncate: Truncate = None, side: str = "right", *, param: str = "documents") -> Draft:
        """A document for a bi-encoder."""
        return self._vector(document_prompt(self.spec.pooling), text, self._cutter(truncate, side, param))

    def _question(
        self,
        profile: RerankProfile,
        query: str,
        document: str,
        instruction: str | None,
        apply_template: bool,
        cutter: Cutter,
    ) -> Draft:
        """A yes/no question: one text, of which only the document's tokens may be cut."""
        if not apply_template or profile.instruction is None:
            refuse_instruction(instruction)
        default = self.spec.score.prompt if self.spec.score is not None else ""
        head, suffix = profile.around(query, instruction or default)
        if apply_template:
            text = head + document + suffix
        else:
            head, text = query, query + document
        ends = len(text) - len(suffix) if text.endswith(suffix) else len(text)
        return Draft(text, cutter, add_special_tokens=False, within=(len(head), ends))

    def _vector(self, prompt: str, text: str, cutter: Cutter) -> Draft:
        """A text to be made a vector of, after a prompt; for a model that reads messages, as one of the user's."""
        pooling = self.spec.pooling
        if pooling is None or pooling.chat is None:
            return Draft(prompt + text, cutter)
        system = [{"role": "system", "content": prompt}] if prompt else []
        whole = self._shown([*system, {"role": "user", "content": text}], dict(pooling.chat))
        shown = text if text in whole else text.strip()  # templates may trim what they show
        start = whole.rfind(shown)
        within = (start, start + len(shown)) if start >= 0 else None
        return Draft(whole, cutter, add_special_tokens=False, within=within)

    def _shown(self, messages: list[dict[str, Any]], variables: dict[str, Any] | None = None) -> str:
        """Messages as sentence-transformers shows them: nothing is begun after them, unless a variable says so."""
        rest = dict(variables or {})
        begin = bool(rest.pop("add_generation_prompt", False))
        template = self._templates.choose(None, False)
        return template.render(messages, add_generation_prompt=begin, arguments=rest)

    def _cutter(self, truncate: Truncate, side: str, param: str, stays: str | None = None) -> Cutter:
        """Nothing is generated, so no room is left for it."""
        return Cutter(self.max_model_len, truncate, side, 0, param, stays)
