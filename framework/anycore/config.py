"""All settings, once: frozen data classes whose fields become the CLI flags, the YAML keys and the Python arguments.

`ModelConfig` describes one served model, `ServerConfig` the server around them. None means "not set": what fills it
in (the model, the backend, the memory plan) is recorded by `engine/settle.py`, never rewritten here.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from anycore.contract.declare import DTYPES
from anycore.errors import ConfigError

GROUP, KEPT_DENSE = 32, ("auto",)
"""How matrices are rounded while they are loaded, unless it is said."""

ENVIRONMENT = {
    "ANYCORE_CACHE": "folder for fetched models and caches (default: ~/.cache/anycore)",
    "ANYCORE_API_KEY": "key that requests must carry, as --api-key (several: comma-separated)",
    "ANYCORE_USE_MODELSCOPE": "1: plain ids are ModelScope ids, not Hugging Face hub ids",
    "ANYCORE_PLUGINS": "comma-separated distribution names of plugins to load; empty: the built-in ones only",
    "ANYCORE_PLUGIN_SECONDS": "time limit for loading one plugin (default: 10)",
    "ANYCORE_CPU_KERNELS": "C++ kernels of the CPU backend: a level such as avx2, or none (default: the best there is)",
    "ANYCORE_CONFORMANCE": "backend that the processes of `anycore conformance` are about; set by that command",
    "ANYCORE_LOG": "log level: debug, info (default), warning, error",
    "HF_TOKEN": "token for gated Hugging Face models, read by huggingface_hub",
}
"""Every environment variable anycore reads, with its meaning; the docs print this table."""


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    unit: str = "",
    secret: bool = False,
) -> Any:
    """Declare a field: its default, its help text, further flag spellings and, where it has them, its choices.

    A `unit` ("bytes", "tokens") lets users write 4GiB or 8k; a `secret` is shown nowhere.
    """
    metadata = {"help": help, "flags": flags, "choices": choices, "unit": unit, "secret": secret}
    if isinstance(default, (list, dict)):
        raise TypeError("use a tuple: settings are immutable")
    return field(default=default, metadata=metadata, repr=not secret)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Settings of one model's engine."""

    model: str = setting("", "folder, GGUF file, hub id, modelscope:ID or pkg:NAME")
    checkpoint: str | None = setting(
        None, "folder with safetensors to take instead of the model's own weights; all else stays the model's"
    )
    served_model_name: tuple[str, ...] = setting((), "names clients may use (default: the model as given)")
    task: str = setting("auto", "what the model is served for", choices=("auto", "generate", "embed", "rerank"))
    backend: str = setting("auto", "backend to run on; auto takes the best one that supports the model")
    device: int = setting(0, "index of the backend's device")
    replicas: int | None = setting(
        None, "engines of this model, each a process of its own, among which requests are divided (default: 1)"
    )
    devices: tuple[int, ...] = setting(
        (), "indices of the devices that replicas run on, in turn (default: --device for all)"
    )
    tensor_parallel_size: int = setting(
        1, "ranks that divide the model's matrices, each a process with a device of its own, from --device on"
    )
    dtype: str = setting("auto", "weight and activation type", choices=("auto", *DTYPES))
    quantization: str = setting(
        "auto",
        "how weights are held: auto, as the checkpoint has them; none, dense; or rounded while they are loaded",
        choices=("auto", "none", "w8a8", "w4a16", "fp8", "bits=8", "bits=4"),
    )
    quantization_group: int = setting(GROUP, "inputs that share a scale under --quantization w4a16: 32, 64 or 128")
    keep_dense: tuple[str, ...] = setting(
        KEPT_DENSE,
        "matrices that are not quantised, such as lm_head or layers.0.* (small ones and norms never are); auto: what "
        "the scheme hurts most stays dense, or has 8 bits in groups; none: no others",
    )
    max_model_len: int | None = setting(
        None,
        "longest sequence in tokens, prompt and output (default: the model's, or what memory allows)",
        unit="tokens",
    )
    max_num_seqs: int | None = setting(None, "sequences that run at once (default: 256, fewer if memory is short)")
    max_num_batched_tokens: int | None = setting(
        None,
        "token budget of one step (default: 2048, at least the longest input where prompts cannot be split)",
        unit="tokens",
    )
    long_prompt_rows: int | None = setting(
        None,
        "tokens of a step that prompts longer than its budget get together while shorter requests run or wait "
        "(default: what the others leave)",
        unit="tokens",
    )
    block_size: int | None = setting(None, "tokens per KV block (default: the backend's)")
    memory_utilization: float | None = setting(
        None,
        "share of the device's memory for this process, above 0, at most 1 (default: the backend's)",
        flags=("--gpu-memory-utilization", "--device-memory-utilization"),
    )
    kv_cache_memory: int | None = setting(
        None,
        "bytes for the KV cache, such as 512MiB or 4GiB; overrides the share",
        flags=("--kv-cache-memory-bytes",),
        unit="bytes",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "how keys and values are held: auto, in the type of the weights; or rounded to a byte a number when stored",
        choices=("auto", "fp8", "int8", "fp8_e4m3"),
    )
    enable_prefix_caching: bool = setting(True, "share blocks of equal prefixes between requests")
    scheduling_policy: str = setting("fcfs", "order of waiting requests", choices=("fcfs", "priority", "short-first"))
    fair_share: bool = setting(
        True, "API keys that wait share the engine by their weights; off: only the scheduling policy orders them"
    )
    max_queued: int = setting(
        1024, "sequences that may wait; more are refused with 429", flags=("--max-num-queued-reqs",)
    )
    request_timeout: float | None = setting(None, "seconds from arrival until a request is given up (default: none)")
    seed: int = setting(0, "seed for requests without one is drawn from this and a counter when not 0")
    chat_template: str | None = setting(None, "file with a Jinja chat template to use instead of the model's")
    tool_parser: str = setting(
        "auto",
        "how the model writes tool calls: auto, by its chat template; none, not at all; or a format's name",
        flags=("--tool-call-parser",),
    )
    reasoning_parser: str = setting(
        "auto", "how the model sets its reasoning apart: auto, by its chat template; none; or a format's name"
    )
    generation_config: str = setting(
        "auto",
        "auto: defaults from the model's generation_config.json; none: OpenAI's",
        choices=("auto", "none", "vllm"),
    )
    override_generation_config: str | None = setting(
        None, "JSON object of sampling defaults that beat the model's file"
    )
    pooling: str | None = setting(
        None, "pooling of an embedder, against its files", choices=("cls", "mean", "max", "last")
    )
    trust_remote_code: bool = setting(False, "always refused: anycore runs no code from checkpoints")
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    allow_cpu_fallback: bool = setting(False, "use the CPU when the asked-for backend cannot be opened")
    keep_alive: float | None = setting(
        None, "seconds without a request after which the model is unloaded, until the next one (default: it stays)"
    )
    url: str | None = setting(
        None, "OpenAI-compatible server that answers for this model, such as http://host:8000/v1: requests go there"
    )
    url_api_key_env: str | None = setting(None, "environment variable that holds the key for --url")
    ray_resources: str | None = setting(
        None, 'JSON object: what each rank of an engine reserves with --ray, such as {"GPU": 1} (default: {"CPU": 1})'
    )
    ray_autoscaling: str | None = setting(
        None,
        "JSON object: how many engines --ray keeps, as Ray Serve's autoscaling_config: max_replicas, "
        "target_ongoing_requests and others (default: always --replicas)",
    )
    threads: int | None = setting(
        None, "threads the backend's host code may use (default: the cores this process may use)"
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "long_prompt_rows",
            "block_size",
            "kv_cache_memory",
            "threads",
            "replicas",
            "tensor_parallel_size",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{flag(name)} must be at least 1, not {value}", param=name)
        self._check_url()
        self._check_devices()
        self._check_rounding()
        share = self.memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(
                f"--memory-utilization is a share of the device's memory: above 0 and at most 1, not {share}",
                param="memory_utilization",
            )
        if self.max_queued < 0:
            raise ConfigError(f"--max-queued must be 0 or more, not {self.max_queued}", param="max_queued")
        for name in ("request_timeout", "keep_alive"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ConfigError(f"{flag(name)} must be above 0, not {seconds:g}", param=name)
        for name in self.served_model_name:
            if not name.strip() or not name.isprintable():
                raise ConfigError(f"--served-model-name must be a name, not {name!r}", param="served_model_name")
        if self.trust_remote_code:
            raise ConfigError(
                "--trust-remote-code is refused: anycore never runs code that a checkpoint carries. "
                "Architectures come from plugins (hook register_models).",
                param="trust_remote_code",
            )

    def _check_url(self) -> None:
        """Check a model of another server, for which most settings mean nothing."""
        if self.url is None:
            if self.url_api_key_env is not None:
                raise ConfigError("--url-api-key-env needs --url", param="url_api_key_env")
            return
        try:
            parts = urlsplit(self.url)
            plain = parts.scheme in ("http", "https") and parts.hostname and "@" not in parts.netloc
        except ValueError:
            plain = False
        if not plain or parts.query or parts.fragment:
            raise ConfigError(
                f"--url must be the address of an API, such as http://host:8000/v1, not {self.url!r} (a key belongs "
                "into the variable that --url-api-key-env names)",
                param="url",
            )
        if self.task == "auto":
            raise ConfigError("--url needs --task: what the other server's model does is not looked up", param="task")
        for item in fields(self):
            if item.name not in OF_REMOTE and getattr(self, item.name) != item.default:
                raise ConfigError(
                    f"{flag(item.name)} means nothing for a model of another server (--url {self.url}): set it there",
                    param=item.name,
                )

    def _check_rounding(self) -> None:
        """Refuse what only says how matrices are rounded while they are loaded, where none are."""
        if self.quantization_group != GROUP and self.quantization not in ("w4a16", "bits=4"):
            raise ConfigError(
                f"--quantization-group {self.quantization_group} belongs to --quantization w4a16, "
                f"not {self.quantization}",
                param="quantization_group",
            )
        if self.keep_dense != KEPT_DENSE and self.quantization in ("auto", "none"):
            raise ConfigError(
                "--keep-dense belongs to --quantization w8a8, w4a16 or fp8: nothing is rounded with "
                f"{self.quantization}",
                param="keep_dense",
            )

    def _check_devices(self) -> None:
        """Check where replicas are to run."""
        if not self.devices:
            return
        if self.device:
            raise ConfigError(
                f"--device {self.device} and --devices {' '.join(map(str, self.devices))} exclude each other",
                param="devices",
            )
        if self.replicas is not None and len(self.devices) > self.replicas:
            raise ConfigError(
                f"--devices names {len(self.devices)} devices, --replicas {self.replicas} would leave some idle",
                param="devices",
            )
        if min(self.devices) < 0:
            raise ConfigError(f"--devices takes indices from 0 on, not {min(self.devices)}", param="devices")

    @property
    def placement(self) -> tuple[int, ...]:
        """The device of each replica."""
        devices = self.devices or (self.device,)
        return tuple(devices[i % len(devices)] for i in range(self.replicas or len(devices)))

    @property
    def names(self) -> tuple[str, ...]:
        """Names clients may use, the first one being the canonical one."""
        return self.served_model_name or (self.model,)


OF_REMOTE = frozenset({"model", "served_model_name", "task", "url", "url_api_key_env", "request_timeout"})
"""The settings of a model of another server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server around one or several models."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one and prints it")
    api_servers: int = setting(
        1, "front processes that share the port, for many streams at once", flags=("--api-server-count",)
    )
    api_key: tuple[str, ...] = setting(
        (),
        "keys that requests must carry (better: ANYCORE_API_KEY or --api-key-file, which do not show in ps)",
        secret=True,
    )
    api_key_file: str | None = setting(
        None,
        "keys: one a line, or in a .yaml or .json file a list of entries with scopes and limits; SIGHUP reads it again",
    )
    ssl_certfile: str | None = setting(
        None, "certificate and those between it and the root, PEM: serve HTTPS; SIGHUP reads it again"
    )
    ssl_keyfile: str | None = setting(None, "private key of the certificate, PEM (default: in the certificate's file)")
    ssl_ca_certs: str | None = setting(
        None, "authorities, PEM: clients must show a certificate that one of them signed"
    )
    allowed_origins: tuple[str, ...] = setting(
        (),
        "origins of web pages that may call this server from a browser, such as https://chat.example (default: none)",
    )
    allowed_methods: tuple[str, ...] = setting(("GET", "POST"), "methods that such pages may use")
    allowed_headers: tuple[str, ...] = setting(
        ("authorization", "content-type", "x-request-id", "x-request-timeout"), "headers that such pages may send"
    )
    allow_credentials: bool = setting(False, "let browsers send cookies and client certificates along")
    max_body_size: int = setting(32 * 2**20, "largest request body in bytes", unit="bytes")
    max_request_sequences: int = setting(2048, "sequences that one request may ask for: its prompts times its n")
    read_timeout: float = setting(
        60.0,
        "seconds in which a request's headers must come, and then 16 KiB of its body or the rest of it, over and over; "
        "slower ones get 408; 0: no limit",
    )
    write_timeout: float = setting(
        60.0,
        "seconds in which a client must take 16 KiB of an answer that waits for it, or the rest of it, over and over; "
        "slower ones are cut off and their request is given up; 0: no limit",
    )
    ray: str | None = setting(
        None,
        "run fronts and engines on a Ray cluster: auto, the one of this machine; HOST:PORT; or local, one of this "
        "machine alone",
    )
    reuse_port: bool = setting(
        False, "share the port with another server, such as the one that this one takes over from (SO_REUSEPORT)"
    )
    engine_restarts: int = setting(
        10, "restarts of a model's engine within an hour, after which the server ends; 0: it ends with the first engine"
    )
    step_timeout: float = setting(
        300.0, "seconds after which an engine's step counts as stuck and the engine is restarted; 0: never"
    )
    shutdown_timeout: float = setting(30.0, "seconds that running requests get to finish after SIGTERM")
    console: bool = setting(True, "serve the web console at /")
    strict: bool = setting(False, "refuse to start where a setting had to be adjusted; refuse unknown request fields")
    run_tools: tuple[str, ...] = setting(
        (), "tools of plugins that the server runs for requests with a tool_config (default: none)"
    )
    log_prompts: bool = setting(False, "write prompts and outputs to the log")
    allow_request_template: bool = setting(False, "accept a chat_template in requests (templates are programs)")
    log_level: str = setting("info", "how much to log", choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "log lines for people, or one JSON object each", choices=("text", "json"))
    metrics_names: str = setting(
        "anycore", "prefix of the series that vLLM has, too, in /metrics", choices=("anycore", "vllm", "both")
    )
    otlp_traces_endpoint: str | None = setting(
        None, "send traces to this URL, OTLP over HTTP, such as http://collector:4318/v1/traces (default: no traces)"
    )

    def __post_init__(self) -> None:
        check_types(self)
        check_choices(self)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be between 0 and 65535, not {self.port}", param="port")
        if self.api_servers < 1:
            raise ConfigError(f"--api-servers must be at least 1, not {self.api_servers}", param="api_servers")
        self._check_web()
        if self.max_body_size < 1024:
            raise ConfigError(
                f"--max-body-size must be at least 1024 bytes, not {self.max_body_size}", param="max_body_size"
            )
        if self.max_request_sequences < 1:
            raise ConfigError(
                f"--max-request-sequences must be at least 1, not {self.max_request_sequences}",
                param="max_request_sequences",
            )
        if self.engine_restarts < 0:
            raise ConfigError(
                f"--engine-restarts must be 0 or more, not {self.engine_restarts}", param="engine_restarts"
            )
        for name in ("step_timeout", "shutdown_timeout", "read_timeout", "write_timeout"):
            seconds = getattr(self, name)
            if not 0 <= seconds < math.inf:
                raise ConfigError(f"{flag(name)} must be 0 or more seconds, not {seconds:g}", param=name)

    def _check_web(self) -> None:
        """Check what TLS and browsers are told."""
        for name in ("ssl_keyfile", "ssl_ca_certs"):
            if getattr(self, name) is not None and self.ssl_certfile is None:
                raise ConfigError(f"{flag(name)} needs --ssl-certfile", param=name)
        for name in ("allowed_origins", "allowed_methods", "allowed_headers"):
            for value in getattr(self, name):
                if value != "*" and (not value or set(value) & set("[]\"' *,")):
                    raise ConfigError(
                        f"{flag(name)} takes words with blanks between them, or * alone, not {value!r}", param=name
                    )
        if self.allow_credentials and "*" in self.allowed_origins:
            raise ConfigError(
                "--allow-credentials with --allowed-origins * would let every web page act for whoever views it: "
                "name the origins",
                param="allow_credentials",
            )


KINDS: dict[str, type] = {
    "str": str, "int": int, "float": float, "bool": bool, "tuple[str, ...]": tuple, "tuple[int, ...]": tuple
}  # fmt: skip
WORDS = {str: "text", int: "a whole number", float: "a number", bool: "True or False", tuple: "a list"}


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def check_types(config: Any) -> None:
    """Raise ConfigError for a field whose value is not of its type: Python's callers may hand in anything.

    A list becomes a tuple, and a whole number stands for a number.
    """
    for item in fields(config):
        value = getattr(config, item.name)
        name, _, optional = str(item.type).partition(" | ")  # as written: annotations are text
        kind = KINDS[name]
        if type(value) is kind or (value is None and optional):
            continue
        if kind is tuple and isinstance(value, list):
            object.__setattr__(config, item.name, tuple(value))
        elif isinstance(value, bool) or not isinstance(value, int if kind is float else kind):
            raise ConfigError(f"{flag(item.name)} must be {WORDS[kind]}, not {value!r}", param=item.name)


def check_choices(config: Any) -> None:
    """Raise ConfigError for a field whose value is not among its choices."""
    for item in fields(config):
        choices = item.metadata["choices"]
        value = getattr(config, item.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(f"{flag(item.name)} must be one of {', '.join(choices)}, not {value!r}", param=item.name)


def shown(config: Any) -> dict[str, Any]:
    """Return the settings that differ from their defaults, with secrets as `***`: what may be printed or logged."""
    changed = {item: getattr(config, item.name) for item in fields(config)}
    return {i.name: "***" if i.metadata["secret"] else v for i, v in changed.items() if v != i.default}


def default_of(item: Field[Any]) -> Any:
    return None if item.default is MISSING else item.default


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Folder for fetched models, created on first use by whoever writes there.

    Raises:
        ConfigError: none is named and this user has no home, as in containers with a user id of their own.
    """
    if environ.get("ANYCORE_CACHE"):
        return Path(environ["ANYCORE_CACHE"])
    try:
        return Path.home() / ".cache" / "anycore"
    except RuntimeError:
        raise ConfigError(
            "there is no folder for caches: this user has no home. Set ANYCORE_CACHE or HOME to a folder that it may "
            "write to",
            param="ANYCORE_CACHE",
        ) from None
