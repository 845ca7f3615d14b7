"""A model that its backend runs as a whole, and the hidden rows or logits of which are all that is seen of it."""

from __future__ import annotations

from torch import Tensor

from anycore.config import cache_dir
from anycore.contract.backend import Backend, Forward, ModelFiles
from anycore.contract.batch import Batch
from anycore.errors import AnycoreError, ConfigError, PluginError
from anycore.models.layers import Dense, project
from anycore.models.parameters import labels
from anycore.models.source import Progress, Source
from anycore.models.spec import ModelSpec


class WholeModel:
    """Stands where an Encoder would: pooling and Dense modules follow in the same way."""

    def __init__(self, spec: ModelSpec, run: Forward, dense: list[Dense]) -> None:
        self.spec = spec
        self.run = run
        self.dense = dense

    def forward(self, batch: Batch) -> Tensor:
        """The hidden rows [R, H] of `batch.output_rows`; of a classifier, whose one row a request is, [B, labels]."""
        wanted = labels(self.spec) if scores(self.spec) else self.spec.hidden_size
        rows = self.run(batch)
        height = len(batch.query_lens) if scores(self.spec) else len(batch.input_ids)
        if rows.shape != (height, wanted):
            raise PluginError(f"the backend's own model gives {list(rows.shape)}, not {[height, wanted]}")
        return rows if scores(self.spec) else batch.wanted(rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Models without a KV cache generate nothing."""
        raise NotImplementedError(f"{self.spec.architecture} has no language-model head")

    def score(self, rows: Tensor) -> Tensor:
        """[B, labels]: `forward` went through the head already."""
        return rows.float()

    def project(self, vectors: Tensor) -> Tensor:
        """[B, H] float32 → [B, D]."""
        return project(vectors, self.dense)


def scores(spec: ModelSpec) -> bool:
    return spec.head == "classifier"


def forward_of(
    backend: Backend, source: Source, spec: ModelSpec, dtype: str, progress: Progress | None
) -> Forward | None:
    """What the backend runs this model by, if it runs it as a whole.

    Raises:
        PluginError: it tried, and failed.
    """
    if spec.attention == "causal":
        return None
    files = ModelFiles(
        folder=source.folder,
        file=source.gguf,
        architecture=spec.architecture,
        dtype=dtype,
        labels=labels(spec) if scores(spec) else 0,
        token_types=spec.token_type_count > 1,
        pad_id=spec.pad_id or 0,
        cache=cache_dir(),
        progress=progress or (lambda phase, fraction: None),
    )
    try:
        run = backend.load_model(files)
        if run is not None and source.checkpoint is not None:
            raise ConfigError(
                f"--checkpoint cannot give weights to the model that backend {backend.name} runs {source.name} by",
                param="checkpoint",
            )
        return run
    except AnycoreError:
        raise
    except Exception as error:
        raise PluginError(
            f"backend {backend.name} cannot load {source.name}: {type(error).__name__}: {error}. "
            "Another backend may: see `anycore matrix`",
            param="backend",
        ) from error
