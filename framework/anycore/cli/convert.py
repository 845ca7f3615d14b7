"""Writes a model anew as a folder of safetensors: quantised, if you ask for it, or from files that serve does not read.

Quantised folders are in the form of compressed-tensors, which transformers and vLLM read, too. The new folder appears
when it is complete; one that is there already is left as it is.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

from anycore.cli.flags import Parser
from anycore.cli.progress import show_progress
from anycore.config import flag
from anycore.contract.declare import DTYPES
from anycore.errors import ConfigError
from anycore.models.quantization import GROUPS, ONLINE, SPELLINGS, scheme_of
from anycore.models.source import Source

GGUF_COMPANIONS = ("generation_config.json", "modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
CALIBRATION_TOKENS = 16384
"""Of a text that are asked for at most: layers are given the first quarter, tuning all."""
SEQUENCE = 512
"""Tokens that are run at a time."""
SENTENCE_END = re.compile(r"(?<=[.!?;])\s+|\n\s*\n")


def add_arguments(parser: Parser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as for serve; also a folder or file of .bin, .ckpt or .pth")
    parser.add_argument("out", metavar="OUT", type=Path, help="the folder to write, which must not be there yet")
    choices = (*ONLINE, *SPELLINGS)
    parser.add_argument("--quantization", choices=choices, help="how matrices are rounded (default: they are not)")
    parser.add_argument("--group", type=int, choices=GROUPS, help="inputs that share a scale under w4a16 (default: 32)")
    text = "a text to find out by how rounding hurts least, for w8a8 and w4a16: slower to write, closer to the model"
    parser.add_argument("--calibration", metavar="TEXT_FILE", type=Path, help=text)
    text = (
        "matrices to leave as they are, such as layers.0.* (small ones and norms always are); auto, the default: those "
        "that w8a8 hurts most; none: no others"
    )
    parser.add_argument("--keep-dense", metavar="PATTERN,...", help=text)
    text = "quantise the embedding table and the head, too, which not every other engine reads"
    parser.add_argument("--tables", action="store_true", help=text)
    parser.add_argument(
        "--dtype", choices=("auto", *DTYPES), default="auto", help="of what stays dense (default: auto)"
    )
    text = "for weights named as Meta and Mistral name theirs, with a params.json"
    parser.add_argument("--model-type", choices=("llama", "mistral"), help=text)


def run(options: argparse.Namespace) -> int:
    from anycore.models.convert.writer import Conversion, convert

    scheme = scheme_of(options.quantization) if options.quantization else None
    check_meant(options, scheme)
    asked = Conversion(
        quantization=scheme,
        group=options.group or 32,
        calibration=None if options.calibration is None else read_text(options.calibration),
        keep_dense=("auto",) if options.keep_dense is None else tuple(w for w in options.keep_dense.split(",") if w),
        tables=options.tables,
        dtype=options.dtype,
        model_type=options.model_type,
    )
    with show_progress() as progress:
        folder = convert(
            options.model, options.out, asked, words, write_extras, lambda p, f: progress(f"{options.model}: {p}", f)
        )
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    print(f"{folder}: {size / 2**20:.1f} MiB of weights")
    return 0


def check_meant(options: argparse.Namespace, scheme: str | None) -> None:
    """Raise ConfigError for a flag that means nothing without --quantization, or with this one."""
    if options.group is not None and scheme != "w4a16":
        raise ConfigError("--group belongs to --quantization w4a16", param="group")
    for name in ("keep_dense", "tables"):
        if getattr(options, name) and scheme is None:
            raise ConfigError(f"{flag(name)} belongs to --quantization: nothing is rounded without it", param=name)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path} cannot be read as text: {error}", param="calibration") from error


def words(source: Source, text: str) -> list[list[int]]:
    """The first tokens of a text, in sequences as the model gets them: pieces of one length for a decoder, and for an
    encoder sentences, each with the tokens that begin and end a prompt.
    """
    from anycore.models.spec import read_spec
    from anycore.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(source)
    if read_spec(source).attention == "causal":
        begin, ids = tokenizer.encode(""), tokenizer.encode(text, add_special_tokens=False)[:CALIBRATION_TOKENS]
        step = SEQUENCE - len(begin)
        return [begin + ids[first : first + step] for first in range(0, len(ids), step)]
    sentences = [sentence for sentence in SENTENCE_END.split(text) if sentence.strip()]
    found: list[list[int]] = []
    for ids in tokenizer.encode_batch(sentences):
        if sum(map(len, found)) + len(ids) > CALIBRATION_TOKENS:
            break
        if len(ids) <= SEQUENCE:
            found.append(ids)
    return found


def write_extras(source: Source, folder: Path) -> None:
    """What a GGUF file's header holds beside weights, as the files of a folder."""
    from anycore.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_source(source)
    tokenizer.backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **tokenizer.special_tokens}
    if "default" in tokenizer.chat_templates:
        settings["chat_template"] = tokenizer.chat_templates["default"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), encoding="utf-8")
    for name in GGUF_COMPANIONS:
        content = source.read_json(name)
        if content is not None:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2), encoding="utf-8")
