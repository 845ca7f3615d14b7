"""Traces: what a request's spans say, whose trace they belong to, and that nothing is imported without the flag."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from server.fake_child import scripted
from server.harness import Live, serve_here

from anycore.config import ModelConfig, ServerConfig
from anycore.errors import ConfigError
from anycore.server.app import ROUTERS, tracer
from anycore.server.tracing import OPERATIONS, Tracer, tracer_of

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
SECRET = "marker-of-a-prompt"

Exporter = InMemorySpanExporter


@pytest.fixture(scope="module")
def traced(t_lm: Path) -> Iterator[tuple[Live, Exporter]]:
    exporter = InMemorySpanExporter()
    models = (
        ModelConfig(model=str(t_lm), served_model_name=("lm",)),
        ModelConfig(model=str(t_lm), served_model_name=("emb",), task="embed"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anycore.server.app.tracer", lambda config: Tracer(SimpleSpanProcessor(exporter)))
        with serve_here(*models, launch=scripted(str(t_lm))) as live:
            yield live, exporter


def spans(live: Live, exporter: Exporter, count: int) -> dict[str, ReadableSpan]:
    """Wait for the spans of a request: they are made after its last byte was sent."""
    live.wait(lambda: len(exporter.get_finished_spans()) >= count, 10)
    found = {span.name: span for span in exporter.get_finished_spans()}
    exporter.clear()
    return found


@pytest.mark.parametrize("stream", [False, True])
def test_a_generation_has_a_span_and_its_stages(traced: tuple[Live, Exporter], stream: bool) -> None:
    live, exporter = traced
    body = {"model": "lm", "prompt": SECRET, "max_tokens": 4, "temperature": 0.5, "seed": 7, "ignore_eos": True}
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01"}
    assert live.post("/v1/completions", {**body, "stream": stream}, headers=headers).status_code == 200
    found = spans(live, exporter, 4)
    whole = found["text_completion lm"]
    assert whole.context.trace_id == TRACE
    assert whole.parent is not None
    assert whole.parent.span_id == PARENT
    assert whole.kind is SpanKind.SERVER
    said = dict(whole.attributes or {})
    assert said["gen_ai.operation.name"] == "text_completion"
    assert said["gen_ai.provider.name"] == "anycore"
    assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == "lm"
    assert said["gen_ai.request.max_tokens"] == said["gen_ai.usage.output_tokens"] == 4
    assert said["gen_ai.usage.input_tokens"] > 1
    assert said["gen_ai.request.temperature"] == 0.5
    assert said["gen_ai.request.seed"] == 7
    assert said["gen_ai.response.finish_reasons"] == ("length",)
    assert said["http.response.status_code"] == 200
    assert said["anycore.request_id"] == "mine-1"
    parts = ("time_in_queue", "time_in_model_prefill", "time_in_model_decode")
    assert 0 < sum(said[f"gen_ai.latency.{part}"] for part in parts) <= said["gen_ai.latency.e2e"]
    stages = [found[name] for name in ("queue", "prefill", "decode")]
    for stage in stages:
        assert stage.parent is not None
        assert stage.parent.span_id == whole.context.span_id
        assert whole.start_time <= stage.start_time <= stage.end_time  # type: ignore[operator]
    assert stages[0].end_time == stages[1].start_time
    assert stages[1].end_time == stages[2].start_time
    assert SECRET not in "".join(span.to_json() for span in found.values())


def test_many_inputs_are_one_span(traced: tuple[Live, Exporter]) -> None:
    live, exporter = traced
    assert live.post("/v1/embeddings", {"model": "emb", "input": ["a", "b", "c"]}).status_code == 200
    found = spans(live, exporter, 1)
    assert found.keys() == {"embeddings emb"}
    said = dict(found["embeddings emb"].attributes or {})
    assert said["gen_ai.usage.output_tokens"] == 0
    assert said["gen_ai.usage.input_tokens"] == 6  # each with a special token
    assert found["embeddings emb"].parent is None


def test_refused_requests_say_why_and_other_routes_have_no_span(traced: tuple[Live, Exporter]) -> None:
    live, exporter = traced
    assert live.get("/v1/models").status_code == 200
    wrong = live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": -1}, headers={"traceparent": "x"})
    assert wrong.status_code == 400
    (span,) = spans(live, exporter, 1).values()
    said = dict(span.attributes or {})
    assert (said["error.type"], said["http.response.status_code"]) == ("invalid_value", 400)
    assert span.parent is None  # the header was no traceparent
    assert span.status.status_code is StatusCode.UNSET  # the caller's fault, by the conventions for HTTP servers


def test_every_route_that_reaches_an_engine_has_a_name() -> None:
    inferring = {route.path for router in ROUTERS for route in router.routes  # type: ignore[attr-defined]
                 if {"generate", "embed", "rerank", "classify"} & set(route.tags)}  # type: ignore[attr-defined]  # fmt: skip
    assert OPERATIONS.keys() <= inferring


def test_spans_arrive_at_a_receiver_of_otlp(t_lm: Path) -> None:
    arrived: list[ExportTraceServiceRequest] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces"
            arrived.append(ExportTraceServiceRequest.FromString(data))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    receiver = HTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    made = tracer(ServerConfig(otlp_traces_endpoint=f"http://127.0.0.1:{receiver.server_port}/v1/traces"))
    assert made is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anycore.server.app.tracer", lambda config: made)
        with serve_here(ModelConfig(model=str(t_lm), served_model_name=("lm",), kv_cache_memory=4 << 20)) as live:
            assert live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 2}).status_code == 200
    made.close()  # hands on what waits
    receiver.shutdown()
    receiver.server_close()
    resources = [spans for request in arrived for spans in request.resource_spans]
    names = {a.key: a.value.string_value for spans in resources for a in spans.resource.attributes}
    assert names["service.name"] == "anycore"
    sent = {span.name for spans in resources for scope in spans.scope_spans for span in scope.spans}
    assert sent == {"text_completion lm", "queue", "prefill", "decode"}


def test_an_address_that_is_not_http_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTLP over HTTP"):
        tracer_of("grpc://collector:4317")


def test_without_the_flag_nothing_is_imported() -> None:
    code = (
        "import sys; from anycore.config import ServerConfig; from anycore.server.app import create_app; "
        "create_app(ServerConfig(), []); assert 'opentelemetry.sdk' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
