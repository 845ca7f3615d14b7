"""Decoders against Hugging Face in float32: packed, and in chunks over a paged cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reference import edit, gap, load, packed, paged, plain_backend, prompts, spec_of, theirs
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from anycore.contract.declare import DTYPES, Task
from anycore.models import loader
from anycore.models.parameters import counted
from anycore.models.source import Source
from anycore.models.spec import ScoreSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA3 = SIZES | {"query_pre_attn_scalar": 24, "sliding_window": 5, "tie_word_embeddings": True}
ALTERNATE = ["sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 100.0}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.3, "beta_fast": 20.0, "beta_slow": 2.0, "truncate": False}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 50.0,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000.0}
LOCAL = {"rope_type": "default", "rope_theta": 50.0}

CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied-bias": LlamaConfig(**SIZES | {"tie_word_embeddings": True}, attention_bias=True, mlp_bias=True),
    "llama-one-kv-head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}, rms_norm_eps=1e-3),
    "llama-linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama-dynamic": LlamaConfig(**SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0}),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "llama-yarn-mscale": LlamaConfig(**SIZES, rope_parameters=YARN | MSCALE),
    "llama-yarn-factor": LlamaConfig(**SIZES, rope_parameters=YARN | {"attention_factor": 1.7}),
    "llama-llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral-window": MistralConfig(**SIZES, sliding_window=6),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES),
    "qwen3-tied-bias": Qwen3Config(**SIZES | {"tie_word_embeddings": True}, attention_bias=True),
    "gemma3": Gemma3TextConfig(**GEMMA3, layer_types=ALTERNATE),
    "gemma3-pattern": Gemma3TextConfig(**GEMMA3, sliding_window_pattern=2),
    "gemma3-softcap": Gemma3TextConfig(**GEMMA3, layer_types=ALTERNATE, final_logit_softcapping=1.5),
    "gemma3-ropes": Gemma3TextConfig(
        **GEMMA3, layer_types=ALTERNATE, rope_parameters={"full_attention": LINEAR, "sliding_attention": LOCAL}
    ),
}  # fmt: skip
TEXTS = prompts(96, 1, 7, 41, 16)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, PreTrainedModel]]:
    """Every model of CONFIGS by name, and the folder it is saved in."""
    models = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        folder = tmp_path_factory.mktemp(name)
        tiny.save_model(model, folder)
        models[name] = folder, model
    return models


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_hugging_face(name: str, built: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, reference = built[name]
    model = load(folder)
    expected = [theirs(reference, text).logits[0] for text in TEXTS]
    assert max(float(logits.abs().max()) for logits in expected) > 0.5  # not all but zero
    for hidden, logits in zip(packed(model, TEXTS), expected, strict=True):
        assert gap(model.logits(hidden), logits) < 1e-4
    for hidden, logits in zip(paged(model, TEXTS, [9, 2, 5, 64]), expected, strict=True):
        assert gap(model.logits(hidden), logits) < 1e-4


@pytest.mark.parametrize("name", CONFIGS)
def test_weight_bytes_are_exact(name: str, built: dict[str, tuple[Path, PreTrainedModel]]) -> None:
    folder, reference = built[name]
    spec = spec_of(folder)
    count = sum(parameter.numel() for parameter in reference.parameters())  # a tied head counts once
    assert spec.parameter_count == count
    assert spec.weight_bytes("float32") == 4 * count
    source = Source(str(folder), folder)
    for dtype in DTYPES:
        held = loader.fill(counted(spec), loader.open_checkpoint(source), name, plain_backend(), dtype, None)
        assert spec.weight_bytes(dtype) == sum(t.numel() * t.element_size() for t in held.values())


def test_flags_change_the_result(built: dict[str, tuple[Path, PreTrainedModel]], tmp_path: Path) -> None:
    """The comparisons above could not fail if windows or rope variants made no difference on these texts."""
    base, window = (load(built[name][0]).spec for name in ("mistral", "mistral-window"))
    assert base.windows == ()
    assert window.windows == (6, 6, 6)
    folder, _ = built["llama-yarn"]
    model = load(folder)
    plain = load(copied(folder, tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 100.0}))
    assert gap(packed(model, TEXTS)[2], packed(plain, TEXTS)[2]) > 1e-2


def test_dynamic_beyond_the_trained_length_is_hugging_face_token_by_token(tmp_path: Path) -> None:
    settings = SIZES | {"max_position_embeddings": 16}
    config = LlamaConfig(**settings, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 500.0})
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.save_model(reference, tmp_path)
    model = load(tmp_path)
    assert model.spec.max_positions == 32
    text = prompts(96, 30)[0]
    with torch.inference_mode():
        out = reference(torch.tensor([text[:16]]), use_cache=True)
        rows = [out.logits[0]]
        for token in text[16:]:
            out = reference(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
            rows.append(out.logits[0])
    assert gap(model.logits(paged(model, [text], [16])[0]), torch.cat(rows)) < 1e-4
    assert gap(packed(model, [text])[0], paged(model, [text], [7])[0]) < 1e-5  # chunked is whole


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
def test_both_rope_spellings_mean_the_same(kind: str, built: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = built[f"llama-{kind}"]
    new = spec_of(folder)
    written = dict(new.rope.parameters) | {"rope_type": kind}  # type: ignore[union-attr]
    old = copied(folder, tmp_path / "a", drop=("rope_parameters",), rope_theta=new.rope.theta, rope_scaling=written)  # type: ignore[union-attr]
    assert spec_of(old) == new
    written["type"] = written.pop("rope_type")
    older = copied(folder, tmp_path / "b", drop=("rope_parameters",), rope_theta=new.rope.theta, rope_scaling=written)  # type: ignore[union-attr]
    assert spec_of(older) == new


def test_gemma3_old_spelling(built: dict[str, tuple[Path, Any]], tmp_path: Path) -> None:
    folder, _ = built["gemma3-ropes"]
    old = copied(
        folder,
        tmp_path,
        drop=("rope_parameters", "layer_types", "_sliding_window_pattern"),
        rope_theta=1000.0,
        rope_local_base_freq=50.0,
        rope_scaling={"rope_type": "linear", "factor": 3.0},
        sliding_window_pattern=2,
    )
    assert spec_of(old) == spec_of(folder)


def test_gemma3_inside_a_model_with_images(tmp_path: Path) -> None:
    """Text in a multimodal checkpoint: nested config, prefixed names, tensors of the image part left alone."""
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    config = Gemma3Config(text_config=GEMMA3 | {"layer_types": ALTERNATE}, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    reference = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="eager")
    tiny.save_model(reference, tmp_path)
    model = load(tmp_path)
    assert model.spec.tied
    for hidden, text in zip(packed(model, TEXTS), TEXTS, strict=True):
        assert gap(model.logits(hidden), theirs(reference, text).logits[0]) < 1e-4


def test_gemma3_attending_both_ways_embeds_only(tmp_path: Path) -> None:
    config = Gemma3TextConfig(**GEMMA3, layer_types=ALTERNATE, use_bidirectional_attention=True)
    torch.manual_seed(0)
    reference = Gemma3TextModel._from_config(config, attn_implementation="eager")
    tiny.save_model(reference, tmp_path)
    model = load(tmp_path)
    assert model.spec.attention == "bidirectional"
    assert model.spec.tasks == (Task.EMBED, Task.RERANK)
    for hidden, text in zip(packed(model, TEXTS), TEXTS, strict=True):
        assert gap(hidden, theirs(reference, text).last_hidden_state[0]) < 1e-5


@pytest.mark.parametrize("config", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_sequence_classifiers_score_the_last_token(config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    settings = config(**SIZES, num_labels=1)
    reference = AutoModelForSequenceClassification.from_config(settings, attn_implementation="eager")
    tiny.save_model(reference, tmp_path)
    model = load(tmp_path)
    assert model.spec.tasks == (Task.RERANK,)
    assert model.spec.score == ScoreSpec("classifier", 1, "sigmoid")
    assert model.spec.parameter_count == sum(p.numel() for p in reference.parameters())
    last = torch.stack([hidden[-1] for hidden in packed(model, TEXTS)])
    expected = torch.cat([theirs(reference, text).logits for text in TEXTS])
    assert gap(model.score(last), expected) < 1e-5


def test_half_precision_follows_hugging_face(built: dict[str, tuple[Path, Any]]) -> None:
    folder, _ = built["gemma3"]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager")
    model = load(folder, "bfloat16")
    ours = model.logits(packed(model, TEXTS)[2])
    other = theirs(reference, TEXTS[2]).logits[0].float()
    assert ours.dtype == torch.float32
    assert torch.nn.functional.cosine_similarity(ours, other).min() > 0.999


def copied(folder: Path, target: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    """The same weights with another config.json."""
    target.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    edit(target, drop=drop, **changes)
    return target
