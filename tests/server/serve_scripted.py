"""A server over scripted engines: `serve_scripted.py FOLDER name=value ... -- script words`, see fake_child.Script."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from anycore.config import ModelConfig, ServerConfig
from anycore.errors import AnycoreError
from anycore.server.bridge import EngineClient
from anycore.server.run import serve
from anycore.text import tokenizer

FAKE = Path(__file__).with_name("fake_child.py")


def read_tokenizer(folder: Path) -> tokenizer.Tokenizer:
    """Read tokenizer.json and nothing else: starts in a fraction of the time that the general way takes."""
    return tokenizer.Tokenizer(Backend.from_file(str(folder / "tokenizer.json")), special_tokens={})


def main() -> int:
    at = sys.argv.index("--")
    folder, words, script = sys.argv[1], sys.argv[2:at], sys.argv[at + 1 :]
    settings: dict[str, Any] = {"port": 0}
    names, tasks = ["lm"], ["generate"]
    own: dict[str, Any] = {}  # settings of each model
    for name, value in (word.split("=", 1) for word in words):
        if name == "names":
            names = value.split(",")
        elif name == "tasks":
            tasks = value.split(",")
        elif name == "reuse_port":
            settings[name] = value == "True"
        elif name == "keep_alive":
            own[name] = float(value)
        elif name == "replicas":
            own[name] = int(value)
        elif name == "api_key":
            settings[name] = (value,)
        else:
            settings[name] = float(value) if value.replace(".", "").isdigit() else value
            if name in ("port", "max_body_size", "api_servers", "engine_restarts"):
                settings[name] = int(value)
    models = [
        ModelConfig(model=folder, served_model_name=(name,), task=task, **own)
        for name, task in zip(names, tasks, strict=True)
    ]
    command = (sys.executable, str(FAKE), folder, *script)
    tokenizer.from_folder = read_tokenizer
    try:
        return serve(ServerConfig(**settings), models, client=partial(EngineClient, command=command))
    except AnycoreError as error:
        print(f"anycore: {error.message}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
