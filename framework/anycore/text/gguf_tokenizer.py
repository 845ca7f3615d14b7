"""The tokenizer that a GGUF file carries, built as the `tokenizers` library would load it from a tokenizer.json.

The file holds words, merges or scores and a few flags; how text is cut before merging is only named in it
(`tokenizer.ggml.pre`), so the patterns behind those names stand here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from anycore.errors import Unsupported, WeightsError
from anycore.models.gguf.header import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("default",): (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("gpt-2", "phi-2", "mpt", "olmo", "jais", "roberta-bpe", "jina-v1-en", "jina-v2-code", "gigachat"): (GPT2,),
    ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", GPT2),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx", "chatglm-bpe"): (CL100K,),
    ("qwen2", "stablelm2", "megrez", "deepseek-r1-qwen"): (CL100K.replace("{1,3}", ""),),
    ("tekken",): (TEKKEN,),
    ("deepseek-coder",): (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
}
"""Pre-tokenizer names -> the patterns that cut text, each applied to the pieces that the one before left."""
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
"""Pre-tokenizers whose words are taken whole from the vocabulary before merges are tried, and that begin with BOS."""


def load_gguf_tokenizer(path: Path) -> tuple[Tokenizer, dict[str, Any]]:
    """Return the tokenizer of a GGUF file and what a tokenizer_config.json would say about it.

    The dictionary holds the special tokens as text ("bos_token", "eos_token", …; only those there are),
    "add_bos_token", "add_eos_token", "model_max_length" and, if the file has one, "chat_template" (a string, or a
    list of {"name", "template"}). `encode(add_special_tokens=True)` adds what the flags say.

    Raises:
        Unsupported: the kind of tokenizer or of pre-tokenizer is not known.
        WeightsError: the file is damaged or its vocabulary contradicts itself.
    """
    file = GgufFile(path)
    kind = file.need("tokenizer.ggml.model")
    if not isinstance(kind, str) or kind not in BUILDERS:
        raise Unsupported(
            f"{path.name} has a tokenizer of kind {kind!r}; known are {', '.join(BUILDERS)}", param="model"
        )
    words = [word or f"[EMPTY_{i}]" for i, word in enumerate(file.need("tokenizer.ggml.tokens"))]
    types = file.get("tokenizer.ggml.token_type", [NORMAL] * len(words))
    if len(types) != len(words):
        raise WeightsError(f"{path} has {len(words)} words but types for {len(types)} of them")
    special = _special_tokens(file, words, kind)
    try:
        tokenizer = BUILDERS[kind](file, words, types, special)
    except Exception as error:  # the library raises plain Exception for a merge of words that are not there
        if type(error) is not Exception:
            raise
        raise WeightsError(f"{path}: the tokenizer does not fit together: {error}") from error
    hidden = {w for w, t in zip(words, types, strict=True) if t in (UNKNOWN, CONTROL)} | set(special.values())
    added = hidden | {w for w, t in zip(words, types, strict=True) if t == USER_DEFINED}
    tokenizer.add_tokens([AddedToken(w, special=w in hidden, normalized=False) for w in words if w in added])
    info = _settings(file, kind, special)
    if kind == "bert":
        begin, end = special["cls"], special["sep"]
    else:
        begin = special.get("bos", "") if info["add_bos_token"] else ""
        end = special.get("eos", "") if info["add_eos_token"] else ""
    tokenizer.post_processor = _wrap(tokenizer, begin, end, kind == "bert")
    return tokenizer, info


def _settings(file: GgufFile, kind: str, special: dict[str, str]) -> dict[str, Any]:
    """Return what a tokenizer_config.json would say."""
    begins = kind != "gpt2" or file.get("tokenizer.ggml.pre") in WHOLE_WORDS
    settings: dict[str, Any] = {f"{role}_token": token for role, token in special.items()}
    settings["add_bos_token"] = file.get("tokenizer.ggml.add_bos_token", begins)
    settings["add_eos_token"] = file.get("tokenizer.ggml.add_eos_token", False)
    settings["model_max_length"] = file.get(f"{file.architecture}.context_length")
    settings["clean_up_tokenization_spaces"] = False
    if template := _chat_template(file):
        settings["chat_template"] = template
    return settings


def _bpe(file: GgufFile, words: list[str], types: list[int], special: dict[str, str]) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    pre = file.get("tokenizer.ggml.pre", "default")
    patterns = next((cuts for names, cuts in PATTERNS.items() if pre in names), None)
    if patterns is None:
        known = ", ".join(name for names in PATTERNS for name in names)
        raise Unsupported(f"{file.path.name} names the pre-tokenizer {pre!r}; known are {known}", param="model")
    merges = [_split_merge(text) for text in file.need("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(_ids(file, words), merges, ignore_merges=pre in WHOLE_WORDS))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _sentencepiece(file: GgufFile, words: list[str], types: list[int], special: dict[str, str]) -> Tokenizer:
    """SentencePiece's BPE, as Llama 2 and Gemma have it: the merges are those whose result is a word, by its score."""
    scores = file.need("tokenizer.ggml.scores")
    ids = _ids(file, words)
    ranked = []
    for word, kind, score in zip(words, types, scores, strict=True):
        if kind == NORMAL and len(word) > 1:
            pairs = [(word[:i], word[i:]) for i in range(1, len(word)) if word[:i] in ids and word[i:] in ids]
            pairs.sort(key=lambda pair: (ids[pair[0]], ids[pair[1]]))
            ranked += [(score, pair) for pair in pairs]
    ranked.sort(key=lambda item: -item[0])
    merges = [pair for _, pair in ranked]
    unknown = special.get("unk")
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = file.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


def _wordpiece(file: GgufFile, words: list[str], types: list[int], special: dict[str, str]) -> Tokenizer:
    """BERT's word pieces. The file marks the pieces that begin a word; BERT marks those that do not."""

    def piece(word: str) -> str:
        if word.startswith("[") and word.endswith("]"):
            return word
        return word[1:] if word.startswith("▁") else f"##{word}"

    pieces = [piece(word) for word in words]
    cased = any(p.lstrip("#").isalpha() and p.lower() != p for p in pieces)
    tokenizer = Tokenizer(models.WordPiece(_ids(file, pieces), unk_token=special.get("unk", "[UNK]")))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=not cased)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


Builder = Callable[[GgufFile, list[str], list[int], dict[str, str]], Tokenizer]
BUILDERS: dict[str, Builder] = {"gpt2": _bpe, "llama": _sentencepiece, "bert": _wordpiece}


def _special_tokens(file: GgufFile, words: list[str], kind: str) -> dict[str, str]:
    """Return the special tokens by role. Old files leave out the ids that all of a kind have."""
    usual = {
        "llama": {"bos": 1, "eos": 2, "unk": 0},
        "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0},
    }
    keys = {"unk": "unknown", "pad": "padding", "sep": "seperator"}  # the format spells it so
    special = {}
    for role in ("bos", "eos", "unk", "pad", "cls", "sep", "mask"):
        i = file.get(f"tokenizer.ggml.{keys.get(role, role)}_token_id", usual.get(kind, {}).get(role))
        if i is not None:
            if i >= len(words):
                raise WeightsError(f"{file.path}: the {role} token is number {i} of {len(words)}")
            special[role] = words[i]
    if kind == "bert":
        special.setdefault("cls", special.pop("bos"))
    return special


def _chat_template(file: GgufFile) -> str | list[dict[str, str]] | None:
    template = file.get("tokenizer.chat_template")
    names = file.get("tokenizer.chat_templates", [])
    if not names:
        return template if isinstance(template, str) else None
    templates = {"default": template} if template else {}
    templates |= {name: file.need(f"tokenizer.chat_template.{name}") for name in names}
    return [{"name": name, "template": text} for name, text in templates.items()]


def _wrap(tokenizer: Tokenizer, begin: str, end: str, segments: bool) -> processors.TemplateProcessing:
    """Put the special tokens around a text, and around both of a pair; BERT's pair shares its first one."""

    def around(text: str, opening: str, segment: int) -> list[str]:
        return [f"{piece}:{segment}" for piece in (opening, text, end) if piece]

    single = around("$A", begin, 0)
    pair = single + (around("$B", "", 1) if segments else around("$B", begin, 0))
    ids = {token: tokenizer.token_to_id(token) for token in (begin, end) if token}
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=list(ids.items()))


def _ids(file: GgufFile, words: list[str]) -> dict[str, int]:
    ids = {word: i for i, word in enumerate(words)}
    if len(ids) != len(words):
        raise WeightsError(f"{file.path} lists {len(words) - len(ids)} words of its vocabulary twice")
    return ids


def _split_merge(text: str) -> tuple[str, str]:
    place = text.index(" ", 1)  # a word may itself begin with a space
    return text[:place], text[place + 1 :]
