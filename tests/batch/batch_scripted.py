"""`anycore run-batch` over a scripted engine: `batch_scripted.py FOLDER IN OUT LARGEST-FILE script words`."""

from __future__ import annotations

import resource
import sys
from functools import partial
from pathlib import Path

from server.fake_child import __file__ as fake
from server.serve_scripted import read_tokenizer

from anycore.batch.run import run_batch
from anycore.config import ModelConfig, ServerConfig
from anycore.errors import AnycoreError
from anycore.server.bridge import EngineClient
from anycore.text import tokenizer


def main() -> int:
    folder, source, target, largest, *script = sys.argv[1:]
    if int(largest):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), resource.RLIM_INFINITY))
    tokenizer.from_folder = read_tokenizer
    client = partial(EngineClient, command=(sys.executable, fake, folder, *script))
    model = ModelConfig(model=folder, served_model_name=("lm",), task="generate")
    try:
        outcome = run_batch(Path(source), Path(target), ServerConfig(), [model], client=client)
    except AnycoreError as error:
        print(error.message)
        return error.exit_code
    print(outcome)
    return outcome.code if outcome.stopped else int(outcome.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
