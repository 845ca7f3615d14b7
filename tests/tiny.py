"""Tiny model folders, written on the spot: random weights, real tokenizers, the files that real checkpoints carry.

Every function is deterministic in its arguments, writes into `folder` and returns it. Weights are scaled so that
activations stay near 1 and logits near ±2: greedy decoding has clear winners and does not run into ties.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Concatenate, ParamSpec

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3Model,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)

CORPUS = [
    "yes no yes no yes, no, yes. no.",
    "yes\nno\nyes\nno\n",
    "The quick brown fox jumps over the lazy dog near the river bank.",
    "Paris is the capital of France, and London is the capital of England.",
    "What is the capital of France? Given a web search query, retrieve relevant passages that answer the query.",
    "Judge whether the document meets the requirements based on the query and the instruct provided.",
    "A request is a list of tokens and a count of how many are computed.",
    "def add(first, second):\n    return first + second\n",
    "Numbers such as 1, 22, 333, 4096 and 3.14159 stand in many texts.",
    "щи да каша пища наша, а щука и ещё роща",
    "東京は日本の首都です。北京是中国的首都。",
    "user assistant system query document instruct answer text token model",
]
"""What the tokenizers are trained on. Emoji and most of Unicode are absent, so they need several tokens a character."""

BOS, EOS, PAD = "<|begin|>", "<|endoftext|>", "<|pad|>"
TURN, END_OF_TURN = "<|im_start|>", "<|im_end|>"
SPECIAL = [PAD, BOS, EOS, TURN, END_OF_TURN]

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Starts with BOS, which the tokenizer adds too: templated text must be tokenised without special tokens."""

RERANK_TEMPLATE = (
    "{% set instruct = namespace(text='Given a web search query, retrieve relevant passages that answer the query') %}"
    "{% for message in messages if message.role == 'system' %}{% set instruct.text = message.content %}{% endfor %}"
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {{ instruct.text }}\n"
    "{% for message in messages if message.role == 'query' %}<Query>: {{ message.content }}\n{% endfor %}"
    "{% for message in messages if message.role == 'document' %}<Document>: {{ message.content }}{% endfor %}"
    "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>{{ '\n\n' }}"
)

DECODERS = {
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "gemma3": Gemma3TextConfig,
}

P = ParamSpec("P")


def kept(make: Callable[Concatenate[Path | str, P], Path]) -> Callable[Concatenate[Path | str, P], Path]:
    """Let a process make a folder once and copy it from then on; what is drawn by chance afterwards is the same."""
    made: dict[str, tuple[TemporaryDirectory[str], torch.Tensor]] = {}

    @wraps(make)
    def copied(folder: Path | str, *args: P.args, **named: P.kwargs) -> Path:
        key = repr((args, sorted(named.items())))
        if key not in made:
            first = TemporaryDirectory(prefix="tiny-")
            make(first.name, *args, **named)
            made[key] = first, torch.get_rng_state()
        kept_folder, chance = made[key]
        torch.set_rng_state(chance)
        return Path(shutil.copytree(kept_folder.name, folder, copy_function=shutil.copy, dirs_exist_ok=True))

    return copied


@kept
def tiny_lm(
    folder: Path | str,
    *,
    family: str = "llama",
    layers: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    heads: int = 4,
    hidden: int = 128,
    vocab: int = 448,
    window: int | None = None,
    tied: bool = False,
    seed: int = 0,
    chat_template: bool | str = True,
    max_positions: int = 512,
    add_bos: bool = True,
    **config: Any,
) -> Path:
    """T-LM: a random decoder of one of the families in DECODERS, float32 safetensors, byte-level BPE.

    `hidden` is not heads * head_dim on purpose. `window` sets a sliding window where the family has one. Further
    keywords go to the Hugging Face config (such as `rope_parameters`).
    """
    folder = Path(folder)
    ids = save_bpe(folder, vocab, prefix=[BOS] if add_bos else [], chat_template=template_of(chat_template))
    settings = decoder_settings(layers, kv_heads, head_dim, heads, hidden, ids["size"], tied, max_positions)
    settings |= {"bos_token_id": ids[BOS], "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    if window is not None:
        settings["sliding_window"] = window
        if family in ("qwen2", "qwen3"):
            settings |= {"use_sliding_window": True, "max_window_layers": layers // 2}
    if family == "gemma3":
        settings |= {"query_pre_attn_scalar": head_dim}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(DECODERS[family](**settings | config), attn_implementation="eager")
    save_model(model, folder)
    return folder


@kept
def tiny_embedder(folder: Path | str, *, seed: int = 1, max_positions: int = 512, prompts: bool = True) -> Path:
    """T-QEMB: a causal Qwen3 embedder with the files of Qwen3-Embedding: last-token pooling, EOS appended.

    As there, the weights are those of the bare model (no "model." prefix, no head).
    """
    folder = Path(folder)
    ids = save_bpe(folder, 448, prefix=[], suffix=[EOS])
    settings = decoder_settings(3, 2, 64, 4, 128, ids["size"], True, max_positions)
    settings |= {"bos_token_id": None, "eos_token_id": ids[EOS], "pad_token_id": ids[PAD]}
    torch.manual_seed(seed)
    save_model(Qwen3Model(Qwen3Config(**settings)), folder)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    texts = {"query": "Instruct: Given a web search query, retrieve relevant passages\nQuery:", "document": ""}
    save_sentence_transformers(folder, 128, "last", "old", True, max_positions, texts if prompts else {})
    return folder


@kept
def tiny_reranker(folder: Path | str, *, tied: bool = False, seed: int = 2, max_positions: int = 512) -> Path:
    """T-QRR: a causal Qwen3 that answers yes or no, with the metadata that sentence-transformers writes for it.

    `1_LogitScore/config.json` names the two ids, `classifier_from_token` in config.json the two words, and
    `chat_template.jinja` the prompt.
    """
    folder = Path(folder)
    ids = save_bpe(folder, 448, prefix=[], extra=["<think>", "</think>"], chat_template=RERANK_TEMPLATE)
    settings = decoder_settings(3, 2, 64, 4, 128, ids["size"], tied, max_positions)
    settings |= {"bos_token_id": None, "eos_token_id": ids[END_OF_TURN], "pad_token_id": ids[PAD]}
    torch.manual_seed(seed)
    save_model(AutoModelForCausalLM.from_config(Qwen3Config(**settings)), folder, head=0.5)
    edit_json(folder / "config.json", classifier_from_token=["no", "yes"], is_original_qwen3_reranker=True)
    package = "sentence_transformers"
    modules = [("", f"{package}.base.modules.transformer.Transformer")]
    modules += [("1_LogitScore", f"{package}.cross_encoder.modules.logit_score.LogitScore")]
    write_modules(folder, modules)
    write_json(folder / "1_LogitScore" / "config.json", {"true_token_id": ids["yes"], "false_token_id": ids["no"]})
    return folder


@kept
def tiny_bert(
    folder: Path | str,
    pooling: str = "mean",
    layout: str | None = "old",
    normalize: bool = True,
    *,
    seed: int = 3,
    max_positions: int = 128,
    prompts: dict[str, str] | None = None,
) -> Path:
    """T-BERT: a random BERT with segment embeddings. `layout` of 1_Pooling/config.json: "old" booleans, "new" string,
    None for no sentence-transformers files at all. An unknown `pooling` is written as it is (new layout)."""
    folder = Path(folder)
    torch.manual_seed(seed)
    save_model(BertModel(bert_config(save_wordpiece(folder, max_positions), max_positions)), folder)
    if layout is not None:
        save_sentence_transformers(folder, 64, pooling, layout, normalize, max_positions, prompts or {})
    return folder


@kept
def tiny_xlmr(folder: Path | str, pooling: str = "cls", layout: str | None = "old", *, seed: int = 4) -> Path:
    """T-XLMR: a random XLM-RoBERTa: padding_idx 1, 66 position rows, so 64 tokens at most."""
    folder = Path(folder)
    torch.manual_seed(seed)
    save_model(XLMRobertaModel(xlmr_config(save_unigram(folder))), folder)
    if layout is not None:
        save_sentence_transformers(folder, 64, pooling, layout, True, 64, {})
    return folder


@kept
def tiny_cross_encoder(folder: Path | str, kind: str = "bert", *, labels: int = 1, seed: int = 5) -> Path:
    """T-CE: a sequence-classification head on T-BERT or T-XLMR (`kind` "bert" or "xlmr")."""
    folder = Path(folder)
    torch.manual_seed(seed)
    model: PreTrainedModel
    if kind == "bert":
        model = BertForSequenceClassification(bert_config(save_wordpiece(folder, 128), 128, num_labels=labels))
    else:
        model = XLMRobertaForSequenceClassification(xlmr_config(save_unigram(folder), num_labels=labels))
    save_model(model, folder)
    return folder


def decoder_settings(
    layers: int, kv_heads: int, head_dim: int, heads: int, hidden: int, vocab: int, tied: bool, max_positions: int
) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
    }


def bert_config(vocab: int, max_positions: int, **more: Any) -> BertConfig:
    return BertConfig(
        vocab_size=vocab, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=max_positions, type_vocab_size=2, pad_token_id=0, **more,
    )  # fmt: skip


def xlmr_config(vocab: int, **more: Any) -> XLMRobertaConfig:
    return XLMRobertaConfig(
        vocab_size=vocab, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        max_position_embeddings=66, type_vocab_size=1, bos_token_id=0, pad_token_id=1, eos_token_id=2,
        layer_norm_eps=1e-5, **more,
    )  # fmt: skip


@torch.no_grad()
def save_model(model: PreTrainedModel, folder: Path, head: float = 2.0) -> None:
    """Spread the weights and write float32 safetensors.

    Matrices get std 1/sqrt(inputs); queries and keys more, so that attention has preferences; heads `head` times that,
    twice so that logits do. A tied table stays small, lest every token predict itself; its final norm makes up for it.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False)) and "lm_head.weight" in model.state_dict()
    stored_one = 0.0 if "gemma" in model.config.model_type else 1.0  # Gemma stores its norms as w - 1
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            weight.normal_(0.0, spread(name, tied, head) / weight.shape[1] ** 0.5)
        elif name.endswith("bias"):
            weight.normal_(0.0, 0.1)
        else:
            weight.normal_(stored_one, 0.1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_(0.7)
            if tied and name == "model.norm.weight":
                weight.add_(3.0)
    model.float().eval().save_pretrained(folder)


def spread(name: str, tied: bool, head: float) -> float:
    """Standard deviation of a matrix, times the square root of its inputs."""
    if any(part in name for part in ("q_proj", "k_proj", "query", "key")):
        return 1.7
    if "embed" in name:
        return 0.5 if tied else 2.0
    return head if any(part in name for part in ("lm_head", "score", "out_proj", "classifier")) else 1.0


def save_bpe(
    folder: Path,
    vocab: int,
    *,
    prefix: list[str],
    suffix: list[str] | None = None,
    extra: list[str] | None = None,
    chat_template: str | None = None,
) -> dict[str, int]:
    """Train byte-level BPE, write its files; return token ids by text, and "size".

    `prefix` and `suffix` are added around every text by the post-processor, as BOS and EOS are in real tokenizers.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = SPECIAL + (extra or [])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    ids = {**tokenizer.get_vocab(with_added_tokens=True), "size": tokenizer.get_vocab_size()}
    pieces = [*prefix, "$A", *(suffix or [])]
    if len(pieces) > 1:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single=" ".join(pieces),
                    pair=" ".join([*pieces, "$B:1", *(suffix or [])]),
                    special_tokens=[(token, ids[token]) for token in special],
                ),
            ]
        )
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    save_tokenizer(tokenizer, folder, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=chat_template)
    return ids


def save_wordpiece(folder: Path, max_positions: int) -> int:
    """Write a BERT tokenizer whose WordPiece vocabulary is the corpus' words and characters; return its size."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted({word for line in CORPUS for word in re.findall(r"\w+|[^\w\s]", line.lower())})
    letters = sorted({letter for word in words for letter in word})
    pieces = [*special, *dict.fromkeys([*letters, *words]), *(f"##{letter}" for letter in letters)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    save_tokenizer(
        tokenizer, folder, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_max_length=max_positions,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    return len(vocab)


def save_unigram(folder: Path) -> int:
    """Write an XLM-R tokenizer: its ids, a unigram model over the corpus' words and letters. Return the size."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    words = sorted({"▁" + word for line in CORPUS for word in line.split()})
    letters = sorted({letter for word in words for letter in word})
    pieces = [(piece, 0.0) for piece in special]
    pieces += [(letter, -8.0) for letter in letters] + [(word, -6.0 - len(word) / 4) for word in words if len(word) > 1]
    tokenizer = Tokenizer(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    save_tokenizer(
        tokenizer, folder, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>", cls_token="<s>",
        sep_token="</s>", mask_token=AddedToken("<mask>", lstrip=True), model_max_length=64,
        model_input_names=["input_ids", "attention_mask"],
    )  # fmt: skip
    return int(tokenizer.get_vocab_size())


def save_tokenizer(tokenizer: Tokenizer, folder: Path, **settings: Any) -> None:
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **settings)
    wrapped.save_pretrained(folder)
    # One name that every transformers version loads from tokenizer.json as it stands.
    edit_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")


def save_sentence_transformers(
    folder: Path, width: int, pooling: str, layout: str, normalize: bool, max_length: int, prompts: dict[str, str]
) -> None:
    """Write modules.json and the companions that sentence-transformers keeps beside a model."""
    package = "sentence_transformers.models"
    modules = [("", f"{package}.Transformer"), ("1_Pooling", f"{package}.Pooling")]
    if normalize:
        modules.append(("2_Normalize", f"{package}.Normalize"))
    write_modules(folder, modules)
    write_json(folder / "1_Pooling" / "config.json", pooling_config(width, pooling, layout))
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": max_length, "do_lower_case": False})
    written = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    write_json(folder / "config_sentence_transformers.json", written)


def pooling_config(width: int, pooling: str, layout: str) -> dict[str, Any]:
    """1_Pooling/config.json: "old" has one boolean a mode, "new" one string."""
    names = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "last": "lasttoken"}
    if layout == "new":
        return {"embedding_dimension": width, "pooling_mode": "lasttoken" if pooling == "last" else pooling}
    flags = {f"pooling_mode_{name}": mode == pooling for mode, name in names.items()}
    flags |= {"pooling_mode_mean_sqrt_len_tokens": False, "pooling_mode_weightedmean_tokens": False}
    return {"word_embedding_dimension": width, **flags, "include_prompt": True}


def write_modules(folder: Path, modules: list[tuple[str, str]]) -> None:
    rows = [{"idx": i, "name": str(i), "path": path, "type": kind} for i, (path, kind) in enumerate(modules)]
    write_json(folder / "modules.json", rows)


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text(encoding="utf-8")) | changes)


def template_of(choice: bool | str) -> str | None:
    if isinstance(choice, str):
        return choice
    return CHAT_TEMPLATE if choice else None
