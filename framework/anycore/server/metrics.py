"""Prometheus series of the server, in a registry of their own.

Names, meanings and buckets are vLLM's, so that dashboards carry over by replacing the prefix: `vllm:` is `anycore:`
here. Labels are `model_name`, `task` and `backend`. Every series of a model exists, at 0, from the moment the model
is planned. `tests/server/metrics.txt` lists them all: it is a contract, and nothing leaves it without a release that
has both the old and the new name.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from anycore.engine.request import FinishReason, NewRequest, RequestRecord, Stats
from anycore.errors import Overloaded

if TYPE_CHECKING:
    from anycore.plugins import Plugins

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "anycore:"
LABELS = ("model_name", "task", "backend")

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

HISTOGRAMS = {
    "time_to_first_token_seconds": ("from arrival to the first token, vector or score", FIRST_TOKEN),
    "inter_token_latency_seconds": ("between two tokens of a sequence", INTER_TOKEN),
    "e2e_request_latency_seconds": ("from arrival to the end", LATENCY),
    "request_queue_time_seconds": ("from arrival to the first step", LATENCY),
    "request_prompt_tokens": ("prompt tokens of finished requests", TOKENS),
    "request_generation_tokens": ("generated tokens of finished requests", TOKENS),
    "request_params_n": ("n of finished requests", (1, 2, 5, 10, 20)),
    "request_params_max_tokens": ("max_tokens of finished requests that set it", TOKENS),
}

GAUGES: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "num_requests_running": ("sequences that are being computed", lambda s: s.running),
    "num_requests_waiting": ("sequences that wait", lambda s: s.waiting),
    "kv_cache_usage_perc": (
        "share of KV blocks in use, 0 to 1",
        lambda s: 1 - s.blocks_free / s.blocks if s.blocks else 0,
    ),
}

COUNTERS: dict[str, tuple[str, Callable[[Stats], float]]] = {
    "prefix_cache_queries": ("prompt tokens looked up in the prefix cache", lambda s: s.prompt_tokens),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", lambda s: s.cached_tokens),
    "num_preemptions": ("sequences that lost their KV blocks and were computed again", lambda s: s.preemptions),
    "prompt_tokens": ("prompt tokens computed or found in the cache", lambda s: s.prompt_tokens),
    "generation_tokens": ("tokens generated", lambda s: s.output_tokens),
}


MEMORY = {
    "memory": "bytes of the device, by the memory plan",
    "memory_measured": "bytes of the device, as they were found after the start",
}


class Metrics:
    """All series of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._models: list[ModelMetrics] = []
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._success = self._counter("request_success", "finished requests", "finished_reason")
        self._rejections = self._counter("admission_rejections", "requests refused by the engine", "reason")
        self._config = Gauge(
            PREFIX + "cache_config_info",
            "1; the KV cache in its labels",
            (*LABELS, "block_size", "num_blocks", "cache_dtype", "enable_prefix_caching"),
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.unknown_fields = Counter(
            PREFIX + "unknown_request_fields", "request fields that nothing here reads", registry=self.registry
        )
        self.registry.register(self)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, (*LABELS, label), registry=self.registry)

    def observer(self, name: str, plugins: Callable[[], Plugins | None] = lambda: None) -> ModelMetrics:
        """Return what an EngineClient tells about itself and its requests."""
        model = ModelMetrics(self, name, plugins)
        self._models.append(model)
        return model

    def render(self) -> bytes:
        """Return all series in Prometheus' text format; of several fronts, their sums."""
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        registry.register(self)
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield what the engines count, as of their last report. Called by the registry."""
        shown = [model for model in self._models if model.labels]
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            for model in shown:
                gauge.add_metric(model.labels, value(model.stats()))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            for model in shown:
                counter.add_metric(model.labels, value(model.stats()))
            yield counter
        for kind, text in (
            ("memory", "bytes of the device by the memory plan"),
            ("memory_measured", "bytes of the device, as they were found after the start"),
        ):
            gauge = GaugeMetricFamily(f"{PREFIX}{kind}_bytes", text, labels=(*LABELS, "term"))
            for model in shown:
                for term, number in model.memory(kind).items():
                    gauge.add_metric((*model.labels, term), number)
            yield gauge
        fallbacks = CounterMetricFamily(
            PREFIX + "op_fallback", "operations a backend left to the reference", labels=(*LABELS, "op")
        )
        for model in shown:
            for op, number in model.stats().op_fallbacks.items():
                fallbacks.add_metric((*model.labels, op), number)
        yield fallbacks


class ModelMetrics:
    """The series of one model; told by its EngineClient. Also hands finished requests to the plugins."""

    def __init__(self, metrics: Metrics, name: str, plugins: Callable[[], Plugins | None]) -> None:
        self._metrics = metrics
        self._name = name
        self._plugins = plugins
        self.labels: tuple[str, ...] = ()
        self.stats: Callable[[], Stats] = Stats
        self._card: dict[str, Any] = {}

    def begin(self, card: dict[str, Any], stats: Callable[[], Stats]) -> None:
        """Create every series at 0, now that the engine is ready and the labels are known."""
        m = self._metrics
        self.stats = stats
        self._card = card
        self.labels = (self._name, card["tasks"][0], card["backend"])
        info = ("block_size", "num_blocks", "dtype", "prefix_caching")
        m._config.labels(*self.labels, *(str(card.get(key)) for key in info)).set(1)
        self._histograms = {name: h.labels(*self.labels) for name, h in m._histograms.items()}
        self._success = {r.value: m._success.labels(*self.labels, r.value) for r in FinishReason}
        self._rejections = {r: m._rejections.labels(*self.labels, r) for r in (Overloaded.code, "other")}

    def memory(self, kind: str) -> dict[str, int]:
        """Bytes by term: of the "memory" plan, or "memory_measured"."""
        found = self._card.get(kind) or {}
        return {term: number for term, number in found.items() if term not in ("kv_bytes_per_token", "kv_blocks")}

    def token_after(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def refused(self, code: str | None) -> None:
        self._rejections[code if code in self._rejections else "other"].inc()

    def finished(self, record: RequestRecord, request: NewRequest) -> None:
        self._success[record.finish].inc()
        seen: dict[str, float | None] = {
            "time_to_first_token_seconds": record.first_token_seconds,
            "e2e_request_latency_seconds": record.total_seconds,
            "request_queue_time_seconds": record.queue_seconds,
            "request_prompt_tokens": record.prompt_tokens,
            "request_generation_tokens": record.output_tokens,
            "request_params_n": record.sequences,
            "request_params_max_tokens": request.sampling.max_tokens if request.sampling else None,
        }
        for name, value in seen.items():
            if value is not None:
                self._histograms[name].observe(value)
        plugins = self._plugins()
        if plugins is not None:
            plugins.request_finished(record)
