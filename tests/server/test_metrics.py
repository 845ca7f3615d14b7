"""The metrics page is a contract: names, types and labels in metrics.txt, nothing more and nothing less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.harness import Live, serve_here

from anycore.config import ModelConfig
from anycore.engine.stats import STEP_TOKENS, Stats
from anycore.server.metrics import MEMORY, Metrics
from anycore.server.series import TABLE, samples

CONTRACT = Path(__file__).parent / "metrics.txt"


@pytest.fixture(scope="module")
def live(t_lm: Path, t_qemb: Path) -> Iterator[Live]:
    lm = ModelConfig(model=str(t_lm), served_model_name=("lm", "alias"), kv_cache_memory=4 << 20)
    embedder = ModelConfig(model=str(t_qemb), served_model_name=("emb",), task="embed", kv_cache_memory=4 << 20)
    with serve_here(lm, embedder) as live:
        yield live


Families = dict[str, set[str]]  # "type name" -> labels


def families(text: str) -> Families:
    """Read a page. Families without a sample have no labels there."""
    return {
        f"{family.type} {family.name}": {label for sample in family.samples for label in sample.labels} - {"le"}
        for family in text_string_to_metric_families(text)
    }


def contract(file: Path) -> Families:
    """Read a list of families, one a line: type name{labels}."""
    lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
    heads = [line.rstrip("}").split("{") for line in lines]
    return {head: set(filter(None, labels.split(","))) for head, labels in heads}


def values(text: str) -> dict[str, float]:
    """Return every sample by name and labels."""
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {f"{s.name}{sorted(s.labels.items())}": s.value for s in samples}


def value(text: str, name: str, model: str, **labels: str) -> float:
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and {"model_name": model, **labels}.items() <= sample.labels.items()
    ]
    assert len(found) == 1, name
    return found[0]


def test_o14_names_types_and_labels_are_a_contract(live: Live) -> None:
    promised = contract(CONTRACT)
    assert {f"{series.kind} {series.name}": set(series.labels) for series in TABLE.values()} == promised
    start = live.get("/metrics")
    assert start.headers["content-type"].startswith("text/plain; version=")
    assert families(start.text).keys() == promised.keys()
    states = ("config_info", "memory", "engine_phase")
    counted = {k: v for k, v in values(start.text).items() if not any(state in k for state in states)}
    assert counted
    assert all(v == 0 for v in counted.values())

    whole = {"ignore_eos": True}  # a model of random weights may end a text at any token
    for i in range(10):
        live.post("/v1/completions", {"model": "alias", "prompt": f"number {i}", "max_tokens": 3, **whole})
        live.post("/v1/embeddings", {"model": "emb", "input": f"number {i}"})
    live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": -1})
    live.post("/v1/completions", {"model": "nobody-by-this-name", "prompt": "x"})
    live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": 1, "max_token": 2, **whole})
    after = live.get("/metrics").text
    assert families(after).keys() == promised.keys()
    assert all(labels in (set(), promised[name]) for name, labels in families(after).items())
    unseen = {name for name, labels in families(after).items() if labels != promised[name]}
    assert unseen == {"counter anycore:op_fallback"}  # nothing fell back
    assert "nobody-by-this-name" not in after
    assert "alias" not in after
    before = values(start.text)
    assert all(v >= before.get(k, 0) for k, v in values(after).items() if "_total[" in k or "_bucket[" in k)

    prompted = value(after, "anycore:prompt_tokens_total", "lm")
    assert value(after, "anycore:request_success_total", "lm", finished_reason="length") == 11
    assert value(after, "anycore:request_success_total", "emb", finished_reason="stop") == 10
    assert value(after, "anycore:generation_tokens_total", "lm") == 31
    assert value(after, "anycore:e2e_request_latency_seconds_count", "emb") == 10
    assert value(after, "anycore:time_to_first_token_seconds_count", "lm") == 11
    assert value(after, "anycore:inter_token_latency_seconds_count", "lm") == 20
    assert value(after, "anycore:request_queue_time_seconds_count", "lm") == 11
    assert value(after, "anycore:request_params_max_tokens_sum", "lm") == 31
    assert value(after, "anycore:num_requests_running", "lm") == 0
    assert value(after, "anycore:request_prefill_kv_computed_tokens_sum", "lm") == prompted - cached(after)
    assert value(after, "anycore:request_max_num_generation_tokens_sum", "lm") == 31
    for stage in ("queue", "prefill", "decode", "inference"):
        assert value(after, f"anycore:request_{stage}_time_seconds_count", "lm") == 11
    assert value(after, "anycore:request_time_per_output_token_seconds_count", "lm") == 10  # one had a single token
    assert value(after, "anycore:iteration_tokens_total_sum", "lm") == prompted - cached(after) + 20
    assert value(after, "anycore:iteration_sequences_count", "emb") == 10
    assert value(after, "anycore:engine_phase", "lm", phase="ready") == 1
    assert value(after, "anycore:engine_phase", "lm", phase="loading") == 0
    everything = values(after)
    assert everything["anycore:request_errors_total[('code', 'invalid_value'), ('key', '')]"] == 1
    assert everything["anycore:request_errors_total[('code', 'model_not_found'), ('key', '')]"] == 1
    served = [("handler", "/v1/completions"), ("method", "POST")]
    assert everything[f"http_requests_total{[*served, ('status', '2xx')]}"] == 11
    assert everything[f"http_requests_total{[*served, ('status', '4xx')]}"] == 2
    assert everything[f"http_request_duration_seconds_count{served}"] == 13
    assert values(after)["anycore:unknown_request_fields_total[]"] == 1


def cached(text: str) -> float:
    return value(text, "anycore:prompt_tokens_cached_total", "lm")


def test_the_table_is_what_the_page_shows(live: Live) -> None:
    assert live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": 1}).status_code == 200
    shown = {sample.name for family in text_string_to_metric_families(live.get("/metrics").text)
             for sample in family.samples}  # fmt: skip
    rarely = {"anycore:op_fallback_total", "anycore:request_errors_total"}  # nothing may have happened yet
    assert shown | rarely == samples().keys() | rarely


def test_o14_prefix_hits_and_cache_use_are_counted(live: Live) -> None:
    prompt = "the quick brown fox jumps over the lazy dog " * 6
    for _ in range(2):
        assert live.post("/v1/completions", {"model": "lm", "prompt": prompt, "max_tokens": 1}).status_code == 200
    text = live.get("/metrics").text
    assert (
        0
        < value(text, "anycore:prefix_cache_hits_total", "lm")
        < value(text, "anycore:prefix_cache_queries_total", "lm")
    )
    assert 0 <= value(text, "anycore:kv_cache_usage_perc", "lm") <= 1
    assert value(text, "anycore:cache_config_info", "lm", block_size="16", cache_dtype="float32") == 1


def test_o14_rejections_are_counted(t_lm: Path) -> None:
    model = ModelConfig(
        model=str(t_lm), served_model_name=("lm",), max_num_seqs=1, max_queued=1, kv_cache_memory=4 << 20
    )
    with serve_here(model) as live:
        refused = live.post("/v1/completions", {"model": "lm", "prompt": "a", "n": 3, "max_tokens": 1})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
        assert value(live.get("/metrics").text, "anycore:admission_rejections_total", "lm", reason="queue_full") == 1


def test_the_memory_plan_is_served_beside_what_was_found(t_lm: Path) -> None:
    with serve_here(ModelConfig(model=str(t_lm), served_model_name=("lm",), kv_cache_memory=4 << 20)) as live:
        page, card = live.get("/metrics").text, live.get("/v1/models/lm").json()
    for term in ("weights", "kv_cache"):
        planned, measured = (value(page, f"anycore:{kind}_bytes", "lm", term=term) for kind in MEMORY)
        assert planned == card["memory"][term] > 0
        assert measured == card["memory_measured"][term]
        assert abs(measured / planned - 1) < 0.03


def test_pairs_are_counted_however_they_are_scored(t_ce: Path, t_bert: Path) -> None:
    models = [
        ModelConfig(model=str(t_ce), served_model_name=("ce",), task="rerank"),
        ModelConfig(model=str(t_bert), served_model_name=("cosine",), task="rerank"),
    ]
    with serve_here(*models) as live:
        for name in ("ce", "cosine"):
            assert live.post("/rerank", {"model": name, "query": "q", "documents": ["a", "b", "c"]}).status_code == 200
            assert live.post("/score", {"model": name, "text_1": "q", "text_2": ["a", "b"]}).status_code == 200
        page = live.get("/metrics").text
        assert [value(page, "anycore:rerank_pairs_total", name) for name in ("ce", "cosine")] == [5, 5]


VLLM = Path(__file__).parent / "metrics_vllm.txt"


def test_vllm_names_replace_ours_or_stand_beside_them(t_lm: Path) -> None:
    model = ModelConfig(model=str(t_lm), served_model_name=("lm",), kv_cache_memory=4 << 20)
    pages = {}
    for names in ("vllm", "both"):
        with serve_here(model, metrics_names=names) as live:
            live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": 3})
            pages[names] = live.get("/metrics").text
    theirs = contract(VLLM)
    for page in pages.values():
        found = {name: labels for name, labels in families(page).items() if "vllm:" in name}
        assert found.keys() == theirs.keys()
        assert all(labels <= found[name] for name, labels in theirs.items())
        assert value(page, "vllm:generation_tokens_total", "lm", engine="0") == 3
        assert value(page, "vllm:inter_token_latency_seconds_count", "lm") == 2
        assert value(page, "vllm:time_per_output_token_seconds_count", "lm") == 2  # as it was called before
    ours = {series.name for series in TABLE.values() if series.vllm}
    assert not ours & {f.name for f in text_string_to_metric_families(pages["vllm"])}
    assert ours <= {f.name for f in text_string_to_metric_families(pages["both"])}
    assert "anycore:engine_phase" in pages["vllm"]  # vLLM has none


def test_what_vllm_calls_a_full_queue_is_said_in_its_word() -> None:
    metrics = Metrics("vllm")
    metrics.counted("admission_rejections").labels("m", "0", "generate", "cpu", "queue_full").inc()
    assert b'reason="max_num_queued_reqs"' in metrics.render()


def test_o14_counters_go_on_where_those_of_the_engine_before_ended() -> None:
    """After a restart, a reload or a rest; the one before may still finish what it has. The cache is the new one's."""
    metrics = Metrics()
    model = metrics.observer("lm")
    engines = [Stats(running=2, output_tokens=5, op_fallbacks={"a": 1}), Stats(running=1, output_tokens=7), Stats()]
    engines[1].step_tokens.add(3, STEP_TOKENS)
    card: dict[str, Any] = {"tasks": ["generate"], "backend": "cpu", "block_size": 16}
    for number, (stats, tokens) in enumerate(zip(engines, (5, 12, 14), strict=True)):
        model.begin(card | {"num_blocks": number}, lambda stats=stats: stats)  # type: ignore[misc]
        engines[1].output_tokens += 2 if number == 2 else 0
        page = metrics.render().decode()
        assert value(page, "anycore:generation_tokens_total", "lm") == tokens
        assert value(page, "anycore:num_requests_running", "lm") == stats.running
        assert value(page, "anycore:op_fallback_total", "lm", op="a") == 1
        assert value(page, "anycore:cache_config_info", "lm") == 1
        assert value(page, "anycore:cache_config_info", "lm", num_blocks=str(number)) == 1
    assert value(page, "anycore:iteration_tokens_total_sum", "lm") == 3


def test_restarts_are_counted_by_reason() -> None:
    metrics = Metrics()
    model = metrics.observer("m")
    model.engine_restarted("step_stalled")
    page = metrics.render().decode()
    assert 'anycore:engine_restarts_total{engine="0",model_name="m",reason="step_stalled"} 1.0' in page
