"""Tokenizers as transformers has read them, kept for the next start: to import it takes seconds, to read what is kept
a tenth of one.

Kept is the backend that transformers made, written by the `tokenizers` library itself, and what `Tokenizer` takes
beside it. Its file's name is a hash of all that it was made from, so that nothing kept is ever out of date.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from contextlib import suppress
from importlib import metadata
from itertools import accumulate, chain
from pathlib import Path

import msgspec

from anycore import __version__
from anycore.config import cache_dir

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".onnx_data", ".h5", ".msgpack", ".ot")
"""Ends of names of files that no tokenizer is read from."""
LARGEST = 64 << 20
"""Bytes. A folder with a larger file of another kind has its tokenizer read anew each time."""
MOST, MOST_BYTES = 1000, 512 << 20
"""Tokenizers that are kept, and what they take together: beyond these the longest unused ones go."""
READERS = ("transformers", "tokenizers", "sentencepiece", "tiktoken", "mistral-common", "protobuf")
"""Packages that decide what is read; not all of them have to be there."""

log = logging.getLogger(__name__)


class Kept(msgspec.Struct, frozen=True):
    """A tokenizer as data, but for the backend that its files gave."""

    split_special_tokens: bool  # the only setting of a backend that its JSON lacks
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]
    token_types: bool
    backend: str = ""  # JSON of the tokenizers library; empty before it is kept


def place_of(folder: Path) -> Path | None:
    """Where the tokenizer of a folder is kept, or would be; None where it is not to be.

    Hashed are our version and those of what reads it, the folder's path, and its files and those of its subfolders but
    for weights: transformers looks at more than the tokenizer's own, and knows some models by their path.
    """
    found = hashlib.sha256(__version__.encode())
    for name in READERS:
        with suppress(metadata.PackageNotFoundError):
            found.update(f"\0{name} {metadata.version(name)}".encode())
    found.update(b"\0" + os.fsencode(folder))
    try:
        for path in sorted(chain(folder.glob("[!.]*"), folder.glob("[!.]*/[!.]*"))):
            if path.name.endswith(WEIGHTS) or not path.is_file():
                continue
            if path.stat().st_size > LARGEST:
                return None
            found.update(b"\0" + os.fsencode(path.relative_to(folder)) + b"\0")
            found.update(hashlib.sha256(path.read_bytes()).digest())
    except OSError as error:
        log.debug("the tokenizer of %s is not kept: %s", folder, error)
        return None
    return cache_dir() / "tokenizers" / f"{found.hexdigest()[:32]}.msgpack"


def take(place: Path) -> Kept | None:
    """What is kept there; None where nothing is, or it cannot be read."""
    try:
        found = msgspec.msgpack.decode(place.read_bytes(), type=Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.debug("%s is read anew: %s", place, error)
        return None
    with suppress(OSError):
        place.touch()  # it has been used
    return found


def keep(place: Path, kept: Kept) -> None:
    """Write it as one piece, and let the longest unused ones go. Where nothing can be written nothing is kept."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix="draft-", delete=False) as draft:
            draft.write(msgspec.msgpack.encode(kept))
        Path(draft.name).replace(place)
        files = sorted(((file.stat(), file) for file in place.parent.iterdir()), key=lambda item: -item[0].st_mtime_ns)
        taken = accumulate(stat.st_size for stat, _ in files)
        for number, ((_, file), size) in enumerate(zip(files, taken, strict=True)):
            if number >= MOST or size > MOST_BYTES:
                file.unlink(missing_ok=True)
    except OSError as error:
        log.debug("the tokenizer is not kept in %s: %s", place.parent, error)
