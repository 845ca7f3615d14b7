"""The Helm chart: Kubernetes takes what it renders, and what it starts, probes and scales by is the server's."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs.deploying import CHART, FOLDER, VALUES, entry_point, helm, last, leaves, needs_helm, render, variables
from docs.pages import ROOT

from anycore.cli.main import parser_of
from anycore.cli.settings import read_file
from anycore.server.auth import OPEN_ROUTES
from anycore.server.series import samples

SERIES = {name.replace(":", "_"): name for name in samples()}
ALL: dict[str, Any] = {
    "replicas": 2,
    "keys": {"existingSecret": "keys"},
    "tls": {"existingSecret": "certificate"},
    "cache": {"persistent": True, "storageClassName": "shared", "accessModes": ["ReadWriteMany"]},
    "models": {"existingClaim": "models"},
    "autoscaling": {"enabled": True},
    "disruptionBudget": {"enabled": True},
    "podMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "keySecret": {"name": "key", "key": "metrics"},
    },
    "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
    "dashboard": {"enabled": True},
    "extraArgs": ["--log-format=json"],
    "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
    "volumes": [{"name": "more", "emptyDir": {}}],
    "volumeMounts": [{"name": "more", "mountPath": "/more"}],
    "podLabels": {"team": "a"},
    "podAnnotations": {"note": "b"},
    "supplementalGroups": [1000],
    "runtimeClassName": "nvidia",
    "nodeSelector": {"zone": "a"},
    "tolerations": [{"operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "topologySpreadConstraints": [
        {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {}}
    ],
    "imagePullSecrets": [{"name": "registry"}],
    "image": {"digest": "sha256:" + "0" * 64},
}
"""Values that switch everything on."""


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("values") / "all.yaml"
    path.write_text(yaml.safe_dump(ALL))
    return path


def test_every_value_is_used_and_described() -> None:
    text = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", text))
    declared = set(leaves(VALUES))
    assert not {name for name in declared if not {name, name.rsplit(".", 1)[0]} & used}
    assert not {name for name in used if name not in declared and not any(d.startswith(f"{name}.") for d in declared)}
    assert {*VALUES, "global"} == json.loads((CHART / "values.schema.json").read_text())["properties"].keys()
    assert ALL.keys() <= VALUES.keys()


@pytest.mark.parametrize("path", ["anycore/values.yaml", "cuda.yaml", "ascend.yaml"])
def test_settings_in_values_are_settings(path: str, tmp_path: Path) -> None:
    values = yaml.safe_load((FOLDER / "helm" / path).read_text())
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(values["config"]))
    read_file(tmp_path / "config.yaml")
    assert values.keys() <= VALUES.keys()


def test_flags_of_the_chart_exist() -> None:
    flags = set(re.findall(r"- (--[a-z-]+)", (CHART / "templates" / "deployment.yaml").read_text()))
    assert flags >= {"--config", "--api-key-file", "--ssl-certfile", "--shutdown-timeout"}
    assert flags <= parser_of("serve")._option_string_actions.keys()


def test_autoscaling_is_by_series_that_exist_and_that_the_adapter_knows() -> None:
    asked = re.findall(r"metric: \{name: (\w+)\}", (CHART / "templates" / "autoscaler.yaml").read_text())
    assert {SERIES[name] for name in asked} == {"anycore:num_requests_waiting", "anycore:num_requests_running"}
    rules = yaml.safe_load((FOLDER / "helm" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    assert [rule["name"]["as"] for rule in rules] == asked
    for rule in rules:
        assert rule["seriesQuery"].split("{")[0] == SERIES[rule["name"]["as"]]


def test_rules_and_dashboard_are_those_of_the_observability_page() -> None:
    for name in ("rules.yml", "dashboard.json"):
        path = CHART / "files" / name
        assert path.is_symlink()
        assert path.resolve() == FOLDER / "observability" / name


@needs_helm
@pytest.mark.parametrize("values", ["none", "all", "cuda", "ascend"])
def test_helm_lints_it_and_kubernetes_would_take_it(values: str, full: Path) -> None:
    files = {"none": CHART / "values.yaml", "all": full}
    words = ("-f", files.get(values, FOLDER / "helm" / f"{values}.yaml"))
    done = helm("lint", "--strict", CHART, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    objects = render(*words)
    assert len(objects) == (8 if values == "all" else 4 if values in ("cuda", "ascend") else 3)
    kubernetes = pytest.importorskip("kubernetes_validate", reason="no kubernetes-validate: see ci/deploy_tools")
    for version in ("1.25", kubernetes.latest_version()):
        for kind, found in objects.items():
            if not found["apiVersion"].startswith("monitoring.coreos.com"):  # the operator's own kinds
                kubernetes.validate(found, version, strict=True)
            assert kind == found["kind"]
    wrong = {**objects["Service"], "spec": {"port": 1}}
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, "1.25", strict=True)


@needs_helm
def test_pods_start_and_are_probed_as_the_server_is(full: Path) -> None:
    for values, scheme in ((CHART / "values.yaml", "HTTP"), (full, "HTTPS")):
        pod = render("-f", values)["Deployment"]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        options = parser_of("serve").read([*entry_point("cpu")[2:], *container["args"]])
        assert [port["containerPort"] for port in container["ports"]] == [options.port]
        assert hasattr(options, "ssl_certfile") == (scheme == "HTTPS")
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert set(mounts.values()) == {volume["name"] for volume in pod["volumes"]}
        files = [options.config, *(vars(options).get(name) for name in ("api_key_file", "ssl_certfile", "ssl_keyfile"))]
        assert {str(Path(file).parent) for file in files if file} <= mounts.keys()
        assert {"/cache", variables("cpu")["XDG_RUNTIME_DIR"]} <= mounts.keys()  # the root file system is read-only
        paths = {}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert (asked["port"], asked["scheme"]) == (container["ports"][0]["name"], scheme)
            paths[probe] = asked["path"]
        assert paths == {"startupProbe": "/ready", "livenessProbe": "/health", "readinessProbe": "/ready"}
        assert set(paths.values()) <= OPEN_ROUTES
        waits = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > waits + options.shutdown_timeout
        user = int(last("cpu", "USER").split(":")[0])
        context = pod["securityContext"]
        assert context["runAsUser"] == context["fsGroup"] == user


@needs_helm
def test_switched_on_values_are_rendered(full: Path) -> None:
    objects = render("-f", full)
    assert "replicas" not in objects["Deployment"]["spec"]  # the autoscaler's
    assert objects["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["key"] == "metrics"
    rules = yaml.safe_load((FOLDER / "observability" / "rules.yml").read_text())
    assert objects["PrometheusRule"]["spec"] == rules
    assert objects["PodMonitor"]["spec"]["jobLabel"] == "app.kubernetes.io/name"
    labels = objects["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels["app.kubernetes.io/name"] == "anycore"  # which becomes job="anycore", as the rules have it
    (container,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "anycore@" + ALL["image"]["digest"]
    dashboard = helm("template", "chat", CHART, "-f", full, "--show-only", "templates/monitoring.yaml").stdout
    (kept,) = [d["data"]["anycore.json"] for d in yaml.safe_load_all(dashboard) if d["kind"] == "ConfigMap"]
    assert json.loads(kept) == json.loads((FOLDER / "observability" / "dashboard.json").read_text())


@needs_helm
@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("replica=2", "additional properties 'replica' not allowed"),
        ("image.digest=latest", "does not match pattern"),
        ("replicas=2,cache.persistent=true", "cache.accessModes"),
        ("autoscaling.enabled=true,cache.persistent=true", "cache.accessModes"),
    ],
)
def test_wrong_values_are_refused(words: str, said: str) -> None:
    done = helm("template", "chat", CHART, "--set", words)
    assert done.returncode != 0
    assert said in done.stderr


@needs_helm
def test_other_settings_make_other_pods(tmp_path: Path) -> None:
    def annotations(*words: str) -> dict[str, str]:
        found: dict[str, str] = render(*words)["Deployment"]["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations() == annotations("--set", "service.port=80")
    assert annotations() != annotations("--set", "config.seed=1")


@needs_helm
def test_a_package_holds_the_linked_files(tmp_path: Path) -> None:
    assert helm("package", CHART, "--destination", tmp_path).returncode == 0
    shutil.unpack_archive(next(tmp_path.glob("*.tgz")), tmp_path / "out", filter="data")
    packed = tmp_path / "out" / "anycore" / "files" / "rules.yml"
    assert not packed.is_symlink()
    assert packed.read_text() == (ROOT / "docs" / "deploy" / "observability" / "rules.yml").read_text()
