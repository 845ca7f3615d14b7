"""Makes command-line flags from the fields of the settings, and turns what users write into values.

Flags that are not given are absent from the parsed namespace, so that files and defaults can fill them in.
"""

from __future__ import annotations

import argparse
import json
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

from anycore.config import flag

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
METAVARS = {int: "N", float: "NUMBER", str: "TEXT"}


class Parser(argparse.ArgumentParser):
    """An argument parser that takes no abbreviations and answers a misspelling with the nearest right word."""

    def __init__(self, *, prog: str, description: str | None) -> None:
        super().__init__(prog=prog, description=description, allow_abbrev=False)

    def shorten_usage(self) -> None:
        """Name only the positional arguments: the flags are many, and listed below."""
        words = [self.prog, *(self._usage_word(action) for action in self._get_positional_actions()), "[--flags]"]
        self.usage = " ".join(words)

    def _usage_word(self, action: argparse.Action) -> str:
        name = str(action.metavar or action.dest)
        return {"?": f"[{name}]", "*": f"[{name} ...]"}.get(str(action.nargs), name)

    def read(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse after checking every flag's spelling: argparse would take the value of a misspelt one for MODEL."""
        for word in words:
            if word == "--":
                break
            name = word.split("=", 1)[0]
            if word.startswith("--") and name not in self._option_string_actions:
                self.error(f"there is no flag {name}{nearest(name, self._option_string_actions)}")
        return self.parse_intermixed_args(words)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n({self.prog} --help lists the flags)\n")


class Switch(argparse.Action):
    """`--x` is true, `--no-x` is false."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


class Once(argparse.Action):
    """A positional argument that a flag may give too, but not both with different values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        earlier = getattr(namespace, self.dest, values)
        if earlier != values:
            parser.error(f"{self.metavar} is given twice: {earlier} and {values}")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser, title: str, config: type[Any], skip: Iterable[str] = ()) -> None:
    """Add one flag for every field of `config` but those in `skip`."""
    group = parser.add_argument_group(title)
    for item in fields(config):
        if item.name in skip:
            continue
        kind = kind_of(config, item)
        options: dict[str, Any] = {"dest": item.name, "default": argparse.SUPPRESS, "help": help_text(item)}
        if kind is bool:
            group.add_argument(*switch_flags(item), action=Switch, nargs=0, **options)
            continue
        if kind is tuple:
            # A key takes one word, so that `--api-key KEY MODEL` does not make a key of the model.
            options |= {"action": "extend", "nargs": 1 if item.metadata["secret"] else "+"}
            options["type"] = int if holds_numbers(item) else str
        else:
            options["type"] = _argument(partial(convert, item, kind))
        group.add_argument(*spellings(item), metavar=metavar(item, kind), **options)


def spellings(item: Field[Any]) -> list[str]:
    """Return every flag that sets a field, the canonical one first."""
    names = [flag(item.name), *item.metadata["flags"]]
    if item.name.startswith("enable_"):
        names.append(flag(item.name.removeprefix("enable_")))
    return names


def switch_flags(item: Field[Any]) -> list[str]:
    return [*spellings(item), *(name.replace("--", "--no-", 1) for name in spellings(item))]


def kind_of(config: type[Any], item: Field[Any]) -> type[Any]:
    """Return bool, int, float, str or tuple: a field's type without `| None`."""
    hint = get_type_hints(config)[item.name]
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(part for part in get_args(hint) if part is not type(None))
    kind: type[Any] = get_origin(hint) or hint
    return kind


def holds_numbers(item: Field[Any]) -> bool:
    """Whether a field that is a tuple holds whole numbers, not texts."""
    return str(item.type).startswith("tuple[int")


def convert(item: Field[Any], kind: type[Any], value: Any) -> Any:
    """Turn a word of the command line, or a value of a YAML file, into the value of a field.

    Raises:
        ValueError: it is of another kind, or not among the choices.
    """
    choices = item.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{value!r} is not one of {', '.join(choices)}{nearest(str(value), choices)}")
    if kind is bool:
        if not isinstance(value, bool):
            raise ValueError(f"must be true or false, not {value!r}")
        return value
    if kind is tuple:
        words = value if isinstance(value, list) else [value]
        if holds_numbers(item):
            if not all(isinstance(word, int) and not isinstance(word, bool) for word in words):
                raise ValueError(f"must be a whole number or a list of them, not {value!r}")
            return tuple(words)
        if not all(isinstance(word, str) for word in words):
            raise ValueError("must be text or a list of texts: put numbers in quotes")
        return tuple(words)
    if kind is str:
        if isinstance(value, dict):
            return json.dumps(value)
        if not isinstance(value, str):
            raise ValueError(f"must be text, not {value!r}: put it in quotes")
        return value
    if isinstance(value, bool):
        raise ValueError(f"must be a number, not {value!r}")
    if value == "auto" and item.default is None:
        return None  # as without the flag
    if item.name == "device" and isinstance(value, str) and not value.isdigit():
        raise ValueError(f"must be the index of a device, not {value!r}; a backend is chosen with --backend {value}")
    if kind is int and isinstance(value, str) and item.metadata["unit"]:
        return parse_quantity(value)
    try:
        number = kind(value) if isinstance(value, str) else value
    except ValueError:
        number = None  # Python's own words say what it could not do, not what is wanted
    if kind is int and not isinstance(number, int):
        raise ValueError(f"must be a whole number, not {value!r}")
    if not isinstance(number, (int, float)):
        raise ValueError(f"must be a number, not {value!r}")
    return float(number) if kind is float else number


def parse_quantity(text: str) -> int:
    """Read a count: 4096, 8k (thousand), 8K and 8Ki (1024), 1G, 1GiB, 1.5GiB (2**30), 1GB (10**9).

    Raises:
        ValueError: it is none of these, or no whole number.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgtKMGT]?)(i?)(B?)", text.strip(), re.ASCII)
    if not match or (match[3] and not match[2]):
        raise ValueError(f"must be a number such as 4096, 512MiB or 4GiB, not {text!r}")
    number, prefix, binary, byte = match.groups()
    scale = UNITS[prefix.upper() if binary else prefix.lower() if byte else prefix]
    value = float(number) * scale if "." in number else int(number) * scale
    if value != int(value):
        raise ValueError(f"must be a whole number, not {text!r}")
    return int(value)


def quantity(text: str) -> int:
    """`parse_quantity` for argparse, which keeps the words of its own kind of error alone."""
    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(kind: type[float] | type[int]) -> Any:
    """What reads numbers separated by commas."""

    def parse(text: str) -> list[float]:
        try:
            return [kind(word) for word in text.split(",")]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be a number, or several such as 1,4,16, not {text!r}") from error

    return parse


def nearest(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean X?", or nothing when no known word is near."""
    near = get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def metavar(item: Field[Any], kind: type[Any]) -> str:
    if item.metadata["choices"]:
        return "{" + ",".join(item.metadata["choices"]) + "}"
    if item.metadata["unit"] == "bytes":
        return "SIZE"
    return "N" if holds_numbers(item) else METAVARS.get(kind, "TEXT")


def help_text(item: Field[Any]) -> str:
    """Return a field's help with its default, where the help does not tell it already."""
    text: str = item.metadata["help"]
    if "(default" not in text and item.default not in (None, (), "", False):
        text += f" (default: {'on' if item.default is True else item.default})"
    return text.replace("%", "%%")


def _argument(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap `read` so that argparse shows its own words, and not just "invalid value"."""

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse
