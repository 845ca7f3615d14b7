"""What `--ray` refuses and counts, and the manifest for KubeRay: all without Ray."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from anycore.cli import ray_app
from anycore.cli.settings import read_file
from anycore.config import ModelConfig, ServerConfig
from anycore.distributed import run
from anycore.distributed.app import actor
from anycore.distributed.loads import Loads
from anycore.distributed.settings import SEATS, alone, check, placement_of
from anycore.engine.stats import Stats
from anycore.errors import ConfigError

MANIFEST = Path(__file__).parent.parent.parent / "docs" / "deploy" / "kuberay.yaml"


@pytest.mark.parametrize(
    ("server", "model", "said"),
    [
        ({}, {"url": "http://host/v1", "task": "generate"}, "--url does not go with --ray"),
        ({}, {"keep_alive": 3.0}, "use ray_autoscaling"),
        ({}, {"device": 1}, "--ray-resources"),
        ({}, {"devices": (0, 1)}, "--ray-resources"),
        ({"reuse_port": True}, {}, "--reuse-port means nothing with --ray"),
        ({"write_timeout": 3.0}, {}, "Ray Serve writes the answers"),
        ({"ssl_certfile": "a", "ssl_ca_certs": "b"}, {}, "--ssl-ca-certs"),
        ({}, {"ray_resources": "GPU=1"}, "is not JSON"),
        ({}, {"ray_resources": "[1]"}, "must be a JSON object"),
        ({}, {"ray_resources": '{"GPU": "one"}'}, "GPU must be a number, 0 or more, not 'one'"),
        ({}, {"ray_resources": '{"CPU": -1}'}, "CPU must be a number, 0 or more, not -1"),
        ({}, {"ray_autoscaling": "{}"}, "needs max_replicas, a whole number from 1 on, not None"),
        ({}, {"ray_autoscaling": '{"max_replicas": 0}'}, "not 0"),
    ],
)
def test_what_cannot_be_had_on_a_cluster_is_refused(server: dict[str, Any], model: dict[str, Any], said: str) -> None:
    config = ServerConfig(ray="auto", **server)
    entry = ModelConfig(model="m", **model)
    with pytest.raises(ConfigError, match=said.replace("{", "[{]")):
        check(config, [entry])


@pytest.mark.parametrize("name", ["ray_resources", "ray_autoscaling"])
def test_settings_of_a_cluster_need_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} needs --ray"):
        check(ServerConfig(), [ModelConfig(model="m", **{name: "{}"})])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **options: Any) -> Any:
        if name.split(".")[0] == "ray":
            raise ImportError("No module named 'ray'")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'anycore\[ray\]'"):
        run.serve(ServerConfig(ray="auto"), [ModelConfig(model="m")])


def test_placement_has_defaults_of_the_model() -> None:
    plain = placement_of(ModelConfig(model="m"))
    assert (plain.replicas, plain.most, plain.resources, plain.seats) == (1, 1, {"CPU": 1}, SEATS)
    scaling = json.dumps({"max_replicas": 5, "upscale_delay_s": 2})
    model = ModelConfig(model="m", replicas=2, max_num_seqs=7, ray_autoscaling=scaling, ray_resources='{"GPU": 1}')
    placed = placement_of(model)
    assert placed.most == 5
    assert placed.autoscaling == {
        "min_replicas": 2,
        "target_ongoing_requests": 7,
        "max_replicas": 5,
        "upscale_delay_s": 2,
    }
    assert actor(placed) == {"ray_actor_options": {"num_cpus": 0, "num_gpus": 1, "resources": {}}}
    assert alone(model) == ModelConfig(model="m", max_num_seqs=7)


def test_each_rank_has_a_bundle() -> None:
    model = ModelConfig(model="m", tensor_parallel_size=3, ray_resources='{"NPU": 1, "CPU": 2}')
    assert actor(placement_of(model)) == {
        "ray_actor_options": {"num_cpus": 2, "num_gpus": 0, "resources": {"NPU": 1}},
        "placement_group_bundles": [{"NPU": 1, "CPU": 2}] * 3,
        "placement_group_strategy": "PACK",
    }


def test_a_settings_file_has_objects_as_yaml(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("ray: auto\nmodels:\n  - model: m\n    ray_resources: {GPU: 1}\n")
    read = read_file(file)
    assert read.server == {"ray": "auto"}
    assert placement_of(ModelConfig(**read.models[0])).resources == {"GPU": 1}


def test_loads_are_what_was_sent_and_counters_outlive_engines() -> None:
    loads = Loads()
    loads.keep({"a", "b"})
    loads.report("b", Stats(running=3, waiting=1, output_tokens=10, blocks=8))
    loads.report("c", Stats(output_tokens=100))  # gone already
    loads.begin("r1", "a")
    loads.begin("r2", "a")
    assert (loads.of("a"), loads.of("b"), loads.total().running) == (2, 0, 0)
    loads.begin("r2", "b")  # the first one had no room after all
    loads.end("r1")
    loads.end("r1")
    assert (loads.of("a"), loads.of("b"), loads.total().running) == (0, 1, 3)
    loads.keep({"a"})
    loads.report("a", Stats(output_tokens=5, blocks=8))
    total = loads.total()
    assert (total.output_tokens, total.running, total.blocks, len(loads)) == (15, 0, 8, 1)


def test_the_manifest_is_a_service_whose_settings_are_ours(tmp_path: Path) -> None:
    settings, service = yaml.safe_load_all(MANIFEST.read_text())
    file = tmp_path / "models.yaml"
    file.write_text(settings["data"]["models.yaml"])
    read = read_file(file)
    models = [ModelConfig(**entry) for entry in read.models]
    check(ServerConfig(**read.server, ray="auto"), models)

    assert (service["apiVersion"], service["kind"]) == ("ray.io/v1", "RayService")
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    (application,) = serve["applications"]
    module, _, name = application["import_path"].partition(":")
    assert module == ray_app.__name__
    assert callable(getattr(ray_app, name))
    path = Path(application["args"]["config"])
    cluster = service["spec"]["rayClusterConfig"]
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    (workers,) = cluster["workerGroupSpecs"]
    most = placement_of(models[0]).most
    assert workers["maxReplicas"] == most
    for pod in (cluster["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        (container,) = pod["containers"]
        mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes[mounts[str(path.parent)]]["configMap"]["name"] == settings["metadata"]["name"]
        assert Path(models[0].model).parent.as_posix() in mounts
        assert set(container["resources"]["limits"]) <= set(container["resources"]["requests"])


def test_ray_tools_take_one_argument() -> None:
    with pytest.raises(ConfigError, match="one argument is taken, config=FILE"):
        ray_app.build({"config": "a", "port": "1"})
