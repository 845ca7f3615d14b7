"""Orders documents by relevance to a query. Without documents, each line of standard input is one."""

from __future__ import annotations

import argparse
import json

from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags, open_model, texts_or_stdin


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="demo, or a folder, GGUF file, hub id, modelscope:ID or pkg:NAME"
    )
    parser.add_argument("query", metavar="QUERY", help="what is looked for")
    parser.add_argument("documents", metavar="DOCUMENT", nargs="*", help="document (default: lines of standard input)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a document")
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    documents = texts_or_stdin(options.documents, lines=True)
    with open_model(options, options.model, "rerank") as llm:
        ranking = llm.rerank(options.query, documents)
    for index, score in ranking:
        if options.json:
            line = {"index": index, "score": score, "document": documents[index]}
            print(json.dumps(line, ensure_ascii=False))
        else:
            print(f"{score:.4f}  {documents[index]}")
    return 0
