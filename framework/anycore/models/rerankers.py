"""Which language models are rerankers, though their architecture does not say so, and which tokens mean yes and no."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from anycore.errors import ConfigError, Unsupported
from anycore.models.spec import ModelSpec

if TYPE_CHECKING:
    from anycore.models.source import Source

ASKS_YES_OR_NO = re.compile(r"""can only be ["']?yes["']? or ["']?no["']?""", re.IGNORECASE)
"""What the prompt of a yes/no reranker says; the chat templates of such models contain it."""


def yes_no_ids(
    spec: ModelSpec, source: Source, config: dict[str, Any], modules: list[tuple[str, str]]
) -> tuple[int, int] | None:
    """Return the ids of (yes, no) if a language model was made for reranking, else None.

    In this order: a LogitScore module names the ids; config.json names the words; the chat template asks for "yes" or
    "no"; or the model's own name says that it is a Qwen3 reranker (its first releases carry no other sign).
    """
    folder = dict(modules).get("LogitScore")
    if folder is not None:
        ids = source.read_object(f"{folder}/config.json") or {}
        if not isinstance(ids.get("true_token_id"), int) or not isinstance(ids.get("false_token_id"), int):
            raise Unsupported(f"{source.name}: {folder}/config.json must name true_token_id and false_token_id")
        return check_ids((ids["true_token_id"], ids["false_token_id"]), spec, f"{folder}/config.json")
    words = config.get("classifier_from_token")
    if words is not None:
        if len(words) != 2:
            raise ConfigError(f"config.json: classifier_from_token must be two words (no, yes), not {words!r}")
        return token_ids(source, spec, str(words[1]), str(words[0]))
    if spec.head != "lm" or not (asks_yes_or_no(source) or named_reranker(source, config)):
        return None
    return token_ids(source, spec, "yes", "no")


def asks_yes_or_no(source: Source) -> bool:
    if source.gguf is not None:
        from anycore.models.gguf.header import GgufFile

        template = GgufFile(source.gguf).get("tokenizer.chat_template", "")
    elif (path := source.path("chat_template.jinja")) is not None:
        template = path.read_text(encoding="utf-8")
    else:
        template = (source.read_object("tokenizer_config.json") or {}).get("chat_template") or ""
    return ASKS_YES_OR_NO.search(str(template)) is not None


def named_reranker(source: Source, config: dict[str, Any]) -> bool:
    """Whether the model card or the model's own name (never the name it is served under) says "Qwen3 reranker"."""
    if not config["architectures"][0].startswith("Qwen3"):
        return False
    card = source.path("README.md")
    if card is not None:
        matter = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
        if matter.startswith("---") and re.search(r"^pipeline_tag:\s*text-ranking\s*$", matter, re.MULTILINE):
            return True
    folders = [folder.name for folder in (source.folder, *source.folder.parents[:2])]  # hub: NAME/snapshots/REVISION
    cached = folders[2:] if folders[1:2] == ["snapshots"] else folders[:1]
    own = [source.name, source.gguf.name if source.gguf else "", str(config.get("_name_or_path") or ""), *cached]
    return any(re.search(r"qwen3[-_. ]?rerank", name.rsplit("/", 1)[-1], re.IGNORECASE) for name in own)


def token_ids(source: Source, spec: ModelSpec, yes: str, no: str) -> tuple[int, int]:
    """Look two words up in the vocabulary."""
    vocabulary = read_vocabulary(source)
    if yes not in vocabulary or no not in vocabulary:
        raise ConfigError(
            f"{source.name} looks like a reranker that answers {yes!r} or {no!r}, but its vocabulary (tokenizer.json "
            "or vocab.json) does not hold both words as tokens"
        )
    return check_ids((vocabulary[yes], vocabulary[no]), spec, "tokenizer.json")


def read_vocabulary(source: Source) -> dict[str, int]:
    """Token to id, as far as the model's own files say it in plain."""
    if source.gguf is not None:
        from anycore.models.gguf.header import GgufFile

        return {token: i for i, token in enumerate(GgufFile(source.gguf).get("tokenizer.ggml.tokens", []))}
    tokenizer = source.read_object("tokenizer.json") or {}
    pieces = (tokenizer.get("model") or {}).get("vocab") or source.read_object("vocab.json") or {}
    return pieces if isinstance(pieces, dict) else {piece: i for i, (piece, _) in enumerate(pieces)}


def check_ids(ids: tuple[int, int], spec: ModelSpec, name: str) -> tuple[int, int]:
    if any(not 0 <= i < spec.vocab_size for i in ids) or ids[0] == ids[1]:
        raise ConfigError(f"{name}: yes and no must be two ids below {spec.vocab_size}, not {ids[0]} and {ids[1]}")
    return ids
