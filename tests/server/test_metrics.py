"""The metrics page is a contract: names, types and labels in metrics.txt, nothing more and nothing less."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.harness import Live, serve_here

from anycore.config import ModelConfig
from anycore.server.metrics import MEMORY

CONTRACT = Path(__file__).parent / "metrics.txt"


@pytest.fixture(scope="module")
def live(t_lm: Path, t_qemb: Path) -> Iterator[Live]:
    lm = ModelConfig(model=str(t_lm), served_model_name=("lm", "alias"), kv_cache_memory=4 << 20)
    embedder = ModelConfig(model=str(t_qemb), served_model_name=("emb",), task="embed", kv_cache_memory=4 << 20)
    with serve_here(lm, embedder) as live:
        yield live


def families(text: str) -> list[str]:
    """Write each family as `type name{labels}`."""
    lines = []
    for family in text_string_to_metric_families(text):
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le"})
        lines.append(f"{family.type} {family.name}{{{','.join(labels)}}}")
    return sorted(lines)


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
    contract = [line for line in CONTRACT.read_text().splitlines() if line and not line.startswith("#")]
    start = live.get("/metrics")
    assert start.headers["content-type"].startswith("text/plain; version=")
    assert families(start.text) == sorted(contract)
    counted = {k: v for k, v in values(start.text).items() if "config_info" not in k and "memory" not in k}
    assert counted
    assert all(v == 0 for v in counted.values())

    for i in range(10):
        live.post("/v1/completions", {"model": "alias", "prompt": f"number {i}", "max_tokens": 3})
        live.post("/v1/embeddings", {"model": "emb", "input": f"number {i}"})
    live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": -1})
    live.post("/v1/completions", {"model": "nobody-by-this-name", "prompt": "x"})
    live.post("/v1/completions", {"model": "lm", "prompt": "x", "max_tokens": 1, "max_token": 2})
    after = live.get("/metrics").text
    assert families(after) == families(start.text)
    assert "nobody-by-this-name" not in after
    assert "alias" not in after
    before = values(start.text)
    assert all(v >= before[k] for k, v in values(after).items() if "_total[" in k or "_bucket[" in k)

    assert value(after, "anycore:request_success_total", "lm", finished_reason="length") == 11
    assert value(after, "anycore:request_success_total", "emb", finished_reason="stop") == 10
    assert value(after, "anycore:generation_tokens_total", "lm") == 31
    assert value(after, "anycore:e2e_request_latency_seconds_count", "emb") == 10
    assert value(after, "anycore:time_to_first_token_seconds_count", "lm") == 11
    assert value(after, "anycore:inter_token_latency_seconds_count", "lm") == 20
    assert value(after, "anycore:request_queue_time_seconds_count", "lm") == 11
    assert value(after, "anycore:request_params_max_tokens_sum", "lm") == 31
    assert value(after, "anycore:num_requests_running", "lm") == 0
    assert values(after)["anycore:unknown_request_fields_total[]"] == 1


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
