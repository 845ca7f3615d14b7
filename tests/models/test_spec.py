"""What config.json and the files beside it say: architectures, tasks, pooling, prompts, scores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from reference import edit, gap, load, packed, prompts, spec_of, theirs
from safetensors.torch import save_file
from transformers import AutoModel, AutoModelForCausalLM

from anycore.contract.declare import Task
from anycore.contract.reference import pool
from anycore.contract.sizes import KVSpec
from anycore.engine.tasks import wanted_rows
from anycore.errors import ConfigError, PluginError, SourceError, Unsupported
from anycore.models.families import ARCHITECTURES
from anycore.models.source import Source
from anycore.models.spec import Architecture, ModelSpec, PoolingSpec, ScoreSpec, read_spec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
BERT = LLAMA | {"architectures": ["BertModel"]}


def written(folder: Path, config: dict[str, Any], **changes: Any) -> Path:
    edit(folder, **config | changes)
    return folder


# --- pooling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["old", "new"])
@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "last"])
def test_e01_the_pooling_file_wins(pooling: str, layout: str, tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path, pooling, layout)
    model = load(tmp_path)
    assert model.spec.pooling is not None
    assert (model.spec.pooling.kind, model.spec.pooling.source) == (pooling, "files")
    texts = prompts(90, 3, 17, 8)
    reference = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    rows = [theirs(reference, text).last_hidden_state[0] for text in texts]
    expected = {
        "cls": [row[0] for row in rows],
        "mean": [row.mean(0) for row in rows],
        "max": [row.max(0).values for row in rows],
        "last": [row[-1] for row in rows],
    }[pooling]
    hidden = packed(model, texts)
    wanted = {"first": slice(0, 1), "last": slice(-1, None), "all": slice(None)}[wanted_rows(model.spec, Task.EMBED)]
    chosen = [part[wanted] for part in hidden]
    ours = pool(torch.cat(chosen), [len(part) for part in chosen], pooling)
    assert gap(ours, torch.stack(expected)) < 1e-5


@pytest.mark.parametrize(
    "content",
    [
        {"pooling_mode": "attention"},
        {"pooling_mode": ["cls", "mean"]},
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
        {"pooling_mode_mean_sqrt_len_tokens": True},
        {"pooling_mode_weightedmean_tokens": True},
        {"pooling_mode_mean_tokens": False},
        {},
    ],
)
def test_e01_an_unknown_pooling_is_refused(content: dict[str, Any], tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path, "mean")
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="pooling") as caught:
        spec_of(tmp_path)
    assert caught.value.param == "pooling"
    overridden = spec_of(tmp_path, pooling="cls").pooling
    assert overridden is not None
    assert (overridden.kind, overridden.source, overridden.normalize) == ("cls", "flag", True)


def test_e01_without_a_file_the_default_says_so(tmp_path: Path) -> None:
    encoder = spec_of(tiny.tiny_bert(tmp_path / "bert", layout=None))
    assert encoder.pooling == PoolingSpec("mean", source="default", max_length=128)  # the tokenizer's
    decoder = spec_of(written(tmp_path / "llama", LLAMA))
    assert decoder.pooling == PoolingSpec("last", source="default")


def test_e01_a_pooling_file_that_modules_json_names_must_exist(tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").unlink()
    with pytest.raises(ConfigError, match="1_Pooling"):
        spec_of(tmp_path)


def test_normalisation_follows_the_modules(tmp_path: Path) -> None:
    for normalize in (True, False):
        pooling = spec_of(tiny.tiny_bert(tmp_path / str(normalize), normalize=normalize)).pooling
        assert pooling is not None
        assert pooling.normalize is normalize


def test_prompts_and_lengths(tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path, prompts={"query": "search: ", "passage": ""}, max_positions=96)
    edit(tmp_path, "config_sentence_transformers.json", default_prompt_name="query")
    edit(tmp_path, matryoshka_dimensions=[16, 32])
    pooling = spec_of(tmp_path).pooling
    assert pooling is not None
    assert dict(pooling.prompts) == {"query": "search: ", "passage": ""}
    assert pooling.default_prompt == "query"
    assert pooling.max_length == 96
    assert pooling.matryoshka == (16, 32)
    edit(tmp_path, "config_sentence_transformers.json", default_prompt_name="question")
    with pytest.raises(ConfigError, match="question"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        (["Transformer", "Pooling", "WeightedLayerPooling"], "WeightedLayerPooling"),
        (["Transformer", "Dense", "Pooling"], "order"),
        (["Transformer", "Normalize", "Pooling"], "order"),
    ],
)
def test_modules_we_do_not_compute_are_refused(kinds: list[str], word: str, tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    places = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    rows = [(places.get(kind, f"2_{kind}"), f"sentence_transformers.models.{kind}") for kind in kinds]
    tiny.write_modules(tmp_path, rows)
    with pytest.raises(Unsupported, match=word):
        spec_of(tmp_path)


def test_o15_modules_of_the_checkpoint_are_not_imported(tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    tiny.write_modules(
        tmp_path, [("", "custom_transformer.Transformer"), ("1_Pooling", "sentence_transformers.models.Pooling")]
    )
    with pytest.raises(Unsupported, match="custom_transformer"):
        spec_of(tmp_path)


@pytest.mark.parametrize("bias", [True, False])
def test_dense_modules(bias: bool, tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    package = "sentence_transformers.models"
    names = ["Transformer", "Pooling", "Dense", "Dense", "Normalize"]
    rows = [("" if name == "Transformer" else f"{i}_{name}", f"{package}.{name}") for i, name in enumerate(names)]
    tiny.write_modules(tmp_path, rows)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 24, bias), torch.nn.Linear(24, 8, bias)]
    activations = ["torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"]
    for i, (layer, kind) in enumerate(zip(layers, activations, strict=True)):
        name = f"{i + 2}_Dense"
        sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
        edit(tmp_path, f"{name}/config.json", **sizes, bias=bias, activation_function=kind)
        save_file(
            {f"linear.{key}": value for key, value in layer.state_dict().items()}, tmp_path / name / "model.safetensors"
        )
    model = load(tmp_path)
    assert model.spec.vector_size == 8
    bare = spec_of(tiny.tiny_bert(tmp_path / "bare"))
    assert model.spec.parameter_count - bare.parameter_count == sum(p.numel() for m in layers for p in m.parameters())
    vectors = torch.randn(3, 64)
    with torch.inference_mode():
        assert gap(model.project(vectors), layers[1](torch.tanh(layers[0](vectors)))) < 1e-5
    edit(tmp_path, "3_Dense/config.json", in_features=25)
    with pytest.raises(ConfigError, match="in_features is 25"):
        spec_of(tmp_path)


# --- tasks and scores ----------------------------------------------------------------------------------------------


def test_tasks_of_each_kind(tmp_path: Path, t_qemb: Path, t_qrr: Path, t_ce: Path, t_bert: Path) -> None:
    assert spec_of(written(tmp_path, LLAMA)).tasks == (Task.GENERATE, Task.EMBED)
    assert spec_of(t_qemb).tasks == (Task.EMBED, Task.RERANK)
    assert spec_of(t_qrr).tasks == (Task.RERANK, Task.GENERATE)
    assert spec_of(t_ce).tasks == (Task.RERANK,)
    assert spec_of(t_bert).tasks == (Task.EMBED, Task.RERANK)


def test_a_causal_embedder_needs_no_head(t_qemb: Path) -> None:
    """Qwen3-Embedding says Qwen3ForCausalLM, but its files hold the bare model."""
    spec = spec_of(t_qemb)
    assert spec.head is None
    assert spec.pooling is not None
    assert (spec.pooling.kind, spec.pooling.source) == ("last", "files")
    text = prompts(400, 19)[0]
    reference = AutoModel.from_pretrained(t_qemb, attn_implementation="eager")
    assert gap(packed(load(t_qemb), [text])[0], theirs(reference, text).last_hidden_state[0]) < 1e-5


@pytest.mark.parametrize("tied", [True, False])
def test_e03_scores_are_the_rows_of_no_and_yes(tied: bool, tmp_path: Path) -> None:
    tiny.tiny_reranker(tmp_path, tied=tied)
    model = load(tmp_path)
    score = model.spec.score
    assert score is not None
    assert score.yes_no_ids is not None
    yes, no = score.yes_no_ids
    texts = prompts(400, 9, 30)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    expected = torch.stack([theirs(reference, text).logits[0, -1, [no, yes]] for text in texts])
    last = torch.stack([hidden[-1] for hidden in packed(model, texts)])
    assert gap(model.score(last), expected) < 1e-5
    assert gap(expected[0], expected[1]) > 1e-2
    assert gap(model.logits(last)[:, [no, yes]], expected) < 1e-5


SIGNS = ("logit score", "config words", "chat template", "template in tokenizer_config", "model card", "name")


@pytest.mark.parametrize("sign", SIGNS)
def test_e03_an_llm_reranker_needs_no_flag(sign: str, tmp_path: Path) -> None:
    """Each of these signs is enough alone; with none of them, the same model generates."""
    folder = tiny.tiny_reranker(tmp_path / ("Qwen3-Reranker-0.6B" if sign == "name" else "model"))
    expected = spec_of(folder).score
    if sign != "logit score":
        (folder / "modules.json").unlink()
    if sign != "config words":
        edit(folder, drop=("classifier_from_token",))
    template = (folder / "chat_template.jinja").read_text()
    if sign != "chat template":
        (folder / "chat_template.jinja").unlink()
    if sign == "template in tokenizer_config":
        edit(folder, "tokenizer_config.json", chat_template=template)
    if sign == "model card":
        (folder / "README.md").write_text("---\nlicense: apache-2.0\npipeline_tag: text-ranking\n---\n# Model\n")
    spec = spec_of(folder)
    assert spec.score == expected
    assert spec.tasks[0] is Task.RERANK
    if sign == "name":
        plain = folder.rename(tmp_path / "plain")
        assert spec_of(plain).tasks == (Task.GENERATE, Task.EMBED)
    if sign == "model card":
        (folder / "README.md").write_text("---\npipeline_tag: text-generation\n---\nNot for text-ranking.\n")
        assert spec_of(folder).tasks == (Task.GENERATE, Task.EMBED)


def test_e03_a_converted_reranker_is_a_classifier(tmp_path: Path) -> None:
    spec = spec_of(
        written(tmp_path, LLAMA, architectures=["Qwen3ForSequenceClassification"], id2label={"0": "LABEL_0"})
    )
    assert spec.score == ScoreSpec("classifier", 1, "sigmoid")
    assert spec.head == "classifier"


def test_e03_words_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    tiny.tiny_reranker(tmp_path)
    (tmp_path / "modules.json").unlink()
    edit(tmp_path, classifier_from_token=["nein", "jawohl"])
    with pytest.raises(ConfigError, match="jawohl"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity"}),
    ],
)
def test_the_activation_of_a_cross_encoder_is_the_files(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    tiny.tiny_cross_encoder(tmp_path)
    assert spec_of(tmp_path).score == ScoreSpec("classifier", 1, "sigmoid", max_length=128)
    edit(tmp_path, name, **changes)
    assert spec_of(tmp_path).score == ScoreSpec("classifier", 1, "identity", max_length=128)


def test_o15_an_activation_is_never_imported(tmp_path: Path) -> None:
    tiny.tiny_cross_encoder(tmp_path)
    edit(tmp_path, sentence_transformers={"activation_fn": "os.system"})
    with pytest.raises(Unsupported, match=r"os\.system"):
        spec_of(tmp_path)


@pytest.mark.parametrize(
    ("labels", "changes", "of_labels", "of_pairs"),
    [
        (1, {}, "sigmoid", "sigmoid"),
        (1, {"problem_type": "regression"}, "identity", "sigmoid"),
        (2, {}, "softmax", "softmax"),
        (2, {"sentence_transformers": {"activation_fn": "torch.nn.Identity"}}, "softmax", "identity"),
        (3, {}, "softmax", "softmax"),
        (3, {"problem_type": "single_label_classification"}, "softmax", "softmax"),
        (3, {"problem_type": "multi_label_classification"}, "sigmoid", "sigmoid"),
        (3, {"problem_type": "regression"}, "identity", "identity"),
    ],
)
def test_labels_have_the_pipelines_function_and_pairs_that_of_cross_encoders(
    labels: int, changes: dict[str, Any], of_labels: str, of_pairs: str, tmp_path: Path
) -> None:
    tiny.tiny_cross_encoder(tmp_path, labels=labels)
    edit(tmp_path, **changes)
    score = spec_of(tmp_path).score
    assert score is not None
    assert (score.labels, score.of_labels, score.activation) == (labels, of_labels, of_pairs)


# --- config.json ---------------------------------------------------------------------------------------------------


def test_o15_code_of_the_checkpoint_is_not_run(tmp_path: Path) -> None:
    written(tmp_path, LLAMA, auto_map={"AutoModelForCausalLM": "modeling_llama.LlamaForCausalLM"})
    (tmp_path / "modeling_llama.py").write_text("raise SystemExit('this must not run')")
    with pytest.raises(Unsupported, match=r"modeling_llama\.LlamaForCausalLM.*never"):
        spec_of(tmp_path)
    edit(tmp_path, auto_map={"AutoTokenizer": ["tokenization.Tokenizer", None]})
    assert spec_of(tmp_path).architecture == "LlamaForCausalLM"


def test_an_unknown_architecture_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Unsupported) as caught:
        spec_of(written(tmp_path, LLAMA, architectures=["LlamaForCausalLm"]))
    assert "Did the config mean LlamaForCausalLM?" in caught.value.message
    assert all(name in caught.value.message for name in ARCHITECTURES)
    with pytest.raises(ConfigError, match="names no architecture"):
        spec_of(written(tmp_path, LLAMA, architectures=[]))


def test_architectures_of_plugins_win(tmp_path: Path) -> None:
    plain = spec_of(written(tmp_path, LLAMA))

    def mine(config: dict[str, Any]) -> ModelSpec:
        assert config["hidden_size"] == 32
        return plain

    edit(tmp_path, architectures=["MyModel"], auto_map={"AutoModel": "mine.MyModel"})
    assert read_spec(Source("m", tmp_path), [Architecture("MyModel", mine)]) == plain


@pytest.mark.parametrize(("made", "words"), [(lambda config: config["nope"], "KeyError"), (lambda _: None, "NoneType")])
def test_a_plugins_architecture_that_fails_is_named(made: Any, words: str, t_lm: Path) -> None:
    with pytest.raises(PluginError, match=f"LlamaForCausalLM, from a plugin.*{words}"):
        read_spec(Source("m", t_lm), [Architecture("LlamaForCausalLM", made)])


@pytest.mark.parametrize(
    ("changes", "error", "word"),
    [
        ({"quantization_config": {"quant_method": "hqq"}}, Unsupported, "hqq"),
        ({"hidden_size": None}, ConfigError, "hidden_size"),
        ({"vocab_size": 0}, ConfigError, "vocab_size"),
        ({"num_key_value_heads": 3}, ConfigError, "num_key_value_heads"),
        ({"hidden_act": "mish"}, Unsupported, "mish"),
        ({"rope_scaling": {"type": "longrope"}}, Unsupported, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, ConfigError, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, ConfigError, "above 0"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, ConfigError, "factor"),
        ({"rope_scaling": {"factor": 2.0}}, ConfigError, "rope_type"),
        ({"rope_scaling": {"type": ["linear"]}}, Unsupported, "rope type"),
        ({"rope_scaling": "linear"}, ConfigError, "rope_scaling"),
        ({"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0}}, ConfigError, "above 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 2.0}}, ConfigError, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor"),
        ({"architectures": ["Gemma3TextModel"], "layer_types": ["full_attention"]}, ConfigError, "layer_types"),
        (
            {"architectures": ["Gemma3TextModel"], "layer_types": ["full_attention", "chunked_attention"]},
            ConfigError,
            "layer_types",
        ),
    ],
)
def test_what_is_wrong_in_the_config_is_named(
    changes: dict[str, Any], error: type[Exception], word: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=word):
        spec_of(written(tmp_path, LLAMA, **changes))


@pytest.mark.parametrize(
    ("file", "changes", "name"),
    [
        ("config.json", {"num_hidden_layers": 2**70}, "num_hidden_layers"),
        ("config.json", {"num_hidden_layers": True}, "num_hidden_layers"),
        ("config.json", {"max_position_embeddings": 512.5}, "max_position_embeddings"),
        ("config.json", {"type_vocab_size": "2"}, "type_vocab_size"),
        ("config.json", {"layer_norm_eps": float("inf")}, "layer_norm_eps"),
        ("config.json", {"hidden_act": ["gelu"]}, "hidden_act"),
        ("config.json", {"architectures": "BertModel"}, "architectures"),
        ("config.json", {"auto_map": ["mine"]}, "auto_map"),
        ("config.json", {"eos_token_id": [[2]]}, "eos_token_id"),
        ("generation_config.json", {"eos_token_id": "2"}, "eos_token_id"),
        ("sentence_bert_config.json", {"max_seq_length": "512"}, "max_seq_length"),
        ("sentence_bert_config.json", {"max_seq_length": 0}, "max_seq_length"),
        ("config_sentence_transformers.json", {"prompts": {"query": None}}, "prompts"),
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": "true"}, "pooling"),
    ],
)
def test_what_has_another_type_is_named(file: str, changes: dict[str, Any], name: str, tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    edit(tmp_path, file, **changes)
    with pytest.raises(ConfigError, match=f"{file}.*{name}"):
        spec_of(tmp_path)


@pytest.mark.parametrize("text", ["[]", '"x"', "1"])
def test_companions_are_json_objects(text: str, tmp_path: Path) -> None:
    tiny.tiny_bert(tmp_path)
    names = ["config_sentence_transformers.json", "sentence_bert_config.json", "1_Pooling/config.json", "config.json"]
    for name in names:
        whole = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text)
        with pytest.raises(SourceError, match="not a JSON object"):
            spec_of(tmp_path)
        (tmp_path / name).write_text(whole)
    (tmp_path / "modules.json").write_text(f"[{text}]")
    with pytest.raises(ConfigError, match=r"modules\.json"):
        spec_of(tmp_path)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_a_decoder_that_is_not_causal_embeds_only(name: str, tmp_path: Path) -> None:
    """transformers and vLLM let such a model attend both ways."""
    spec = spec_of(written(tmp_path, LLAMA, architectures=[f"{name}ForCausalLM"], is_causal=False))
    assert (spec.attention, spec.tasks, spec.head) == ("bidirectional", (Task.EMBED, Task.RERANK), None)
    with pytest.raises(Unsupported, match="sliding windows"):
        spec_of(written(tmp_path, LLAMA, architectures=["MistralModel"], sliding_window=8, is_causal=False))


def test_e01_small_letters_are_the_tokenizers(tmp_path: Path) -> None:
    """sentence-transformers puts them before a tokenizer that does not make them."""
    tiny.tiny_bert(tmp_path)  # its normalizer lowercases
    edit(tmp_path, "sentence_bert_config.json", do_lower_case=True)
    spec_of(tmp_path)
    edit(tmp_path, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "NFKC"}]})
    with pytest.raises(Unsupported, match="do_lower_case"):
        spec_of(tmp_path)
    edit(tmp_path, "tokenizer.json", normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]})
    spec_of(tmp_path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"dtype": "auto"}, None),
        ({}, None),
    ],
)
def test_dtype_under_both_keys(keys: dict[str, str], expected: str | None, tmp_path: Path) -> None:
    assert spec_of(written(tmp_path, LLAMA, **keys)).dtype == expected


def test_end_of_text_ids_come_from_both_files(tmp_path: Path) -> None:
    written(tmp_path, LLAMA, eos_token_id=2)
    assert spec_of(tmp_path).eos_ids == (2,)
    edit(tmp_path, "generation_config.json", eos_token_id=[7, 2])
    assert spec_of(tmp_path).eos_ids == (2, 7)
    edit(tmp_path, eos_token_id=None)
    assert spec_of(tmp_path).eos_ids == (7, 2)


@pytest.mark.parametrize(
    ("scaling", "longest"),
    [
        (None, 64),
        ({"rope_type": "linear", "factor": 4.0}, 64),
        ({"rope_type": "dynamic", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32}, 64),
    ],
)
def test_longest_sequence(scaling: dict[str, Any] | None, longest: int, tmp_path: Path) -> None:
    assert spec_of(written(tmp_path, LLAMA, rope_scaling=scaling)).max_positions == longest


def test_rope_scaling_added_by_hand_keeps_the_base(tmp_path: Path) -> None:
    """Model cards tell users to add rope_scaling; a config of transformers 5 has its base in rope_parameters."""
    written(tmp_path, LLAMA, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    edit(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64})
    rope = spec_of(tmp_path).rope
    assert rope is not None
    assert (rope.theta, rope.kind, dict(rope.parameters)["factor"]) == (1e6, "yarn", 4.0)


def test_m01_bytes_of_the_cache(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    kv = spec_of(written(tmp_path, LLAMA, **changes)).kv(128, "bfloat16")
    assert kv == KVSpec(28, 8, 128, 128, "bfloat16")
    assert kv.bytes_per_token == 114_688


def test_needs(tmp_path: Path, t_bert: Path) -> None:
    window = spec_of(written(tmp_path, LLAMA, architectures=["MistralForCausalLM"], sliding_window=8))
    assert window.need(Task.GENERATE, "bfloat16", 16).features == ("sliding_window",)
    need = spec_of(t_bert).need(Task.EMBED, "float32")
    assert (need.attention, need.architecture, need.features) == ("bidirectional", "BertModel", ("token_types",))


def test_a_task_that_reads_no_logits_needs_no_head(tmp_path: Path, t_qrr: Path) -> None:
    spec = spec_of(written(tmp_path, LLAMA))
    embedder = spec.for_task(Task.EMBED)
    assert (embedder.tasks, embedder.head) == ((Task.EMBED,), None)
    assert spec.parameter_count - embedder.parameter_count == 96 * 32
    assert spec.for_task(Task.GENERATE).head == "lm"
    assert spec_of(t_qrr).for_task(Task.RERANK).head == "lm"


def test_specs_are_read_without_torch(tmp_path: Path) -> None:
    """The command line answers before anything heavy is imported."""
    written(tmp_path, LLAMA)
    code = (
        "import sys; from pathlib import Path; from anycore.models.source import Source; "
        "from anycore.models.spec import read_spec; spec = read_spec(Source('m', Path(sys.argv[1]))); "
        "spec.weight_bytes('bfloat16'), spec.kv(16, 'bfloat16'); "
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
