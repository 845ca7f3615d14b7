"""The ONNX Runtime backend: its vectors and scores are the CPU backend's, and what it cannot do it refuses."""

from __future__ import annotations

import json
import logging
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from installed import anycore, install, own_cache

onnxruntime = pytest.importorskip("onnxruntime")
onnx = pytest.importorskip("onnx")

import anycore_onnx  # noqa: E402
from anycore_onnx.device import OnnxBackend, given, memory_of  # noqa: E402
from anycore_onnx.export import exported, fingerprint  # noqa: E402
from anycore_onnx.graph import SCORES, Graph, groups  # noqa: E402
from engines import LOADED, Output, finish, request  # noqa: E402

from anycore.config import ModelConfig  # noqa: E402
from anycore.contract.backend import ModelFiles  # noqa: E402
from anycore.contract.declare import Task  # noqa: E402
from anycore.engine.engine import Engine  # noqa: E402
from anycore.engine.launch import build, prepare  # noqa: E402
from anycore.errors import AnycoreError, ConfigError, PluginError, Unsupported  # noqa: E402

WITH_ONNX = replace(LOADED, backends=(*LOADED.backends, anycore_onnx.SPEC))
ONE = "CPUExecutionProvider"
CLOSE = 2e-6
"""How far a component of a vector of length 1 may be from the CPU backend's; a score is a number near 1."""


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One cache for the module: each model is traced once."""
    with pytest.MonkeyPatch.context() as patch:
        folder = own_cache(tmp_path_factory.mktemp("cache"))
        patch.setenv("ANYCORE_CACHE", str(folder))
        yield folder


Traced = tuple[Path, list[tuple[str, float]]]


@pytest.fixture(scope="module")
def traced(t_bert: Path, cache: Path) -> Traced:
    """The graph of T-BERT, made before any engine asks for it, and what was told meanwhile."""
    told: list[tuple[str, float]] = []
    files = files_of(t_bert, cache, progress=lambda phase, fraction: told.append((phase, fraction)))
    return exported(files), told


def texts(longest: int, count: int = 9) -> list[list[int]]:
    """Ids that are no special ones, of lengths from 1 to the longest, in no order."""
    chosen = random.Random(3)
    lengths = [1, longest, longest, *(chosen.randrange(1, longest) for _ in range(count - 3))]
    return [[chosen.randrange(5, 40) for _ in range(length)] for length in lengths]


def opened(backend: str, folder: Path, task: Task) -> Engine:
    settings = {"model": str(folder), "backend": backend, "task": task.value, "dtype": "float32"}
    return build(prepare(ModelConfig(**settings), WITH_ONNX))


def answers(backend: str, folder: Path, task: Task, inputs: list[list[int]], **own: Any) -> list[Output]:
    return asked(opened(backend, folder, task), inputs, **own)


def asked(made: Engine, inputs: list[list[int]], **own: Any) -> list[Output]:
    for number, tokens in enumerate(inputs):
        further = {name: value[number] for name, value in own.items()}
        made.add(request(str(number), tokens, made.task, **further))
    found = finish(made)
    return [found[str(number), 0] for number in range(len(inputs))]


def files_of(folder: Path, cache: Path, labels: int = 0, **changes: Any) -> ModelFiles:
    made = ModelFiles(
        folder, None, "BertModel", "float32", labels, True, 0, cache, progress=lambda phase, fraction: None
    )
    return replace(made, **changes)


def check_vectors(folder: Path, longest: int, **own: Any) -> None:
    inputs = texts(longest)
    ours, theirs = (answers(name, folder, Task.EMBED, inputs, **own) for name in ("onnx", "cpu"))
    for one, other in zip(ours, theirs, strict=True):
        assert one.vector is not None
        assert other.vector is not None
        assert abs(float(np.linalg.norm(one.vector)) - 1) < 1e-5
        assert float(np.abs(one.vector - other.vector).max()) < CLOSE


def check_scores(folder: Path, longest: int, **own: Any) -> None:
    inputs = texts(longest)
    ours, theirs = (answers(name, folder, Task.RERANK, inputs, **own) for name in ("onnx", "cpu"))
    scores = [one.scores for one in ours]
    assert len({tuple(found) for found in scores if found}) > 1, "every text has the same score"
    for one, other in zip(ours, theirs, strict=True):
        assert one.scores == pytest.approx(other.scores, abs=5 * CLOSE)


# --- the same numbers ------------------------------------------------------------------------------------------------


def test_bert_embeds_as_on_the_cpu_with_segments(t_bert: Path, traced: Traced) -> None:
    types = [[position % 2 for position in range(len(tokens))] for tokens in texts(128)]
    check_vectors(t_bert, 128, token_types=types)


def test_xlmr_reranks_as_on_the_cpu(t_ce_xlmr: Path) -> None:
    check_scores(t_ce_xlmr, 64)


def test_batch_mates_move_nothing(t_bert: Path, traced: Traced) -> None:
    inputs = texts(128, 5)
    made = opened("onnx", t_bert, Task.EMBED)
    together = asked(made, inputs)
    for tokens, found in zip(inputs, together, strict=True):
        (alone,) = asked(made, [tokens])
        assert alone.vector is not None
        assert found.vector is not None
        assert float(np.abs(alone.vector - found.vector).max()) < CLOSE


@pytest.mark.slow
def test_the_kit_proves_what_is_declared(tmp_path: Path, cache: Path) -> None:
    install(tmp_path, "anycore-onnx", "0.1.0", "onnx", "anycore_onnx")
    done = anycore("conformance", "onnx", "--quick", path=tmp_path, env={"ANYCORE_CACHE": str(cache)})
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr


# --- groups ----------------------------------------------------------------------------------------------------------


def test_groups_hold_every_request_once_and_never_too_much_padding() -> None:
    chosen = random.Random(0)
    for _ in range(300):
        lens = [chosen.choice((1, 7, 64, 900, 3000)) for _ in range(chosen.randrange(1, 40))]
        found = list(groups(lens))
        assert sorted(i for group in found for i in group) == list(range(len(lens)))
        for group in found:
            longest = max(lens[i] for i in group)
            assert len(group) * longest <= sum(lens)
            assert len(group) == 1 or len(group) * longest**2 <= SCORES


def test_equal_lengths_are_one_group() -> None:
    assert list(groups([16] * 8)) == [list(range(8))]


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_graph_is_made_once_with_progress_and_found_again(t_bert: Path, cache: Path, traced: Traced) -> None:
    path, told = traced
    assert [phase for phase, _ in told] == ["export"] * len(told)
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    again: list[str] = []
    files = files_of(t_bert, cache, progress=lambda phase, fraction: again.append(phase))
    assert exported(files) == path
    assert again == []
    assert fingerprint(replace(files, labels=1)) != fingerprint(files)


def test_a_graph_that_came_with_the_model_is_taken_and_no_weights_are_needed(
    t_bert: Path, traced: Traced, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = texts(128, 4)
    wanted = answers("onnx", t_bert, Task.EMBED, inputs)
    for path in t_bert.rglob("*.*"):
        if path.suffix != ".safetensors":
            target = tmp_path / path.relative_to(t_bert)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    (tmp_path / "onnx").mkdir()
    for path in traced[0].parent.iterdir():
        (tmp_path / "onnx" / path.name).write_bytes(path.read_bytes())
    with caplog.at_level(logging.INFO):
        found = answers("onnx", tmp_path, Task.EMBED, inputs)
    assert f"onnx: {tmp_path}/onnx/model.onnx on {ONE}" in caplog.text
    for one, other in zip(found, wanted, strict=True):
        assert np.array_equal(one.vector, other.vector)  # type: ignore[arg-type]


def test_what_cannot_be_traced_is_told_with_its_own_words(tmp_path: Path, cache: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(PluginError, match=r"has no ONNX file, and making one failed: (.|\n)*safetensors"):
        exported(files_of(tmp_path, cache))
    assert not [entry for entry in (cache / "onnx").iterdir() if "." in entry.name], "an unfinished folder is left"


def test_a_setting_names_the_file_or_asks_for_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "onnx").mkdir()
    for name in ("model.onnx", "model_int8.onnx"):
        (tmp_path / "onnx" / name).touch()
    assert given(tmp_path) == tmp_path / "onnx" / "model.onnx"
    monkeypatch.setenv("ANYCORE_ONNX_FILE", "onnx/model_int8.onnx")
    assert given(tmp_path) == tmp_path / "onnx" / "model_int8.onnx"
    monkeypatch.setenv("ANYCORE_ONNX_FILE", "export")
    assert given(tmp_path) is None
    for name in ("other.onnx", "../model.onnx"):
        monkeypatch.setenv("ANYCORE_ONNX_FILE", name)
        with pytest.raises(ConfigError, match="holds no such file"):
            given(tmp_path)


def graph_file(path: Path, inputs: tuple[str, ...], output: str) -> Path:
    """A graph that gives its mask back as float."""
    kind, sizes = onnx.TensorProto, ["batch", "length"]
    cast = onnx.helper.make_node("Cast", ["attention_mask"], [output], to=kind.FLOAT)
    taken = [onnx.helper.make_tensor_value_info(name, kind.INT64, sizes) for name in inputs]
    graph = onnx.helper.make_graph([cast], "g", taken, [onnx.helper.make_tensor_value_info(output, kind.FLOAT, sizes)])
    opset = [onnx.helper.make_opsetid("", 18)]
    onnx.save(onnx.helper.make_model(graph, opset_imports=opset, ir_version=9), path)
    return path


@pytest.mark.parametrize(
    ("inputs", "output", "labels", "words"),
    [
        (("input_ids", "attention_mask"), "dense_vecs", 0, "gives dense_vecs, and last_hidden_state or"),
        (("input_ids", "attention_mask"), "last_hidden_state", 1, "gives last_hidden_state, and logits is needed"),
        (("attention_mask",), "last_hidden_state", 0, "takes no input_ids"),
        (("input_ids", "attention_mask"), "logits", 1, "takes no token_type_ids"),
        (("input_ids", "attention_mask", "bbox"), "logits", 0, "gives logits"),
        (("input_ids", "attention_mask", "bbox"), "token_embeddings", 0, "an input bbox of a kind that is not known"),
    ],
)
def test_a_graph_of_another_kind_is_refused(
    tmp_path: Path, inputs: tuple[str, ...], output: str, labels: int, words: str
) -> None:
    path = graph_file(tmp_path / "model.onnx", inputs, output)
    with pytest.raises(Unsupported, match=words):
        Graph(path, [ONE], files_of(tmp_path, tmp_path, labels))


def test_a_graph_of_another_width_is_refused(t_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((t_bert / "config.json").read_bytes())
    graph_file(tmp_path / "model.onnx", ("input_ids", "attention_mask"), "last_hidden_state")
    with pytest.raises(AnycoreError, match="the backend's own model gives"):
        answers("onnx", tmp_path, Task.EMBED, [[5, 6]])


# --- devices ---------------------------------------------------------------------------------------------------------

BUILT = ["CUDAExecutionProvider", "AzureExecutionProvider", "OpenVINOExecutionProvider", ONE]


def test_providers_are_devices_in_the_order_asked_for() -> None:
    assert anycore_onnx.providers(BUILT, {}) == [BUILT[0], BUILT[2], ONE]
    asked = {"ANYCORE_ONNX_PROVIDERS": "cpu, OpenVINOExecutionProvider"}
    assert anycore_onnx.providers(BUILT, asked) == [ONE, BUILT[2]]
    with pytest.raises(ValueError, match="names cann, this ONNX Runtime has cuda, openvino, cpu"):
        anycore_onnx.providers(BUILT, {"ANYCORE_ONNX_PROVIDERS": "cann"})


def test_the_probe_names_providers_and_versions() -> None:
    found = anycore_onnx.probe()
    assert [device.chip for device in found.devices if device.chip == "cpu"] == ["cpu"]
    assert found.versions == {"onnxruntime": onnxruntime.__version__}


def test_h01_without_onnxruntime_the_probe_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    found = anycore_onnx.probe()
    assert not found.available
    assert "ImportError" in found.reason
    assert "pip install onnxruntime (CPU), onnxruntime-gpu" in found.advice


def test_h06_a_provider_that_does_not_start_is_refused_and_not_replaced(tmp_path: Path) -> None:
    path = graph_file(tmp_path / "model.onnx", ("input_ids", "attention_mask"), "last_hidden_state")
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(PluginError) as caught:
        Graph(path, ["CUDAExecutionProvider", ONE], files_of(tmp_path, tmp_path))
    assert f"cannot use CUDAExecutionProvider on this machine and took {ONE} instead" in str(caught.value)


def test_memory_that_nobody_tells_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PluginError, match="set ANYCORE_ONNX_MEMORY"):
        memory_of("QNNExecutionProvider")
    monkeypatch.setenv("ANYCORE_ONNX_MEMORY", str(2**33))
    assert memory_of("QNNExecutionProvider").total() == 2**33
    monkeypatch.setenv("ANYCORE_ONNX_MEMORY", "8 GB")
    with pytest.raises(ConfigError, match="must be a number of bytes"):
        memory_of("QNNExecutionProvider")


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(PluginError, match="9999"):
        OnnxBackend(9999)


# --- what it cannot do -----------------------------------------------------------------------------------------------


def refusal(folder: Path, **settings: Any) -> str:
    with pytest.raises(AnycoreError) as caught:
        prepare(ModelConfig(model=str(folder), backend="onnx", **settings), WITH_ONNX)
    return str(caught.value)


def test_h07_generation_is_refused_with_the_reason(t_lm: Path) -> None:
    assert "an ONNX graph has no paged KV cache" in refusal(t_lm, dtype="float32")


def test_h08_other_data_types_are_refused_with_the_reason(t_bert: Path) -> None:
    assert "take --dtype float32" in refusal(t_bert, task="embed", dtype="bfloat16")


def test_gguf_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"model\.gguf is a GGUF file"):
        OnnxBackend(0).load_model(files_of(tmp_path, tmp_path, file=tmp_path / "model.gguf"))


def test_h08_the_matrix_lists_it_with_its_reasons(tmp_path: Path) -> None:
    install(tmp_path, "anycore-onnx", "0.1.0", "onnx", "anycore_onnx")
    done = anycore("matrix", path=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:2] for line in done.stdout.splitlines() if line.startswith("onnx ")]
    assert ["onnx", "native"] in rows
    assert ["onnx", "unsupported"] in rows
    assert "an ONNX graph has no paged KV cache" in done.stdout
    assert "ONNX Runtime CPUExecutionProvider" in done.stdout
