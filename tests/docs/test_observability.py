"""The dashboard and the alerts: they ask for what exists, Prometheus reads them, and they fire when they should."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from docs.pages import ROOT
from server.fake_child import scripted
from server.harness import patience, serve_here

from anycore.config import ModelConfig
from anycore.server.series import samples

FOLDER = ROOT / "docs" / "deploy" / "observability"
NAMES = re.compile(r"(?<![\w:$])((?:anycore:|http_)[a-z0-9_:]+)")
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool: see ci/promtool")


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[tuple[str, str]]:
    """Yield what is asked for, and where."""
    for rule in rules():
        yield rule.get("alert") or rule["record"], rule["expr"]
    for panel in panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def test_every_expression_asks_for_series_that_exist_by_labels_that_they_have() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    table = samples()
    asked = set()
    for place, expression in expressions():
        for found in NAMES.finditer(expression):
            name = found[1]
            asked.add(name)
            if name in recorded:
                continue
            assert name in table, f"{place} asks for {name}"
            matchers = re.match(r"\{([^}]*)\}", expression[found.end() :])
            labels = set(re.findall(r"(\w+)\s*[=!]", matchers[1])) if matchers else set()
            assert labels <= {*table[name].labels, "le", "job", "instance"}, f"{place}: {expression}"
    assert len(asked) > 25


def test_thresholds_are_buckets() -> None:
    table = samples()
    for name, bound in re.findall(r'([a-z:_]+)_bucket\{le="([\d.]+)"\}', (FOLDER / "rules.yml").read_text()):
        assert float(bound) in table[f"{name}_bucket"].buckets


def test_every_alert_says_what_is_wrong_and_how_bad() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 8
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["annotations"].keys() == {"summary", "description"}
    page = (ROOT / "docs" / "observability.md").read_text()
    assert all(f"`{alert['alert']}`" in page for alert in alerts)


def test_the_dashboard_has_the_structure_that_grafana_reads() -> None:
    board = dashboard()
    assert board["schemaVersion"] >= 36
    assert board["title"] == board["uid"] == "anycore"
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["model"]["includeAll"]
    assert NAMES.findall(variables["model"]["query"]["query"])[0] in samples()
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        grid = panel["gridPos"]
        cells = {
            (x, y) for x in range(grid["x"], grid["x"] + grid["w"]) for y in range(grid["y"], grid["y"] + grid["h"])
        }
        assert not cells & taken, f"{panel['title']} lies over another panel"
        assert max(x for x, _ in cells) < 24
        taken |= cells
    for panel in panels():
        assert panel["type"] in ("timeseries", "stat")
        assert panel["description"]
        assert panel["datasource"] == DATASOURCE
        assert panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) >= 1
        for target in panel["targets"]:
            assert target["datasource"] == DATASOURCE
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            kept = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert not kept or legend <= set(re.split(r",\s*", kept[0])), panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= {"model", "__rate_interval", "__range"}


def lost(ours: Any, theirs: Any, place: str = "") -> Iterator[str]:
    """Yield what one document says and another, which may have more fields, does not."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            yield from lost(value, theirs.get(key), f"{place}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from lost(mine, other, f"{place}[{i}]")
    elif ours != theirs:
        yield f"{place}: {ours!r} becomes {theirs!r}"


def test_the_types_that_grafana_publishes_read_all_of_the_dashboard() -> None:
    """They are generated from its schema of dashboards: what they do not know, Grafana would not either."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="Python 3.11 and newer only")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins

    register_default_plugins()

    def read(document: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(json.dumps(models.Dashboard.from_json(document), cls=JSONEncoder))
        return found

    board = dashboard()
    assert not list(lost(board, read(board)))
    board["panels"][1]["gridpos"] = board["panels"][1].pop("gridPos")
    assert list(lost(board, read(board)))


def promtool(*words: str | Path, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, words)], cwd=folder, capture_output=True, text=True, timeout=120)


@needs_promtool
def test_promtool_accepts_the_rules_and_they_fire_when_they_should() -> None:
    for words in (("check", "config", "prometheus.yml"), ("test", "rules", "rules_test.yml")):
        done = promtool(*words)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_rule_that_does_not_fire_is_found(tmp_path: Path) -> None:
    shutil.copytree(FOLDER, tmp_path / "copy")
    text = (FOLDER / "rules.yml").read_text()
    for wrong in (
        ("[5m]) > 0.8", "[5m]) > 0.95"),
        ("> 14.4 * 0.01 and", "> 144 * 0.01 and"),
        ("[15m]) > 0", "[15m]) > 1"),
    ):
        assert text.count(wrong[0]) == 1
        (tmp_path / "copy" / "rules.yml").write_text(text.replace(*wrong))
        assert promtool("test", "rules", "rules_test.yml", folder=tmp_path / "copy").returncode != 0


@needs_promtool
def test_promtool_can_read_every_query_of_the_dashboard(tmp_path: Path) -> None:
    plain = {"$__rate_interval": "5m", "$__range": "1h", "$model": ".*"}
    queries = [target["expr"] for panel in panels() for target in panel["targets"]]
    for word, value in plain.items():
        queries = [query.replace(word, value) for query in queries]
    written = [{"record": f"query:{i}", "expr": query} for i, query in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": written}]}))
    done = promtool("check", "rules", tmp_path / "queries.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(not shutil.which("prometheus"), reason="no Prometheus: see ci/promtool")
def test_a_real_prometheus_scrapes_a_server_and_evaluates_the_rules(t_lm: Path, tmp_path: Path) -> None:
    with serve_here(ModelConfig(model=str(t_lm), served_model_name=("lm",)), launch=scripted(str(t_lm))) as live:
        assert live.post("/v1/completions", {"model": "lm", "prompt": "a", "max_tokens": 3}).status_code == 200
        shutil.copy(FOLDER / "rules.yml", tmp_path)
        text = (FOLDER / "prometheus.yml").read_text()
        text = text.replace("localhost:8000", live.url.removeprefix("http://")).replace("15s", "1s")
        (tmp_path / "prometheus.yml").write_text(text)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["prometheus", f"--config.file={tmp_path / 'prometheus.yml'}", f"--storage.tsdb.path={tmp_path}"]
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log, stdout=log)
        try:
            api = f"http://127.0.0.1:{port}/api/v1"
            found = until(lambda: ask(f"{api}/query?query=anycore:generation_tokens_total")["result"])
            assert found[0]["value"][1] == "3"
            assert found[0]["metric"]["model_name"] == "lm"

            def evaluated() -> list[dict[str, Any]]:
                groups = ask(f"{api}/rules")["groups"]
                listed = [rule for group in groups for rule in group["rules"]]
                return listed if listed and all(rule["health"] != "unknown" for rule in listed) else []

            health = {rule["name"]: rule["health"] for rule in until(evaluated)}
            assert set(health.values()) == {"ok"}, health
            assert len(health) == len(rules())
        finally:
            process.kill()
            process.wait()


def ask(url: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = httpx.get(url, timeout=10, verify=False).json()["data"]
    except (httpx.TransportError, ValueError, KeyError):
        return {"result": [], "groups": []}  # it is still starting
    return data


def until(look: Any, seconds: float = 30) -> Any:
    end = time.monotonic() + seconds * patience()
    while time.monotonic() < end:
        if found := look():
            return found
        time.sleep(0.1)
    raise AssertionError("it did not come")
