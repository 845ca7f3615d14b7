"""--checkpoint: other weights under a model's config."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import tiny
from engines import engine, run

from anycore import plugins
from anycore.config import ModelConfig
from anycore.engine.launch import prepare
from anycore.errors import SourceError, WeightsError
from anycore.models.loader import check

PROMPTS = [[7, 20, 31, 44, 5, 90], [11] * 17]


def test_other_weights_are_served(tmp_path: Path) -> None:
    model = tiny.tiny_lm(tmp_path / "model", layers=1)
    other = tiny.tiny_lm(tmp_path / "other", layers=1, seed=9)
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(other / "model.safetensors", bare)
    (model / "model.safetensors").unlink()  # it is not asked for
    mixed = run(engine(model, checkpoint=str(bare)), PROMPTS)
    assert [one.tokens for one in mixed] == [one.tokens for one in run(engine(other), PROMPTS)]


def test_weights_of_another_model_and_no_weights_are_refused(t_lm: Path, tmp_path: Path) -> None:
    loaded = plugins.load()
    wider = tiny.tiny_lm(tmp_path / "wider", hidden=192, layers=1)
    prepared = prepare(ModelConfig(model=str(t_lm), backend="cpu", checkpoint=str(wider)), loaded)
    with pytest.raises(WeightsError, match="do not belong together"):
        check(prepared.source, prepared.spec)
    with pytest.raises(SourceError, match="nowhere is no folder"):
        prepare(ModelConfig(model=str(t_lm), checkpoint=str(tmp_path / "nowhere")), loaded)
