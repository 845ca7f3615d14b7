"""Continues each prompt, all of them in one batch. Without prompts, standard input is the prompt."""

from __future__ import annotations

import argparse
import json

from anycore.cli.flags import Parser
from anycore.cli.local import add_model_flags, add_sampling_flags, open_model, texts_or_stdin


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="demo, or a folder, GGUF file, hub id, modelscope:ID or pkg:NAME"
    )
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to continue (default: standard input)")
    parser.add_argument("--chat", action="store_true", help="answer each prompt as a chat message")
    parser.add_argument("--json", action="store_true", help="print one JSON object a prompt")
    add_sampling_flags(parser, max_tokens=256)
    add_model_flags(parser)


def run(options: argparse.Namespace) -> int:
    prompts = texts_or_stdin(options.prompts, lines=False)
    with open_model(options, options.model, "generate") as llm:
        if options.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts])
        else:
            outputs = llm.generate(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        if options.json:
            line = {"prompt": prompt, "text": output.text, "finish_reason": output.finish_reason}
            print(json.dumps(line | {"tokens": len(output.token_ids)}, ensure_ascii=False))
        else:
            print(output.text if options.chat else prompt + output.text)
    return 0
