"""Makes a model's graph from its weights, once: traced in a process of its own, kept in the cache.

The process gives its memory back, and what tracing changes in torch stays there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from anycore.contract.backend import ModelFiles
from anycore.errors import PluginError

PHASE = "export"
PROGRESS = "progress "  # begins the lines by which the process tells how far it is
NEEDED = ("torch", "transformers", "onnxscript")
NAME = "model.onnx"
WORDS = 1500  # of the process's last words in an error


def exported(files: ModelFiles) -> Path:
    """The graph of these weights, from the cache if it was made before.

    Raises:
        PluginError: it cannot be made, with the original words.
    """
    home = files.cache / "onnx"
    target = home / fingerprint(files)
    if not (target / NAME).is_file():
        home.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=home))
        try:
            trace(files, made)
            made.chmod(0o755)
            made.rename(target)
        except OSError:
            if not (target / NAME).is_file():  # else another process was faster
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return target / NAME


def fingerprint(files: ModelFiles) -> str:
    """Names a graph by all that it is made of: what it gives, weights and config, and the libraries that trace it."""
    parts = [str(bool(files.labels)), *(f"{name} {version(name)}" for name in NEEDED)]
    parts.append((files.folder / "config.json").read_text(encoding="utf-8"))
    for path in sorted(files.folder.glob("*.safetensors")):
        state = path.stat()
        parts.append(f"{path.resolve()} {state.st_size} {state.st_mtime_ns}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def trace(files: ModelFiles, folder: Path) -> None:
    """Write the graph into a folder, passing on how far the process is."""
    command = [sys.executable, "-m", "anycore_onnx.export", str(files.folder), str(folder / NAME), str(files.labels)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as words:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=words, text=True, env=environment)
        assert process.stdout is not None
        with process, process.stdout:
            for line in process.stdout:
                if line.startswith(PROGRESS):
                    files.progress(PHASE, float(line.removeprefix(PROGRESS)))
        if process.returncode:
            words.seek(0)
            raise PluginError(
                f"{files.folder} has no ONNX file, and making one failed: {words.read().strip()[-WORDS:]}\n"
                "Give it one (onnx/model.onnx, as optimum writes it), or take another backend",
                param="backend",
            )


def main(source: str, target: str, labels: str) -> None:
    """Trace with two requests of different lengths, both sizes free."""
    tell(0.0)
    import torch
    import transformers

    kind: Any = transformers.AutoModelForSequenceClassification if int(labels) else transformers.AutoModel
    model = kind.from_pretrained(source, dtype=torch.float32, local_files_only=True).eval()
    tell(0.2)
    ids = torch.full((2, 8), 5)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if getattr(model.config, "type_vocab_size", 1) > 1:
        inputs["token_type_ids"] = torch.zeros_like(ids)

    class First(torch.nn.Module):
        """The model's first output, of inputs by position."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: torch.Tensor) -> torch.Tensor:
            return self.model(**dict(zip(inputs, values, strict=True)), return_dict=False)[0]  # type: ignore[no-any-return]

    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length", max=model.config.max_position_embeddings - 2)}
    program = torch.onnx.export(
        First().eval(),
        tuple(inputs.values()),
        dynamo=True,
        input_names=list(inputs),
        output_names=["logits" if int(labels) else "last_hidden_state"],
        dynamic_shapes=(tuple(sizes for _ in inputs),),
        verbose=False,
    )
    assert program is not None
    tell(0.8)
    program.save(target, external_data=True)  # one protobuf holds 2 GiB at most
    tell(1.0)


def tell(fraction: float) -> None:
    print(f"{PROGRESS}{fraction}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
