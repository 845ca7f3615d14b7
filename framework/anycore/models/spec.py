"""What a model is, as plain numbers and flags: made from `config.json` alone, before any weight is touched.

No torch here. `families.py` reads `config.json`, `companions.py` the sentence-transformers files beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from anycore.contract.declare import Need, Task
from anycore.contract.sizes import KVSpec
from anycore.models.parameters import counted

if TYPE_CHECKING:
    from anycore.models.quantization import Quantization, Stored
    from anycore.models.source import Source


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: base, kind ("default", "linear", "dynamic", "yarn", "llama3") and the kind's own numbers."""

    theta: float
    kind: str = "default"
    parameters: tuple[tuple[str, float], ...] = ()  # factor, low_freq_factor, …, as in Hugging Face

    def reach(self, max_positions: int) -> int:
        """Longest sequence in tokens, for a config that says `max_positions`.

        "yarn" and "dynamic" stretch what the model was trained for, and configs often keep saying the latter.
        """
        numbers = dict(self.parameters)
        if self.kind not in ("yarn", "dynamic"):
            return max_positions
        return max(max_positions, int(numbers["original_max_position_embeddings"] * numbers["factor"]))


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A sentence-transformers Dense module: a layer between pooling and normalisation."""

    folder: str  # its files, such as "2_Dense"
    inputs: int
    outputs: int
    bias: bool = True
    activation: str = "tanh"  # "tanh", "identity", "relu", "gelu", "silu"


@dataclass(frozen=True, slots=True)
class PoolingSpec:
    """How a vector is taken from the hidden states, from sentence-transformers files where there are any."""

    kind: str  # "cls", "mean", "max", "last"
    normalize: bool = True
    source: str = "default"  # "files", "flag", or "default": nobody said so
    matryoshka: tuple[int, ...] = ()  # dimensions the model was trained for; empty: not declared
    prompts: tuple[tuple[str, str], ...] = ()  # name -> text put before the input
    default_prompt: str | None = None
    max_length: int | None = None  # tokens of an input, as sentence-transformers files or else the tokenizer's say
    truncate_dim: int | None = None  # dimensions of a vector where the request names none; None: all
    similarity: str = "cosine"  # of two vectors: "cosine", "dot", "euclidean", "manhattan"
    chat: tuple[tuple[str, Any], ...] | None = None  # texts are messages of a chat, whose template gets these variables
    dense: tuple[DenseSpec, ...] = ()  # applied in order, before normalisation


@dataclass(frozen=True, slots=True)
class ScoreSpec:
    """How a relevance score is taken: "classifier" (cross-encoder), "yes_no" (causal LM) or "cosine" (bi-encoder)."""

    kind: str
    labels: int = 1
    activation: str = "sigmoid"  # "sigmoid", "softmax", "identity"
    yes_no_ids: tuple[int, int] | None = None  # "yes_no": the token ids of (yes, no), rows of the head
    prompt: str = ""  # put before a query, or the instruction where the model is told one
    max_length: int | None = None  # tokens of a pair, as its files say
    problem: str | None = None  # what the labels are of, as config.json's problem_type says

    @property
    def of_labels(self) -> str:
        """What makes numbers of a classifier's labels out of logits, as transformers' pipeline has it: whatever
        sentence-transformers says of scores is not meant."""
        if self.problem == "regression":
            return "identity"
        return "sigmoid" if self.labels == 1 or self.problem == "multi_label_classification" else "softmax"


@dataclass(frozen=True, slots=True)
class Shard:
    """Which part of a model a spec is about, where several ranks compute it together: see `models.parallel`."""

    rank: int
    ranks: int
    whole: ModelSpec


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model. Sizes are counts of elements; None where a model has no such thing."""

    architecture: str  # Hugging Face name, such as "LlamaForCausalLM"
    family: str  # "decoder" or "encoder": which class builds it
    attention: str  # "causal" or "bidirectional"
    tasks: tuple[Task, ...]  # what it can be served for, the natural one first
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int  # longest sequence in tokens
    norm_eps: float
    activation: str  # "silu", "gelu", "gelu_tanh", "relu"
    dtype: str | None = None  # the checkpoint's own; None when it does not say
    tied: bool = False  # the head is the embedding table
    attention_scale: float | None = None  # None: head_dim ** -0.5
    rope: RopeSpec | None = None
    rope_local: RopeSpec | None = None  # for windowed layers that rotate by another base (Gemma 3)
    windows: tuple[int | None, ...] = ()  # sliding window of each layer; () = none
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head
    norm_after: bool = False  # extra norms after attention and MLP (Gemma 3)
    norm_offset: bool = False  # RMS weights are stored as w - 1 (Gemma)
    embedding_scale: float = 1.0
    softcap: float | None = None  # of attention scores
    logits_softcap: float | None = None
    token_type_count: int = 0  # segment embeddings
    position_offset: int = 0  # RoBERTa: positions start at padding_idx + 1
    pad_id: int | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    head: str | None = None  # "lm", "classifier", or None: the hidden states are the result
    pooling: PoolingSpec | None = None
    score: ScoreSpec | None = None
    stored: Stored | None = None  # how the checkpoint holds its weights, where they are quantised
    shard: Shard | None = None  # heads, KV heads and intermediate size are those of one rank of several

    @property
    def vector_size(self) -> int:
        """Length of the vectors of an embedder."""
        dense = self.pooling.dense if self.pooling else ()
        return dense[-1].outputs if dense else self.hidden_size

    @property
    def usual_vector_size(self) -> int:
        """Their length where a request names none."""
        return (self.pooling.truncate_dim if self.pooling else None) or self.vector_size

    @property
    def vocab_rows(self) -> int:
        """Rows of the tables by token id that are held here: of several ranks the last one may have fewer."""
        if self.shard is None:
            return self.vocab_size
        most = -(-self.vocab_size // self.shard.ranks)
        return max(0, min(most, self.vocab_size - self.shard.rank * most))

    @property
    def parameter_count(self) -> int:
        """Number of weights the loaded model holds; a tied head counts once."""
        return sum(p.size for p in counted(self))

    def weight_bytes(self, dtype: str, quantization: Quantization | None = None) -> int:
        """Bytes of all weights when loaded as `dtype`, or in their formats. Exact: norms stay in float32."""
        from anycore.models.quantization import pieces  # it is made of the nouns above

        return sum(piece.bytes(dtype) for p in counted(self) for piece in pieces(p, quantization))

    def kv(self, block_size: int, dtype: str, rounded: str | None = None) -> KVSpec:
        """The paged KV cache this model needs; `rounded` is a name from KV_CACHES."""
        return KVSpec(self.layers, self.kv_heads, self.head_dim, block_size, dtype, rounded)

    def need(self, task: Task, weights: str, block_size: int | None = None, chip: str | None = None) -> Need:
        """What serving `task` asks of a backend. The engine adds the features that its flags turn on."""
        used = {
            "sliding_window": any(self.windows),
            "softcap": self.softcap is not None,
            "token_types": self.token_type_count > 1,
        }
        features = tuple(name for name, asked in used.items() if asked)
        return Need(task, self.attention, self.architecture, weights, self.head_dim, block_size, features, chip)

    def for_task(self, task: Task) -> ModelSpec:
        """This model served for one task only: a language model's head is left out where nothing reads it."""
        cosine = self.score is not None and self.score.kind == "cosine"
        headless = task is Task.EMBED or (task is Task.RERANK and cosine)
        return replace(self, tasks=(task,), head=None if headless else self.head)


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture name and how its `config.json` (a dict) becomes a ModelSpec. What `register_models` returns."""

    name: str
    spec: Callable[[dict[str, Any]], ModelSpec]


def read_spec(source: Source, architectures: Iterable[Architecture] = (), pooling: str | None = None) -> ModelSpec:
    """Read the spec of a located model from its `config.json` and the companion files beside it.

    `architectures` come from plugins and win over the built-in ones; `pooling` is the user's and wins over the files.

    Raises:
        Unsupported: no architecture of that name is known, or it uses something anycore does not compute.
        ConfigError: a file contradicts itself, or says something that is not understood.
    """
    from anycore.models import companions, families  # they are made of the nouns above
    from anycore.models.quantised import methods

    config = source.config()
    spec = companions.apply(families.read(config, architectures), source, config, pooling)
    return replace(spec, stored=methods.stored(source, config, spec))
