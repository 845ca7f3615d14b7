"""Counts for /metrics: what `series.TABLE` lists, in a registry of its own.

What an engine counts is read from its last report when the page is asked for; what a front sees is counted as it
happens. Every series of a model exists, at 0, from the moment the model is ready.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import prometheus_client
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector

from anycore.engine.request import FinishReason, NewRequest, RequestRecord
from anycore.engine.stats import Distribution, Stats
from anycore.errors import Overloaded
from anycore.server.aliases import Renamed
from anycore.server.series import MODEL, PREFIX, TABLE, Series

if TYPE_CHECKING:
    from anycore.plugins import Plugins

CONTENT_TYPE = CONTENT_TYPE_LATEST
KINDS = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
MEMORY = ("memory", "memory_measured")  # parts of a model's card
RESTARTS = ("engine_dead", "step_stalled")  # why an engine is started again, as far as is known beforehand
Values = Iterable[tuple[Sequence[str], float]]

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All series of one server.

    Args:
        names: as `--metrics-names`.
    """

    def __init__(self, names: str = "anycore") -> None:
        self.registry = CollectorRegistry()
        self.phases: Callable[[], Iterable[tuple[str, int, dict[str, bool]]]] = tuple
        """Gives each model's name, the number of each of its engines, and that one's phases, of which one is true."""
        self._names = names
        self._models: list[ModelMetrics] = []
        self._counted = {series.name: self._make(series) for series in TABLE.values() if not is_collected(series)}
        self.registry.register(self)
        self.unknown_fields: Counter = self._counted[PREFIX + "unknown_request_fields"]

    def _make(self, series: Series) -> Any:
        """Make what counts a series in this process."""
        if series.kind == "counter":
            return Counter(series.name, series.text, series.labels, registry=self.registry)
        if series.kind == "histogram":
            return Histogram(series.name, series.text, series.labels, buckets=series.buckets, registry=self.registry)
        return Gauge(series.name, series.text, series.labels, registry=self.registry, multiprocess_mode="max")

    def counted(self, name: str) -> Any:
        """What counts a series of ours."""
        return self._counted[PREFIX + name]

    def observer(
        self, name: str, plugins: Callable[[], Plugins | None] = lambda: None, engine: int = 0
    ) -> ModelMetrics:
        """Return what an EngineClient tells about itself and its requests; `engine` is the number of its replica."""
        model = ModelMetrics(self, name, plugins, engine)
        self._models.append(model)
        return model

    def refused(self, code: str, key: str = "") -> None:
        """Count a request that was answered by an error; `key` is the name of its key, never the key."""
        self.counted("request_errors").labels(code, key).inc()

    def scored(self, name: str, pairs: int) -> None:
        """Count pairs of query and document that a model has scored."""
        labels = next(model.labels for model in self._shown if model.name == name)
        self.counted("rerank_pairs").labels(*labels).inc(pairs)

    def http(self, handler: str, method: str, status: int, seconds: float) -> None:
        """Count an HTTP request; `handler` is the route as it is declared."""
        self._counted["http_requests"].labels(handler, method, f"{status // 100}xx").inc()
        self._counted["http_request_duration_seconds"].labels(handler, method).observe(seconds)

    def render(self) -> bytes:
        """Return all series in Prometheus' text format; of several fronts, their sums."""
        registry = self.registry
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            registry.register(self)
        return generate_latest(Renamed(registry, self._names))

    def collect(self) -> Iterator[Metric]:
        """Yield what the engines say of themselves. Called by the registry."""
        for series in filter(is_collected, TABLE.values()):
            if series.kind == "histogram":
                yield self._histogram(series)
                continue
            family = KINDS[series.kind](series.name, series.text, labels=series.labels)
            for labels, value in self._values(series):
                family.add_metric(labels, value)
            yield family

    @property
    def _shown(self) -> list[ModelMetrics]:
        return [model for model in self._models if model.labels]

    def _values(self, series: Series) -> Values:
        if series.stats is not None:
            return [(model.labels, series.stats(model.stats())) for model in self._shown]  # type: ignore[misc]
        return COLLECTED[series.name.removeprefix(PREFIX)](self)

    def _histogram(self, series: Series) -> Metric:
        family = HistogramMetricFamily(series.name, series.text, labels=series.labels)
        bounds = [*map(str, series.buckets), "+Inf"]
        for model in self._shown:
            found = series.stats(model.stats()) if series.stats else None
            assert isinstance(found, Distribution)
            sums = [sum(found.counts[: i + 1]) for i in range(len(bounds))]
            family.add_metric(model.labels, list(zip(bounds, sums, strict=True)), found.total)
        return family


def _waiting(metrics: Metrics) -> Values:
    for model in metrics._shown:
        stats = model.stats()
        yield (*model.labels, "capacity"), stats.waiting - stats.deferred
        yield (*model.labels, "deferred"), stats.deferred


def _sources(metrics: Metrics) -> Values:
    for model in metrics._shown:
        stats = model.stats()
        yield (*model.labels, "local_compute"), stats.prompt_tokens - stats.cached_tokens
        yield (*model.labels, "local_cache_hit"), stats.cached_tokens


def _cached(metrics: Metrics) -> Values:
    return [((*model.labels, "device"), model.stats().cached_tokens) for model in metrics._shown]


def _fallbacks(metrics: Metrics) -> Values:
    for model in metrics._shown:
        for op, number in model.stats().op_fallbacks.items():
            yield (*model.labels, op), number


def _cache_config(metrics: Metrics) -> Values:
    return [((*model.labels, *model.cache()), 1) for model in metrics._shown]


def _phases(metrics: Metrics) -> Values:
    for name, engine, phases in metrics.phases():
        for phase, holds in phases.items():
            yield (name, str(engine), phase), holds


def _memory(kind: str) -> Callable[[Metrics], Values]:
    def values(metrics: Metrics) -> Values:
        for model in metrics._shown:
            for term, number in model.memory(kind).items():
                yield (*model.labels, term), number

    return values


COLLECTED: dict[str, Callable[[Metrics], Values]] = {
    "num_requests_waiting_by_reason": _waiting,
    "prompt_tokens_by_source": _sources,
    "prompt_tokens_cached_by_source": _cached,
    "op_fallback": _fallbacks,
    "cache_config_info": _cache_config,
    "engine_phase": _phases,
    **{f"{kind}_bytes": _memory(kind) for kind in MEMORY},
}
"""Series that are read when the page is asked for, and are more than one number of Stats."""


def is_collected(series: Series) -> bool:
    """Whether a series is read when the page is asked for, rather than counted as things happen."""
    return series.stats is not None or series.name.removeprefix(PREFIX) in COLLECTED


class ModelMetrics:
    """The series of one model; told by its EngineClient. Also hands finished requests to the plugins."""

    def __init__(self, metrics: Metrics, name: str, plugins: Callable[[], Plugins | None], engine: int) -> None:
        self._metrics = metrics
        self.name = name
        self._engine = str(engine)
        self._plugins = plugins
        self.labels: tuple[str, ...] = ()
        self._counts: Callable[[], Stats] = Stats  # of the engine in use
        self._former: Callable[[], Stats] = Stats  # of the one before it, which may be finishing what it has
        self._past = Stats()  # of all before these
        self._card: dict[str, Any] = {}

    def begin(self, card: dict[str, Any], stats: Callable[[], Stats]) -> None:
        """Create every series at 0, now that the engine is ready and the labels are known.

        Called again for each engine that takes the place of another.
        """
        m = self._metrics
        self._past = self._former().after(self._past)
        self._former, self._counts = self._counts, stats
        self._card = card
        self.labels = (self.name, self._engine, card["tasks"][0], card["backend"])
        self._histograms = {
            name.removeprefix(PREFIX): counted.labels(*self.labels)
            for name, counted in m._counted.items()
            if TABLE[name].kind == "histogram" and TABLE[name].labels == MODEL
        }
        self._inter_token = self._histograms["inter_token_latency_seconds"]
        self._success = {r.value: m.counted("request_success").labels(*self.labels, r.value) for r in FinishReason}
        rejections = m.counted("admission_rejections")
        self._rejections = {r: rejections.labels(*self.labels, r) for r in (Overloaded.code, "other")}
        m.counted("rerank_pairs").labels(*self.labels)
        for reason in RESTARTS:
            m.counted("engine_restarts").labels(self.name, self._engine, reason)

    def stats(self) -> Stats:
        """What the engine in use reports; its counters begin where those of the engines before it ended."""
        return self._counts().after(self._former()).after(self._past)

    def cache(self) -> tuple[str, ...]:
        """Values of what cache_config_info adds to the labels of a model."""
        return tuple(map(str, _cache(self._card)))

    def memory(self, kind: str) -> dict[str, int]:
        """Bytes by term: of the "memory" plan, or "memory_measured"."""
        found = self._card.get(kind) or {}
        return {term: number for term, number in found.items() if term not in ("kv_bytes_per_token", "kv_blocks")}

    def token_after(self, seconds: float) -> None:
        self._inter_token.observe(seconds)

    def refused(self, code: str | None) -> None:
        self._rejections[code if code in self._rejections else "other"].inc()

    def engine_restarted(self, reason: str) -> None:
        """Count an engine that ended, for a reason out of a few, and is started again."""
        self._metrics.counted("engine_restarts").labels(self.name, self._engine, reason).inc()

    def finished(self, record: RequestRecord, request: NewRequest) -> None:
        self._success[record.finish].inc()
        for name, value in _seen(record, request).items():
            if value is not None:
                self._histograms[name].observe(value)
        plugins = self._plugins()
        if plugins is not None:
            plugins.request_finished(record)


def _cache(card: dict[str, Any]) -> Iterator[Any]:
    block, blocks, longest = card.get("block_size"), card.get("num_blocks"), card.get("max_model_len")
    tokens = block * blocks if block and blocks else None
    yield from (block, blocks, card.get("kv_cache_dtype") or card.get("dtype"), card.get("prefix_caching"))
    yield tokens
    yield round(tokens / longest, 2) if tokens and longest else None


def _seen(record: RequestRecord, request: NewRequest) -> dict[str, float | None]:
    """What a finished request adds to each histogram; None for nothing."""
    first, last, queue = record.first_token_seconds, record.last_token_seconds, record.queue_seconds
    seen: dict[str, float | None] = {
        "time_to_first_token_seconds": first,
        "e2e_request_latency_seconds": record.total_seconds,
        "request_queue_time_seconds": queue,
        "request_prompt_tokens": record.prompt_tokens,
        "request_prefill_kv_computed_tokens": record.prompt_tokens - record.cached_tokens,
        "request_generation_tokens": record.output_tokens,
        "request_max_num_generation_tokens": record.longest_output,
        "request_params_n": record.sequences,
        "request_params_max_tokens": request.sampling.max_tokens if request.sampling else None,
        "request_num_preemptions": record.preemptions,
    }
    if first is not None and last is not None:
        seen["request_prefill_time_seconds"] = max(0.0, first - queue)
        seen["request_decode_time_seconds"] = last - first
        seen["request_inference_time_seconds"] = max(0.0, last - queue)
        if record.longest_output > 1:
            seen["request_time_per_output_token_seconds"] = (last - first) / (record.longest_output - 1)
    return seen
