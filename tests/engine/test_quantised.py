"""Weights that are rounded while they are loaded: what is computed, what it takes, and who decided it."""

from __future__ import annotations

import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from allocations import allocations
from engines import run
from packing import KeepingOps, SmallOps, keeping
from safetensors.torch import load_file, save_file
from tiny import tiny_lm
from transformers import AutoModelForCausalLM

from anycore import plugins
from anycore.config import ModelConfig
from anycore.contract.formats import Format
from anycore.contract.weights import Fp8Weight, Int4Weight, Int8Weight
from anycore.engine.launch import Prepared, build, prepare
from anycore.errors import ConfigError, Unsupported
from anycore.models import families, gathering
from anycore.models.loader import load
from anycore.models.parameters import canonical
from anycore.models.quantised.rounding import quantise
from anycore.models.quantization import quantization
from anycore.plugins import Plugins

SCHEMES = {"w8a8": Int8Weight, "w4a16": Int4Weight, "fp8": Fp8Weight}
PROMPTS = [[7, 20, 31, 44, 5, 90], [11] * 17, [3]]


def ready(folder: Path, loaded: Plugins, **settings: Any) -> Prepared:
    settings = {"dtype": "float32", "kv_cache_memory": 2**22, **settings}
    return prepare(ModelConfig(model=str(folder), backend="cpu", **settings), loaded)


def rounded(folder: Path, prepared: Prepared, target: Path) -> Path:
    """The model with each of its quantised matrices replaced by what it stands for."""
    shutil.copytree(folder, target)
    assert prepared.wish.quantization is not None
    formats = prepared.wish.quantization.formats
    tensors = load_file(folder / "model.safetensors")
    found = {canonical(name): name for name in tensors}
    for plain, kind in formats.items():
        if plain == "lm_head.weight" and prepared.spec.tied:
            continue
        tensors[found[plain]] = quantise(tensors[found[plain]], kind).dense()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gemma3", True)])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_generates_as_transformers_with_the_rounded_weights(
    scheme: str, family: str, tied: bool, tmp_path: Path
) -> None:
    folder = tiny.tiny_lm(tmp_path / "m", family=family, tied=tied, layers=2)
    prepared = ready(folder, keeping(), quantization=scheme)
    engine = build(prepared)
    packed = engine.runner.backend.ops.packed
    assert {type(weight) for weight in packed} == {SCHEMES[scheme]}
    assert len(packed) == 2 * 4 + (1 if tied else 2)  # a tied table and head are one handle
    model: Any = AutoModelForCausalLM.from_pretrained(rounded(folder, prepared, tmp_path / "dense"))
    for tokens, output in zip(PROMPTS, run(engine, PROMPTS), strict=True):
        ids = list(tokens)
        for _ in output.tokens:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert output.tokens == ids[len(tokens) :]


def test_yes_and_no_are_rows_of_a_quantised_head(tmp_path: Path) -> None:
    folder = tiny.tiny_reranker(tmp_path / "m", tied=True)
    prepared = ready(folder, keeping(), quantization="w8a8")
    exact = run(build(ready(rounded(folder, prepared, tmp_path / "dense"), plugins.load())), PROMPTS)
    found = run(build(prepared), PROMPTS)
    assert [one.scores for one in found] == [pytest.approx(one.scores, rel=1e-4) for one in exact]


@pytest.mark.parametrize("tables", [True, False])
def test_tables_are_quantised_where_the_backend_looks_them_up(tables: bool, t_lm: Path) -> None:
    prepared = ready(t_lm, keeping(tables=tables), quantization="w4a16")
    assert prepared.wish.quantization is not None
    formats = prepared.wish.quantization.formats
    assert ("embed_tokens.weight" in formats) is tables
    assert ("lm_head.weight" in formats) is (tables or not prepared.spec.tied)


@pytest.mark.parametrize(
    ("settings", "share"),
    [
        ({"quantization": "w8a8"}, 0.28),
        ({"quantization": "w4a16"}, 0.18),
        ({"quantization": "bits=4", "quantization_group": 128}, 0.16),
        ({"quantization": "fp8", "keep_dense": ("embed_tokens", "layers.0.*")}, 0.6),
    ],
)
def test_plan_is_what_is_held(settings: dict[str, Any], share: float, tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, tied=True, hidden=256)
    prepared = ready(folder, keeping(SmallOps), **settings)
    card = build(prepared).card
    assert card["memory_measured"]["weights"] == pytest.approx(card["memory"]["weights"], rel=0.001, abs=4096)
    assert card["memory"]["weights"] < share * prepared.spec.weight_bytes("float32")
    assert card["quantization"] == {"bits=4": "w4a16"}.get(settings["quantization"], settings["quantization"])


class AtOnce(ThreadPoolExecutor):
    """Runs what is submitted at once, on the caller's thread: the profiler sees what is freed there only."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loading_takes_no_more_than_the_result_and_a_shard(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gathering, "ThreadPoolExecutor", AtOnce)
    folder = tiny.tiny_lm(tmp_path / "m", tied=True, hidden=256, layers=24)
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(sharded, max_shard_size="16MB")
    shard = max(path.stat().st_size for path in sharded.glob("*.safetensors"))
    assert len(list(sharded.glob("*.safetensors"))) > 2
    prepared = ready(sharded, keeping(SmallOps), quantization=scheme)
    assert prepared.plan is not None
    backend = prepared.choice.spec.open(0)
    with torch.inference_mode(), allocations() as found:
        model = load(prepared.source, prepared.spec, backend, "float32", quantization=prepared.wish.quantization)
    assert model is not None
    assert found.left == pytest.approx(prepared.plan.weights, rel=0.02)
    assert found.peak - shard <= prepared.plan.weights  # a file is mapped, and counted, while it is read


SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
}  # fmt: skip
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512,
    "max_position_embeddings": 32768,
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "max_position_embeddings": 32768,
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "most"), [("w8a8", 0.55), ("fp8", 0.55), ("w4a16", 0.32)])
@pytest.mark.parametrize("config", [SMOLLM2, GEMMA3, QWEN], ids=["smollm2-135m", "gemma3-270m", "qwen2.5-7b"])
def test_shares_of_real_models(config: dict[str, Any], scheme: str, most: float) -> None:
    spec = families.read(config)
    for groups in (False, True):
        chosen = quantization(spec, scheme, scheme, 32, tables=True, keep_dense=("auto",), groups=groups)
        held = spec.weight_bytes("bfloat16", chosen)
        assert 0.9 * most < held / spec.weight_bytes("bfloat16") <= most


MINILM = {
    "architectures": ["BertModel"], "model_type": "bert", "hidden_size": 384, "intermediate_size": 1536,
    "num_hidden_layers": 6, "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
    "type_vocab_size": 2,
}  # fmt: skip


def decided(prepared: Prepared) -> str:
    return next(str(decision) for decision in prepared.decisions if decision.name == "quantization")


def test_who_decided(t_lm: Path) -> None:
    assert decided(ready(t_lm, keeping())) == "quantization = none (model)"
    assert decided(ready(t_lm, keeping(), quantization="none")) == "quantization = none (flag)"
    assert decided(ready(t_lm, keeping(), quantization="bits=8")).startswith("quantization = w8a8 (flag: ")


def test_float32_gives_way_to_what_quantised_weights_are_multiplied_by(t_lm: Path) -> None:
    loaded = keeping()
    (backend,) = loaded.backends
    rows = tuple(replace(row, schemes=row.schemes * (row.weights == ("bfloat16",))) for row in backend.support)
    loaded = replace(loaded, backends=(replace(backend, support=rows),))
    tiny_float32 = ready(t_lm, loaded, dtype="auto", quantization="w8a8")
    assert (tiny_float32.spec.dtype, tiny_float32.wish.dtype) == ("float32", "bfloat16")
    assert any("beside w8a8 weights" in why for why in tiny_float32.adjustments)
    assert ready(t_lm, loaded, dtype="auto").wish.dtype == "float32"


def test_patterns_name_something(t_lm: Path) -> None:
    assert ready(t_lm, keeping(), quantization="w8a8", keep_dense=("layers.*.mlp.gate_proj",)) is not None
    with pytest.raises(ConfigError, match=r"--keep-dense layers\.77"):
        ready(t_lm, keeping(), quantization="w8a8", keep_dense=("layers.77.*",))
    with pytest.raises(ConfigError, match="--quantization-group must be one of 32, 64, 128, not 17"):
        ready(t_lm, keeping(), quantization="w4a16", quantization_group=17)


@pytest.mark.parametrize("scheme", ["auto", "none", "w8a8", "fp8", "bits=8"])
def test_settings_that_a_scheme_has_no_use_for_are_refused(scheme: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization-group 128 belongs to --quantization w4a16, not {scheme}"):
        ModelConfig(model="m", quantization=scheme, quantization_group=128)
    if scheme in ("auto", "none"):
        with pytest.raises(ConfigError, match=f"nothing is rounded with {scheme}"):
            ModelConfig(model="m", quantization=scheme, keep_dense=("lm_head",))


def test_what_w8a8_hurts_most_stays_dense_in_deep_decoders(tmp_path: Path) -> None:
    """Where the backend does not multiply by groups."""
    deep, loaded = tiny_lm(tmp_path, layers=16, hidden=64), keeping()
    rows = replace(loaded, backends=tuple(replace(backend, groups=False) for backend in loaded.backends))
    down = {f"layers.{layer}.mlp.down_proj.weight" for layer in range(16)}

    def dense(scheme: str = "w8a8", **more: Any) -> set[str]:
        chosen = ready(deep, rows, quantization=scheme, **more).wish.quantization
        assert chosen is not None
        return down - set(chosen.formats)

    assert dense() == {f"layers.{layer}.mlp.down_proj.weight" for layer in (0, 1, 2, 15)}
    assert dense(keep_dense=("none",)) == dense("w4a16") == dense(keep_dense=("lm_head",)) == set()
    assert len(dense(keep_dense=("auto", "layers.7.*"))) == 5
    with pytest.raises(ConfigError, match="none stands alone"):
        dense(keep_dense=("none", "lm_head"))


def test_w8a8_has_groups_in_narrow_models_of_many_layers(tmp_path: Path) -> None:
    """Where the backend multiplies by them: else, and with "none", a scale a row."""
    deep = tiny_lm(tmp_path, layers=16, hidden=64)

    def formats(folder: Path, **more: Any) -> set[Format]:
        chosen = ready(folder, keeping(), quantization="w8a8", **more).wish.quantization
        assert chosen is not None
        return set(chosen.formats.values())

    assert formats(deep) == {Format("int8", 64)}
    assert formats(deep, keep_dense=("none",)) == {Format("int8")}
    wide, bert = families.read(QWEN), families.read(MINILM)
    for spec, kinds in ((wide, {Format("int8")}), (bert, {Format("int8", 64), Format("int8", 32)})):
        chosen = quantization(spec, "w8a8", "w8a8", 32, tables=True, keep_dense=("auto",), groups=True)
        assert chosen is not None
        assert set(chosen.formats.values()) == kinds
    assert run(build(ready(deep, keeping(), quantization="w8a8")), PROMPTS)
    for spec, finer in ((families.read(GEMMA3), 0), (bert, 6 * 4)):  # queries, keys, values and the first of the MLP
        chosen = quantization(spec, "w4a16", "w4a16", 32, tables=True, keep_dense=("auto",), groups=True)
        assert chosen is not None
        assert list(chosen.formats.values()).count(Format("int8", 32)) == finer


def test_what_w8a8_hurts_most_stays_dense_in_encoders() -> None:
    spec = families.read(MINILM)
    chosen = quantization(spec, "w8a8", "w8a8", 32, tables=True, keep_dense=("auto",))
    assert chosen is not None
    queries = {f"encoder.layer.{layer}.attention.self.query.weight" for layer in range(6)}
    assert queries - set(chosen.formats) == {
        f"encoder.layer.{layer}.attention.self.query.weight" for layer in (2, 3, 4, 5)
    }
    assert 0.5 < spec.weight_bytes("bfloat16", chosen) / spec.weight_bytes("bfloat16") <= 0.55


def test_a_backend_without_the_scheme_refuses_before_loading(t_lm: Path) -> None:
    with pytest.raises(Unsupported, match=r"w4a16 are not among w8a8[\s\S]*--quantization (none|w8a8)"):
        ready(t_lm, keeping(schemes=("w8a8",)), quantization="w4a16")


def test_a_head_that_equals_the_quantised_table_is_dropped(tmp_path: Path) -> None:
    folder = tiny.tiny_lm(tmp_path, tied=True, layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ops = build(ready(folder, keeping(KeepingOps), quantization="w8a8")).runner.backend.ops
    assert sum(weight.shape[0] == tensors["lm_head.weight"].shape[0] for weight in ops.packed) == 1
