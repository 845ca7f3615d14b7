"""Text to token ids and back. One tokenizer a model, safe to use from several threads.

The ids are those of Hugging Face's fast tokenizers: folders are read by `folder_tokenizer`, GGUF files by
`gguf_tokenizer`. Decoding is defined by bytes: a text is the bytes of its tokens read as UTF-8, so that whole and
streamed text agree.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from anycore.errors import BadRequest

if TYPE_CHECKING:
    from tokenizers import Encoding
    from tokenizers import Tokenizer as Backend

    from anycore.models.source import Source


class Tokenizer:
    """A fast tokenizer with what a server needs around it.

    Args:
        backend: a `tokenizers.Tokenizer`; its truncation and padding are switched off.
        special_tokens: "bos_token", "eos_token", … → text; chat templates see them under these names.
        chat_templates: name → Jinja text; the usual one is called "default".
        token_types: whether the model reads segment ids.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str],
        chat_templates: dict[str, str] | None = None,
        token_types: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = special_tokens
        self.chat_templates = chat_templates or {}
        self.token_types = token_types
        self.bos_id = self._id("bos_token")
        self.eos_id = self._id("eos_token")
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self.added_ids = {token.content: i for i, token in added.items()}  # special or not
        self._rule = decoding_rule(backend)
        self._bytes: dict[int, bytes] = {}  # of the tokens seen so far

    @classmethod
    def from_source(cls, source: Source) -> Tokenizer:
        """Read the tokenizer of a located model.

        Raises:
            SourceError: there is none, or it cannot be read.
            ConfigError: it needs code from the checkpoint.
        """
        return from_folder(source.folder) if source.gguf is None else from_gguf(source)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of a text, as Hugging Face's `tokenizer(text)`.

        Raises:
            BadRequest: the text is not valid Unicode.
        """
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the ids of several texts, on several threads. Raises as `encode`."""
        for text in texts:
            check_unicode(text)
        return [list(encoding.ids) for encoding in self.encodings(texts, add_special_tokens)]

    def encodings(self, items: Sequence[str | tuple[str, str]], add_special_tokens: bool = True) -> list[Encoding]:
        """Return ids, type_ids and sequence_ids of several texts or pairs of valid Unicode, on several threads."""
        return self.backend.encode_batch_fast(list(items), add_special_tokens=add_special_tokens)

    def located(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """Return what `encodings` has of a text, and where each token lies in it (`offsets`), which costs some time.

        Raises:
            BadRequest: the text is not valid Unicode.
        """
        check_unicode(text)
        return self.backend.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of ids. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are nothing."""
        if self._rule is None:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        skipped = self.special_ids if skip_special_tokens else ()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text[1:] if self.drops_first_space and text.startswith(" ") else text

    def token(self, token_id: int) -> str:
        """Return one token as text, for logprobs; the first token of a word keeps its space."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes one token stands for, which may be a part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            piece = self.backend.id_to_token(token_id) if token_id >= 0 else None
            found = b"" if piece is None else self._rule.bytes_of(piece) if self._rule else piece.encode()
            self._bytes[token_id] = found
        return found

    def id_of(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, given as it is written there."""
        return self.backend.token_to_id(token)

    @property
    def streams(self) -> bool:
        """Whether text is the concatenation of its tokens' bytes (not so for WordPiece, which only encoders use)."""
        return self._rule is not None

    @property
    def drops_first_space(self) -> bool:
        """Whether the space that the vocabulary puts before the first word is not part of the text."""
        return self._rule is not None and self._rule.drops_first_space

    def _id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


class DecodingRule:
    """How the vocabulary writes bytes.

    Args:
        byte_level: GPT-2's alphabet, one visible character a byte; otherwise sentencepiece's: "▁" is a space.
        byte_fallback: "<0x0A>" is a byte.
        drops_first_space: see `Tokenizer`.
    """

    def __init__(self, byte_level: bool, byte_fallback: bool, drops_first_space: bool) -> None:
        self.alphabet = byte_alphabet() if byte_level else None
        self.byte_fallback = byte_fallback
        self.drops_first_space = drops_first_space

    def bytes_of(self, piece: str) -> bytes:
        if self.alphabet is not None:
            known = [self.alphabet.get(character) for character in piece]
            return bytes(b for b in known if b is not None) if None not in known else piece.encode()
        if self.byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace("▁", " ").encode()


def decoding_rule(backend: Backend) -> DecodingRule | None:
    """Read the rule from the backend's decoder; None if text is not the concatenation of its tokens."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = {step["type"]: step for step in steps}
    if not kinds.keys() <= {"ByteLevel", "Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
        return None
    replaced = kinds.get("Replace", {"pattern": {"String": "▁"}, "content": " "})
    if replaced["pattern"].get("String") != "▁" or replaced["content"] != " ":
        return None
    metaspace, strip = kinds.get("Metaspace"), kinds.get("Strip", {"start": 0, "stop": 0})
    drops = strip["start"] > 0 or (metaspace is not None and metaspace.get("prepend_scheme", "always") != "never")
    return DecodingRule("ByteLevel" in kinds, "ByteFallback" in kinds, drops)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for the characters from 256 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def from_folder(folder: Path) -> Tokenizer:
    """Read a Hugging Face folder's tokenizer."""
    from anycore.text.folder_tokenizer import load_folder_tokenizer

    backend, found = load_folder_tokenizer(folder)
    return Tokenizer(
        backend,
        special_tokens=found.special_tokens,
        chat_templates=found.chat_templates,
        token_types=found.token_types,
    )


def from_gguf(source: Source) -> Tokenizer:
    """Build the tokenizer that a GGUF file carries."""
    from anycore.text.folder_tokenizer import named
    from anycore.text.gguf_tokenizer import load_gguf_tokenizer

    assert source.gguf is not None
    backend, settings = load_gguf_tokenizer(source.gguf)
    return Tokenizer(
        backend,
        special_tokens={k: v for k, v in settings.items() if k.endswith("_token") and isinstance(v, str)},
        chat_templates=named(settings.get("chat_template")),
        token_types=source.config().get("type_vocab_size", 0) > 1,
    )


def check_unicode(text: str) -> None:
    """Raise BadRequest for a lone surrogate, which JSON can carry but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the text is not valid Unicode: a lone surrogate at character {error.start}") from None
