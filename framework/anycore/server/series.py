"""Every series of /metrics, once: names, labels and buckets as data. This table is what dashboards are built on.

Names, meanings and buckets are vLLM's where it has the series, with the prefix `anycore:` in place of `vllm:`.
`tests/server/metrics.txt` is a copy that a test compares: nothing leaves it without a release that has both names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from anycore.engine.stats import STEP_SEQUENCES, STEP_TOKENS, Distribution, Stats

PREFIX = "anycore:"
MODEL = ("model_name", "engine", "task", "backend")
"""Labels of what is known once a model is planned; `engine` is the number of its replica."""

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))


@dataclass(frozen=True, kw_only=True)
class Series:
    """One family of /metrics."""

    name: str
    kind: str  # counter, gauge or histogram
    text: str
    labels: tuple[str, ...] = MODEL
    buckets: tuple[float, ...] = ()
    vllm: bool = False  # vLLM has it, under the same name with its prefix
    older: tuple[str, ...] = ()  # what earlier versions of vLLM called it
    stats: Callable[[Stats], float | Distribution] | None = None  # where it is read from an engine's last report

    @property
    def exposed(self) -> str:
        """The name as it stands on the page; a histogram's samples add _bucket, _sum and _count."""
        return self.name + ("_total" if self.kind == "counter" else "")


def counter(name: str, text: str, **rest: object) -> Series:
    return Series(name=PREFIX + name, kind="counter", text=text, **rest)  # type: ignore[arg-type]


def gauge(name: str, text: str, **rest: object) -> Series:
    return Series(name=PREFIX + name, kind="gauge", text=text, **rest)  # type: ignore[arg-type]


def histogram(name: str, text: str, buckets: tuple[float, ...], **rest: object) -> Series:
    return Series(name=PREFIX + name, kind="histogram", text=text, buckets=buckets, **rest)  # type: ignore[arg-type]


QUEUE = (
    gauge("num_requests_running", "sequences that are being computed", vllm=True, stats=lambda s: s.running),
    gauge("num_requests_waiting", "sequences that wait", vllm=True, stats=lambda s: s.waiting),
    gauge(
        "num_requests_waiting_by_reason",
        "sequences that wait: for room (capacity), or for a prefix that another one is computing (deferred)",
        labels=(*MODEL, "reason"),
        vllm=True,
    ),
    counter(
        "num_preemptions",
        "sequences that lost their KV blocks and were computed again",
        vllm=True,
        stats=lambda s: s.preemptions,
    ),
    counter("admission_rejections", "requests refused by the engine", labels=(*MODEL, "reason"), vllm=True),
)
CACHE = (
    gauge(
        "kv_cache_usage_perc",
        "share of KV blocks in use, 0 to 1",
        vllm=True,
        older=("gpu_cache_usage_perc",),
        stats=lambda s: 1 - s.blocks_free / s.blocks if s.blocks else 0,
    ),
    counter(
        "prefix_cache_queries",
        "prompt tokens looked up in the prefix cache",
        vllm=True,
        older=("gpu_prefix_cache_queries",),
        stats=lambda s: s.prompt_tokens,
    ),
    counter(
        "prefix_cache_hits",
        "prompt tokens found in the prefix cache",
        vllm=True,
        older=("gpu_prefix_cache_hits",),
        stats=lambda s: s.cached_tokens,
    ),
    gauge(
        "cache_config_info",
        "1; the KV cache in its labels",
        labels=(
            *MODEL,
            "block_size",
            "num_blocks",
            "cache_dtype",
            "enable_prefix_caching",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
        ),
        vllm=True,
    ),
)
TOKEN_COUNTS = (
    counter("prompt_tokens", "prompt tokens, computed or found", vllm=True, stats=lambda s: s.prompt_tokens),
    counter(
        "prompt_tokens_by_source",
        "prompt tokens that were computed (local_compute) or found (local_cache_hit)",
        labels=(*MODEL, "source"),
        vllm=True,
    ),
    counter("prompt_tokens_cached", "prompt tokens not computed again", vllm=True, stats=lambda s: s.cached_tokens),
    counter(
        "prompt_tokens_cached_by_source",
        "prompt tokens not computed again, by where they were found (device)",
        labels=(*MODEL, "source"),
        vllm=True,
    ),
    counter("generation_tokens", "tokens generated", vllm=True, stats=lambda s: s.output_tokens),
    histogram(
        "iteration_tokens_total",
        "tokens computed in one step",
        tuple(map(float, STEP_TOKENS)),
        vllm=True,
        stats=lambda s: s.step_tokens,
    ),
    histogram(
        "iteration_sequences",
        "sequences of which one step computes something: the batch size of every task",
        tuple(map(float, STEP_SEQUENCES)),
        stats=lambda s: s.step_sequences,
    ),
    counter(
        "padding_tokens",
        "tokens computed for nothing, to fill a batch of texts of unequal length or a recorded step",
        stats=lambda s: s.padding_tokens,
    ),
    counter("rerank_pairs", "pairs of query and document that were scored"),
)
REQUESTS = (
    counter("request_success", "finished requests", labels=(*MODEL, "finished_reason"), vllm=True),
    histogram("request_prompt_tokens", "prompt tokens of a request", TOKENS, vllm=True),
    histogram("request_prefill_kv_computed_tokens", "prompt tokens that were not in the cache", TOKENS, vllm=True),
    histogram("request_generation_tokens", "generated tokens of a request", TOKENS, vllm=True),
    histogram("request_max_num_generation_tokens", "generated tokens of its longest sequence", TOKENS, vllm=True),
    histogram("request_params_max_tokens", "max_tokens of requests that set it", TOKENS, vllm=True),
    histogram("request_params_n", "n of requests", (1, 2, 5, 10, 20), vllm=True),
    histogram("request_num_preemptions", "times that a request lost its KV blocks", (1, 2, 3, 4, 5, 10, 20), vllm=True),
)
TIMES = (
    histogram(
        "time_to_first_token_seconds", "from arrival to the first token, vector or score", FIRST_TOKEN, vllm=True
    ),
    histogram(
        "inter_token_latency_seconds",
        "between two tokens of a sequence",
        INTER_TOKEN,
        vllm=True,
        older=("time_per_output_token_seconds",),
    ),
    histogram(
        "request_time_per_output_token_seconds",
        "a request's mean time between the tokens of its longest sequence",
        INTER_TOKEN,
        vllm=True,
    ),
    histogram("e2e_request_latency_seconds", "from arrival to the end", LATENCY, vllm=True),
    histogram("request_queue_time_seconds", "from arrival to the first step", LATENCY, vllm=True),
    histogram("request_inference_time_seconds", "from the first step to the last token", LATENCY, vllm=True),
    histogram("request_prefill_time_seconds", "from the first step to the first token", LATENCY, vllm=True),
    histogram("request_decode_time_seconds", "from the first token to the last", LATENCY, vllm=True),
)
ENGINES = (
    gauge(
        "engine_phase",
        "1 for the phase that a model's engine is in, 0 for the others",
        labels=("model_name", "engine", "phase"),
    ),
    counter("engine_restarts", "engines that ended and were started again", labels=("model_name", "engine", "reason")),
    gauge("memory_bytes", "bytes of the device, by the memory plan", labels=(*MODEL, "term")),
    gauge("memory_measured_bytes", "bytes of the device, as found after the start", labels=(*MODEL, "term")),
    counter("op_fallback", "operations a backend left to the reference", labels=(*MODEL, "op")),
)
SERVER = (
    counter(
        "request_errors",
        "requests answered by an error, by its code; `key` names the key where keys have names",
        labels=("code", "key"),
    ),
    counter("unknown_request_fields", "request fields that nothing here reads", labels=()),
    Series(
        name="http_requests",
        kind="counter",
        text="HTTP requests by route, probes and this page left out",
        labels=("handler", "method", "status"),
    ),
    Series(
        name="http_request_duration_seconds",
        kind="histogram",
        text="from the request's first byte to the answer's last",
        labels=("handler", "method"),
        buckets=(0.1, 0.5, 1),
    ),
)

GROUPS: dict[str, tuple[Series, ...]] = {
    "Queue": QUEUE,
    "KV cache": CACHE,
    "Tokens and batches": TOKEN_COUNTS,
    "Requests": REQUESTS,
    "Times": TIMES,
    "Engines": ENGINES,
    "Server": SERVER,
}
TABLE: dict[str, Series] = {series.name: series for group in GROUPS.values() for series in group}


def samples() -> dict[str, Series]:
    """Every name that a query can ask for, those of histograms' parts included."""
    found: dict[str, Series] = {}
    for series in TABLE.values():
        ends = ("_bucket", "_sum", "_count") if series.kind == "histogram" else ("",)
        found |= {series.exposed + end: series for end in ends}
    return found
