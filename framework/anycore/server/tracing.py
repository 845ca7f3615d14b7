"""OpenTelemetry: one span a request, with the `gen_ai.*` attributes, and under it the queue, prefill and decode of what
it generated. Without `--otlp-traces-endpoint` nothing here is imported.

A span is made when its request has ended, with the times that were noted on the way: running requests pay nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from anycore import __version__
from anycore.contract.declare import Task
from anycore.errors import ConfigError
from anycore.server.visits import Ended, Visit

try:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ConfigError(
        f"--otlp-traces-endpoint needs a package that is missing: pip install 'anycore[otel]' ({error})",
        param="otlp_traces_endpoint",
    ) from error

OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/embed": "embeddings",
    "/v2/embed": "embeddings",
    "/embed": "embeddings",
    "/classify": "classify",
    "/v1/classify": "classify",
    "/predict": "classify",
    "/similarity": "embeddings",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "score",
    "/v1/score": "score",
}
"""What the conventions call a route; other routes are traced under the engine's task if they reach one."""

PROPAGATED = ("traceparent", "tracestate")


class Tracer:
    """Makes the spans of one server and hands them to an exporter in the background."""

    def __init__(self, processor: SpanProcessor) -> None:
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES beat what stands here.
        resource = Resource.create().merge(Resource({}))
        if resource.attributes.get("service.name", "").startswith("unknown_service"):  # type: ignore[union-attr]
            resource = resource.merge(Resource({"service.name": "anycore"}))
        self._provider = TracerProvider(resource=resource.merge(Resource({"service.version": __version__})))
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("anycore", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def trace(self, visit: Visit, headers: Mapping[bytes, bytes]) -> None:
        """Make the spans of a request that has ended, as part of the caller's trace if its headers name one."""
        operation = OPERATIONS.get(visit.route) or (visit.ended[0].record.task.value if visit.ended else "")
        if not operation:
            return
        carrier = {name: headers[name.encode()].decode("latin-1") for name in PROPAGATED if name.encode() in headers}
        span = self._tracer.start_span(
            f"{operation} {visit.model}".rstrip(),
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=visit.began,
            attributes=attributes_of(visit, operation),
        )
        if span.is_recording():
            for ended in visit.ended:
                if ended.record.task is Task.GENERATE:
                    self._stages(span, ended)
            if visit.status >= 500:
                span.set_status(Status(StatusCode.ERROR, visit.error))
        span.end(visit.began + int(visit.seconds * 1e9))

    def _stages(self, parent: Span, ended: Ended) -> None:
        """Make the spans of what a request of the engine went through."""
        record, context = ended.record, set_span_in_context(parent)
        began = ended.at - int(record.total_seconds * 1e9)
        first, last = record.first_token_seconds, record.last_token_seconds
        moments = [0.0, record.queue_seconds, first, last]
        for name, start, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if start is not None and end is not None and record.queue_seconds <= (first or 0):
                span = self._tracer.start_span(name, context, start_time=began + int(start * 1e9))
                span.end(began + int(end * 1e9))

    def close(self) -> None:
        """Hand on what is left."""
        self._provider.shutdown()


def tracer_of(endpoint: str | None) -> Tracer | None:
    """Return what traces to an address of OTLP over HTTP; nothing without one.

    Raises:
        ConfigError: it is no such address, or the packages are missing.
    """
    return None if endpoint is None else Tracer(BatchSpanProcessor(exporter_of(endpoint)))


def exporter_of(endpoint: str) -> SpanExporter:
    """Return what sends traces to an address. Raises as `tracer_of`."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if urlsplit(endpoint).scheme not in ("http", "https"):
        raise ConfigError(
            f"--otlp-traces-endpoint must be a URL of OTLP over HTTP, such as http://collector:4318/v1/traces, "
            f"not {endpoint!r}",
            param="otlp_traces_endpoint",
        )
    return OTLPSpanExporter(endpoint=endpoint)


def attributes_of(visit: Visit, operation: str) -> dict[str, Any]:
    """Say what is known of a request, in the words of the conventions; `gen_ai.latency.*` are vLLM's."""
    found: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "anycore",
        "http.request.method": visit.method,
        "http.route": visit.route,
        "http.response.status_code": visit.status,
        "anycore.request_id": visit.id,
    }
    if visit.error:
        found["error.type"] = visit.error
    if not visit.ended:
        return found
    records = [ended.record for ended in visit.ended]
    found |= {
        "gen_ai.request.model": visit.model,
        "gen_ai.response.model": visit.model,
        "gen_ai.usage.input_tokens": visit.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": visit.cached_tokens,
        "gen_ai.usage.output_tokens": visit.output_tokens,
        "gen_ai.response.finish_reasons": sorted({record.finish for record in records}),
        "gen_ai.latency.e2e": visit.seconds,
        "gen_ai.latency.time_in_queue": max(record.queue_seconds for record in records),
    }
    record, sampling = records[0], visit.ended[0].request.sampling
    if record.first_token_seconds is not None and record.last_token_seconds is not None:
        found |= {
            "gen_ai.latency.time_to_first_token": record.first_token_seconds,
            "gen_ai.latency.time_in_model_prefill": max(0.0, record.first_token_seconds - record.queue_seconds),
            "gen_ai.latency.time_in_model_decode": record.last_token_seconds - record.first_token_seconds,
            "gen_ai.latency.time_in_model_inference": max(0.0, record.last_token_seconds - record.queue_seconds),
        }
    if sampling is not None:
        asked = {
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or None,
            "frequency_penalty": sampling.frequency_penalty or None,
            "presence_penalty": sampling.presence_penalty or None,
            "seed": sampling.seed,
            "choice.count": sampling.n if sampling.n > 1 else None,
        }
        found |= {f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None}
    return found
