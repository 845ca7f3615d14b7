"""Turns each text into a vector, all of them in one batch. Without texts, each line of standard input is one."""

from __future__ import annotations

import argparse
import json

from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags, open_model, texts_or_stdin


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="demo, or a folder, GGUF file, hub id, modelscope:ID or pkg:NAME"
    )
    parser.add_argument("texts", metavar="TEXT", nargs="*", help="text (default: lines of standard input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a text, with the text")
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    texts = texts_or_stdin(options.texts, lines=True)
    with open_model(options, options.model, "embed") as llm:
        vectors = llm.embed(texts)
    for text, vector in zip(texts, vectors, strict=True):
        if options.json:
            print(json.dumps({"text": text, "embedding": vector}, ensure_ascii=False))
        else:
            print(" ".join(f"{value:.7g}" for value in vector))
    return 0
