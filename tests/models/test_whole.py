"""Models that a backend runs as a whole: who is asked, what comes of the rows, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anycore.contract.backend import Backend, Forward, ModelFiles
from anycore.contract.batch import Batch
from anycore.contract.declare import Task
from anycore.contract.ops import Ops
from anycore.errors import PluginError, Unsupported
from anycore.models.loader import load
from anycore.models.source import at
from anycore.models.spec import read_spec
from anycore.models.whole import WholeModel
from anycore_cpu.memory import CpuMemory

HIDDEN = 64


class Whole(Backend):
    """Runs whatever model it is given by a function, and remembers what it was told."""

    name = "whole"

    def __init__(self, run: Callable[[Batch], Tensor], trouble: Exception | None = None) -> None:
        super().__init__(torch.device("cpu"), CpuMemory(), Ops())
        self.run = run
        self.trouble = trouble
        self.asked: list[ModelFiles] = []

    def load_model(self, files: ModelFiles) -> Forward:
        self.asked.append(files)
        if self.trouble is not None:
            raise self.trouble
        return self.run


def batch(*lens: int) -> Batch:
    rows = sum(lens)
    starts = torch.tensor([0, *lens[:-1]]).cumsum(0)
    return Batch(torch.arange(rows), torch.arange(rows), list(lens), [0] * len(lens), starts, causal=False)


def numbered(batch: Batch) -> Tensor:
    """Row t holds t everywhere."""
    return torch.arange(len(batch.input_ids)).float()[:, None].expand(-1, HIDDEN)


def model_of(backend: Backend, folder: Path, task: Task) -> WholeModel:
    source = at(folder, str(folder))
    made = load(source, read_spec(source).for_task(task), backend, "float32")
    assert isinstance(made, WholeModel)
    return made


def test_hidden_rows_are_those_that_are_wanted(t_bert: Path) -> None:
    backend = Whole(numbered)
    model = model_of(backend, t_bert, Task.EMBED)
    assert model.forward(batch(3, 1, 4))[:, 0].tolist() == [0, 3, 4]
    (files,) = backend.asked
    assert (files.folder, files.file, files.architecture) == (t_bert, None, "BertModel")
    assert (files.dtype, files.labels, files.token_types, files.pad_id) == ("float32", 0, True, 0)


def test_a_classifier_gives_one_row_a_request(t_ce_xlmr: Path) -> None:
    backend = Whole(lambda batch: torch.tensor(batch.query_lens)[:, None].float())
    model = model_of(backend, t_ce_xlmr, Task.RERANK)
    assert model.score(model.forward(batch(3, 1, 4))).tolist() == [[3], [1], [4]]
    assert (backend.asked[0].labels, backend.asked[0].token_types, backend.asked[0].pad_id) == (1, False, 1)


@pytest.mark.parametrize("shape", [(8, HIDDEN + 1), (7, HIDDEN), (8,)])
def test_rows_of_another_shape_are_refused(t_bert: Path, shape: tuple[int, ...]) -> None:
    model = model_of(Whole(lambda batch: torch.zeros(shape)), t_bert, Task.EMBED)
    with pytest.raises(PluginError, match=r"gives \[.*\], not \[8, 64\]"):
        model.forward(batch(3, 1, 4))


def test_what_it_raises_is_told_with_backend_and_model(t_bert: Path) -> None:
    with pytest.raises(PluginError, match=r"backend whole cannot load .*: OSError: no such graph\. Another backend"):
        model_of(Whole(numbered, OSError("no such graph")), t_bert, Task.EMBED)
    with pytest.raises(Unsupported, match="not this one"):
        model_of(Whole(numbered, Unsupported("not this one")), t_bert, Task.EMBED)


def test_models_with_a_cache_are_built_of_operations(t_lm: Path) -> None:
    backend = Whole(numbered)
    source = at(t_lm, str(t_lm))
    assert not isinstance(load(source, read_spec(source), backend, "float32"), WholeModel)
    assert backend.asked == []
