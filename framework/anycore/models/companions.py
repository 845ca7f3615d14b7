"""What the files beside `config.json` add to a spec: pooling, prompts, activations, ends of text.

The formats are sentence-transformers'. What a file says always wins over a default; what it says and we do not
understand is refused.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from anycore.contract.declare import Task
from anycore.errors import ConfigError, Unsupported
from anycore.models.fields import check
from anycore.models.rerankers import yes_no_ids
from anycore.models.spec import DenseSpec, ModelSpec, PoolingSpec, ScoreSpec

if TYPE_CHECKING:
    from anycore.models.source import Source

POOLING = {"cls": "cls", "mean": "mean", "max": "max", "last": "last", "lasttoken": "last"}
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
ACTIVATIONS = {
    "Identity": "identity",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
"""Class names at the end of the dotted paths that sentence-transformers writes. They are never imported."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


def apply(spec: ModelSpec, source: Source, config: dict[str, Any], pooling: str | None = None) -> ModelSpec:
    """Return the spec completed from the model's other files. `pooling` is the user's, against the files."""
    generation = source.read_object("generation_config.json") or {}
    check(generation, ("eos_token_id",), "generation_config.json")
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    spec = replace(spec, eos_ids=tuple(dict.fromkeys((*spec.eos_ids, *ends))))
    modules = read_modules(source)
    if spec.score is not None and spec.score.kind == "classifier" and "classifier_from_token" not in config:
        score = replace(spec.score, activation=activation_of_score(source, config, spec.score.activation))
        return replace(spec, score=told(score, source))
    if spec.family == "decoder":
        ids = yes_no_ids(spec, source, config, modules)
        if ids is not None:
            score = told(ScoreSpec("yes_no", 2, activation_of_score(source, config, "softmax"), ids), source)
            return replace(spec, tasks=(Task.RERANK, Task.GENERATE), head="lm", pooling=None, score=score)
    if spec.pooling is None:
        return spec
    vectors = read_pooling(spec.pooling, source, config, modules, pooling)
    if "Pooling" in dict(modules) and Task.GENERATE in spec.tasks:
        # A language model with a pooling file is an embedder; its checkpoint may have no head at all.
        spec = replace(
            spec, tasks=(Task.EMBED, Task.RERANK), head=None, score=ScoreSpec("cosine", activation="identity")
        )
    width = check_dense(vectors, spec)
    if vectors.truncate_dim is not None and vectors.truncate_dim > width:
        raise ConfigError(
            f"config_sentence_transformers.json: truncate_dim is {vectors.truncate_dim}, but vectors have {width}"
        )
    return replace(spec, pooling=vectors)


def read_modules(source: Source) -> list[tuple[str, str]]:
    """(kind, folder) of each sentence-transformers module; without modules.json, what 1_Pooling alone implies."""
    rows = source.read_json("modules.json")
    if rows is None:
        alone = source.read_json("1_Pooling/config.json") is not None
        return [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "")] if alone else []
    whole = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
    modules = [(row.get("type"), row.get("path", "")) for row in rows] if whole else []
    if not whole or not all(isinstance(word, str) for module in modules for word in module):
        raise ConfigError(f"modules.json of {source.name} must be a list of objects, each with a type and a path")
    foreign = [kind for kind, _ in modules if not kind.startswith("sentence_transformers.")]
    if foreign:
        raise Unsupported(
            f"modules.json of {source.name} asks to run code from the checkpoint ({', '.join(foreign)}), which anycore "
            "never does"
        )
    return [(kind.rsplit(".", 1)[-1], path) for kind, path in modules]


def read_pooling(
    default: PoolingSpec,
    source: Source,
    config: dict[str, Any],
    modules: list[tuple[str, str]],
    flag: str | None,
) -> PoolingSpec:
    """Read pooling, dense layers, normalisation, prompts and lengths of an embedder."""
    known = ["Transformer", "Pooling", "Dense", "Normalize", "Dropout"]
    kinds = [kind for kind, _ in modules if kind != "Dropout"]
    strange = [kind for kind in kinds if kind not in known]
    if strange:
        raise Unsupported(f"modules.json of {source.name} names {', '.join(strange)}: known are {', '.join(known)}")
    if kinds != sorted(kinds, key=known.index) or kinds.count("Pooling") > 1:
        raise Unsupported(f"modules.json of {source.name}: the order {', '.join(kinds)} is not {', '.join(known[:4])}")
    if any(path for kind, path in modules if kind == "Transformer"):
        raise Unsupported(f"modules.json of {source.name} has the Transformer in a folder of its own, not supported")
    prompts = read_prompts(source)
    similarity = prompts.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise Unsupported(
            f"config_sentence_transformers.json of {source.name}: similarity_fn_name {similarity!r} is not supported: "
            f"known are {', '.join(SIMILARITIES)}"
        )
    if prompts.get("model_type", "SentenceTransformer") != "SentenceTransformer":
        raise Unsupported(f"{source.name} is a sentence-transformers {prompts['model_type']}, which is not supported")
    lengths = source.read_object("sentence_bert_config.json") or {}
    check(lengths, ("do_lower_case", "modality_config", "processing_kwargs"), "sentence_bert_config.json")
    if lengths.get("do_lower_case") and not lowers(source):
        raise Unsupported(
            f"sentence_bert_config.json of {source.name}: do_lower_case is true, but the normalizer in tokenizer.json "
            'makes no small letters: put {"type": "Lowercase"} there, first in a Sequence, if the model needs it'
        )
    pooling = replace(
        default,
        matryoshka=tuple(config.get("matryoshka_dimensions") or config.get("matryoshka_dims") or ()),
        prompts=tuple((prompts.get("prompts") or {}).items()),
        default_prompt=prompts.get("default_prompt_name"),
        max_length=max_length(source),
        truncate_dim=prompts.get("truncate_dim"),
        similarity=similarity,
        chat=read_chat(source, lengths),
    )
    if flag is not None:
        pooling = replace(pooling, kind=flag, source="flag")
    folder = dict(modules).get("Pooling")
    if folder is None:
        return pooling
    if flag is None:
        pooling = replace(pooling, kind=pooling_kind(source, f"{folder}/config.json"), source="files")
    return replace(
        pooling,
        normalize="Normalize" in kinds,
        dense=tuple(read_dense(source, path) for kind, path in modules if kind == "Dense"),
    )


def read_prompts(source: Source) -> dict[str, Any]:
    """Read what sentence-transformers writes about a model as a whole, its prompts above all."""
    name = "config_sentence_transformers.json"
    written = source.read_object(name) or {}
    check(written, ("prompts", "default_prompt_name", "similarity_fn_name", "truncate_dim"), name)
    default, names = written.get("default_prompt_name"), written.get("prompts") or {}
    if default is not None and default not in names:
        raise ConfigError(
            f"{name} of {source.name}: default_prompt_name {default!r} is "
            f"not among its prompts ({', '.join(names) or 'there are none'})"
        )
    return written


def max_length(source: Source) -> int | None:
    """Tokens that sentence-transformers cuts an input to: its own file's, or else the tokenizer's."""
    lengths = source.read_object("sentence_bert_config.json") or {}
    check(lengths, ("max_seq_length",), "sentence_bert_config.json")
    if lengths.get("max_seq_length") is not None:
        return int(lengths["max_seq_length"])
    longest = (source.read_object("tokenizer_config.json") or {}).get("model_max_length")
    if not isinstance(longest, (int, float)) or not 0 < longest < 2**31:  # without limit it is a very large number
        return None
    return int(longest)


def read_chat(source: Source, written: dict[str, Any]) -> tuple[tuple[str, Any], ...] | None:
    """Read whether texts are given to a model as messages, and what else its chat template is given.

    Raises:
        Unsupported: the tokenizer is to be given something else, too.
    """
    if "message" not in (written.get("modality_config") or {}):
        return None
    options = written.get("processing_kwargs") or {}
    given = options.get("chat_template") or {}
    others = [name for name, values in options.items() if values and name != "chat_template"]
    others += [name for name in ("padding", "truncation", "max_length", "return_tensors") if name in given]
    if others:
        raise Unsupported(
            f"sentence_bert_config.json of {source.name}: processing_kwargs set {', '.join(others)}, which is not "
            "supported: variables of the chat template are"
        )
    return tuple((name, value) for name, value in given.items() if name != "restore_suffix")


def told(score: ScoreSpec, source: Source) -> ScoreSpec:
    """A score with the length and the default prompt that a cross-encoder's files name."""
    written = read_prompts(source)
    default = written.get("default_prompt_name")
    prompt = "" if default is None else written["prompts"][default]
    return replace(score, prompt=prompt, max_length=max_length(source))


def lowers(source: Source) -> bool:
    """Whether the tokenizer makes small letters of its own; one that has no tokenizer.json is asked to by its class."""
    file = source.read_object("tokenizer.json")
    if file is None:
        return True
    first = file.get("normalizer") or {}
    steps = first.get("normalizers") or [first]
    return any(step.get("type") == "Lowercase" or step.get("lowercase") for step in steps)


def pooling_kind(source: Source, name: str) -> str:
    """Read which rows a vector is made of, from the old layout (a boolean a mode) or the new one (one string)."""
    written = source.read_object(name)
    if written is None:
        raise ConfigError(f"{source.name}: modules.json names a Pooling module, but {name} does not exist")
    modes = written.get("pooling_mode")
    if modes is None:
        modes = [mode for key, mode in POOLING_FLAGS.items() if written.get(key) is True]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLING:
        raise ConfigError(
            f"{source.name}: {name} asks for pooling {' and '.join(map(str, modes)) or 'of no kind'}, which is not "
            "supported: cls, mean, max and lasttoken are, one at a time. --pooling overrides the file",
            param="pooling",
        )
    if written.get("include_prompt") is False:
        raise Unsupported(f"{source.name}: {name} leaves the prompt out of pooling (include_prompt), not supported")
    return POOLING[modes[0]]


def read_dense(source: Source, folder: str) -> DenseSpec:
    written = source.read_object(f"{folder}/config.json")
    if written is None:
        raise ConfigError(f"{source.name}: modules.json names a Dense module, but {folder}/config.json does not exist")
    taken = [written.get("module_input_name"), written.get("module_output_name")]
    if written.get("use_residual") or any(name not in (None, "sentence_embedding") for name in taken):
        raise Unsupported(
            f"{source.name}: {folder}/config.json uses a residual or other inputs, which is not supported"
        )
    kind = activation(
        str(written.get("activation_function", "torch.nn.modules.activation.Tanh")), f"{folder}/config.json"
    )
    return DenseSpec(folder, written["in_features"], written["out_features"], bool(written.get("bias", True)), kind)


def check_dense(pooling: PoolingSpec, spec: ModelSpec) -> int:
    """Return how many numbers a vector has after its dense layers, each of which takes what the one before gives."""
    width = spec.hidden_size
    for dense in pooling.dense:
        if dense.inputs != width:
            raise ConfigError(f"{dense.folder}/config.json: in_features is {dense.inputs}, but vectors have {width}")
        width = dense.outputs
    return width


def activation_of_score(source: Source, config: dict[str, Any], default: str) -> str:
    """The activation of a cross-encoder, from wherever a sentence-transformers version wrote it."""
    beside = source.read_object("config_sentence_transformers.json") or {}
    path = beside.get("activation_fn") or (config.get("sentence_transformers") or {}).get("activation_fn")
    path = path or config.get("sbert_ce_default_activation_function")
    kind = activation(path, "config.json") if path else default
    if kind not in ("identity", "sigmoid", "softmax"):
        raise Unsupported(f"{source.name}: scores through {kind} are not supported: identity, sigmoid and softmax are")
    return kind


def activation(path: str, name: str) -> str:
    last = path.rsplit(".", 1)[-1]
    if not path.startswith("torch.nn.") or last not in ACTIVATIONS:
        raise Unsupported(
            f"{name}: activation {path!r} is not supported: known are torch.nn's {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[last]
