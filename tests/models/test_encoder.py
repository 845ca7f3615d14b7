"""Encoders against Hugging Face in float32: hidden states, pooled vectors and scores of texts packed in one batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reference import edit, gap, load, packed, prompts, spec_of, theirs
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    RobertaConfig,
    XLMRobertaConfig,
)

from anycore.contract.declare import Task
from anycore.contract.reference import pool
from anycore.errors import Unsupported
from anycore.models.spec import ScoreSpec

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 66,
}
ROBERTA = SIZES | {"pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
CONFIGS: dict[str, Any] = {
    "bert": BertConfig(**SIZES, type_vocab_size=2, pad_token_id=0),
    "bert-relu": BertConfig(**SIZES, hidden_act="relu", layer_norm_eps=1e-3),
    "roberta": RobertaConfig(**ROBERTA),
    "xlm-roberta": XLMRobertaConfig(**ROBERTA | {"type_vocab_size": 2, "hidden_act": "gelu_new"}),
    "xlm-roberta-padding-3": XLMRobertaConfig(**ROBERTA | {"pad_token_id": 3}),
}
TEXTS = prompts(96, 1, 7, 41, 16)
TYPES = [[0] * (len(text) // 2) + [1] * (len(text) - len(text) // 2) for text in TEXTS]


def build(auto: Any, config: Any, folder: Path) -> Any:
    torch.manual_seed(1)
    more = {"add_pooling_layer": False} if auto is AutoModel else {}
    model = auto.from_config(config, attn_implementation="eager", **more)
    tiny.save_model(model, folder)
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_hidden_states_and_vectors_equal_hugging_face(name: str, tmp_path: Path) -> None:
    reference = build(AutoModel, CONFIGS[name], tmp_path)
    model = load(tmp_path)
    assert model.spec.tasks == (Task.EMBED, Task.RERANK)
    assert model.spec.parameter_count == sum(p.numel() for p in reference.parameters())
    ours = packed(model, TEXTS)
    expected = [theirs(reference, text).last_hidden_state[0] for text in TEXTS]
    for hidden, other in zip(ours, expected, strict=True):
        assert gap(hidden, other) < 1e-5
    means = pool(torch.cat(ours), [len(text) for text in TEXTS], "mean")
    assert gap(means, torch.stack([other.mean(0) for other in expected])) < 1e-5


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_e06_segment_ids_reach_the_embeddings(name: str, tmp_path: Path) -> None:
    reference = build(AutoModel, CONFIGS[name], tmp_path)
    model = load(tmp_path)
    ours = packed(model, TEXTS, TYPES)
    assert gap(ours[2], packed(model, TEXTS)[2]) > 1e-2
    for hidden, text, types in zip(ours, TEXTS, TYPES, strict=True):
        other = theirs(reference, text, token_type_ids=torch.tensor([types])).last_hidden_state[0]
        assert gap(hidden, other) < 1e-5


@pytest.mark.parametrize("labels", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_cross_encoder_scores_equal_hugging_face(name: str, labels: int, tmp_path: Path) -> None:
    config = type(CONFIGS[name])(**CONFIGS[name].to_dict() | {"num_labels": labels})
    reference = build(AutoModelForSequenceClassification, config, tmp_path)
    model = load(tmp_path)
    assert model.spec.tasks == (Task.RERANK,)
    assert model.spec.score == ScoreSpec("classifier", labels, "sigmoid" if labels == 1 else "softmax")
    assert model.spec.parameter_count == sum(p.numel() for p in reference.parameters())
    first = torch.stack([hidden[0] for hidden in packed(model, TEXTS)])
    with torch.inference_mode():
        scores = model.score(first)
    assert gap(scores, torch.cat([theirs(reference, text).logits for text in TEXTS])) < 1e-5


@pytest.mark.parametrize("name", ["bert", "roberta", "xlm-roberta"])
def test_masked_language_models_embed(name: str, tmp_path: Path) -> None:
    reference = build(AutoModelForMaskedLM, CONFIGS[name], tmp_path)
    hidden = packed(load(tmp_path), TEXTS)[2]
    assert gap(hidden, theirs(reference.base_model, TEXTS[2]).last_hidden_state[0]) < 1e-5


def test_positions_of_roberta_start_after_the_padding_id(tmp_path: Path) -> None:
    """66 rows of positions hold 64 tokens, and a text of 64 tokens reaches the last row."""
    reference = build(AutoModel, CONFIGS["roberta"], tmp_path)
    model = load(tmp_path)
    assert model.spec.max_positions == 64
    text = prompts(96, 64)[0]
    assert gap(packed(model, [text])[0], theirs(reference, text).last_hidden_state[0]) < 1e-5
    assert spec_of(build_folder("xlm-roberta-padding-3", tmp_path / "three")).max_positions == 62


def build_folder(name: str, folder: Path) -> Path:
    build(AutoModel, CONFIGS[name], folder)
    return folder


def test_first_names_of_norms_are_read(tmp_path: Path) -> None:
    """BERT's first checkpoints call the weight and bias of a norm gamma and beta."""
    from safetensors.torch import load_file, save_file

    reference = build(AutoModel, CONFIGS["bert"], tmp_path)
    path = tmp_path / "model.safetensors"
    renamed = {
        f"bert.{name}".replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(renamed, path)
    assert gap(packed(load(tmp_path), TEXTS)[1], theirs(reference, TEXTS[1]).last_hidden_state[0]) < 1e-5


@pytest.mark.parametrize("key", ["position_embedding_type", "is_decoder"])
def test_what_encoders_do_not_compute_is_refused(key: str, tmp_path: Path) -> None:
    build(AutoModel, CONFIGS["bert"], tmp_path)
    edit(tmp_path, **{key: {"position_embedding_type": "relative_key", "is_decoder": True}[key]})
    with pytest.raises(Unsupported, match=key):
        spec_of(tmp_path)
