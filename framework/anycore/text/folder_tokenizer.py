"""The tokenizer of a Hugging Face folder, read by transformers, which knows each family's peculiarities.

transformers is imported only where nothing is kept of what it made of the same files before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
from tokenizers import Tokenizer

from anycore.errors import ConfigError, SourceError
from anycore.text import kept
from anycore.text.kept import Kept

_importing = Lock()
"""transformers fetches its parts when they are first asked for, which two threads must not do at the same time."""

log = logging.getLogger(__name__)


def import_reader() -> None:
    with _importing:
        from transformers import AutoTokenizer  # noqa: F401


def import_reader_for(folders: Iterable[Path]) -> None:
    """Import what some of these folders will be read with, if one will: for those who have something else to wait for
    in the seconds that it takes.
    """
    places = [kept.place_of(folder) for folder in folders]
    if any(place is None or not place.exists() for place in places):
        import_reader()


def load_folder_tokenizer(folder: Path) -> tuple[Tokenizer, Kept]:
    """Return the tokenizer of a folder and what belongs to it.

    Raises:
        SourceError: there is none, or it cannot be read.
        ConfigError: it needs code from the checkpoint.
    """
    place = kept.place_of(folder)
    found = None if place is None else kept.take(place)
    if found is not None:
        try:
            return _set_up(Tokenizer.from_str(found.backend), found), found
        except Exception as error:  # the library raises nothing more exact
            log.debug("%s is read anew: %s", place, error)
    loaded = read(folder)
    made = Kept(
        split_special_tokens=bool(getattr(loaded, "split_special_tokens", False)),
        special_tokens={k: v for k, v in loaded.special_tokens_map.items() if isinstance(v, str)},
        chat_templates=named(loaded.chat_template),
        token_types="token_type_ids" in loaded.model_input_names,
    )
    backend: Tokenizer = loaded.backend_tokenizer
    if place is not None and (text := written(backend)):
        kept.keep(place, msgspec.structs.replace(made, backend=text))
    return _set_up(backend, made), made


def read(folder: Path) -> Any:
    """What transformers makes of a folder: a tokenizer with a `backend_tokenizer`. Raises as above."""
    import_reader()
    from transformers import AutoTokenizer

    settings = read_settings(folder / "tokenizer_config.json")
    try:
        loaded = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each tokenizer class fails in its own way
        if "auto_map" in settings:
            raise ConfigError(
                f"the tokenizer of {folder} is code that the checkpoint carries ({settings['auto_map']}): anycore "
                "never runs it (trust_remote_code is off for good). Use a checkpoint with a tokenizer.json.",
                param="trust_remote_code",
            ) from error
        raise unreadable(folder, error) from error
    if getattr(loaded, "backend_tokenizer", None) is None:
        raise SourceError(
            f"the tokenizer in {folder} ({type(loaded).__name__}) has no fast form: add a tokenizer.json to the folder"
        )
    return loaded


FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json",
         "sentencepiece.bpe.model")  # fmt: skip
"""Names of the files that hold a vocabulary."""


def unreadable(folder: Path, error: Exception) -> SourceError:
    """What to tell of a folder whose tokenizer transformers cannot make: often there is none."""
    found = [name for name in FILES if (folder / name).is_file()]
    if not found:
        return SourceError(
            f"{folder} holds no tokenizer, such as a tokenizer.json: fetch the model again, or copy it from its source"
        )
    words = " ".join(str(error).split())
    shown = words if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {words}"
    return SourceError(f"the tokenizer in {folder} ({', '.join(found)}) cannot be read: {shown[:400]}")


def written(backend: Tokenizer) -> str:
    """A tokenizer as JSON; empty if it has parts that cannot be written, or would not be read as they are."""
    try:
        text = backend.to_str()
        return text if Tokenizer.from_str(text).to_str() == text else ""
    except Exception as error:  # parts made in Python
        log.debug("a tokenizer is not kept: %s", error)
        return ""


def named(templates: str | dict[str, str] | list[dict[str, str]] | None) -> dict[str, str]:
    """Return chat templates by name, from any of the forms that files have them in."""
    if not templates:
        return {}
    if isinstance(templates, str):
        return {"default": templates}
    return templates if isinstance(templates, dict) else {row["name"]: row["template"] for row in templates}


def read_settings(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def _set_up(backend: Tokenizer, what: Kept) -> Tokenizer:
    backend.encode_special_tokens = what.split_special_tokens
    return backend
