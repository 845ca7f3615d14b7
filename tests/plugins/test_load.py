"""Loading plugins: what is broken, hangs, is doubled or too new is told, and stops nobody else."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from installed import install

from anycore import plugins
from anycore.contract.declare import CONTRACT_VERSION as OURS
from anycore.contract.declare import Task
from anycore.engine.request import RequestRecord
from anycore.errors import ConfigError, PluginError

BACKEND = """
from anycore import hookimpl
from anycore.contract.declare import BackendSpec, Device, Probe

def probe():
    {probe}

@hookimpl
def register_backends():
    spec = BackendSpec("{name}", {api}, support=(), probe=probe, open=lambda index: None, priority={priority})
    return [spec]
"""
SEEN = 'return Probe(devices=(Device(0, "one", "chip"),))'


def backend(name: str, api: tuple[int, int] = (1, 0), priority: int = 0, probe: str = SEEN) -> str:
    return BACKEND.format(name=name, api=api, priority=priority, probe=probe)


def strangers(loaded: plugins.Plugins) -> list[str]:
    """Names of the backends that are not the house's own, in their order."""
    return [spec.name for spec in loaded.backends if not spec.distribution.startswith("anycore ")]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_house_brings_its_cpu_backend_through_the_entry_point() -> None:
    loaded = plugins.load(environ={"ANYCORE_PLUGINS": ""})
    assert loaded.backend("cpu").distribution.startswith("anycore ")
    assert strangers(loaded) == []
    assert loaded.failures == ()


def test_backends_come_in_priority_order_and_name_their_distribution(site: Path) -> None:
    install(site, "fast-device", "2.5", "fast", "priority_fast", backend("fast", priority=10))
    install(site, "slow-device", "0.1", "slow", "priority_slow", backend("slow", priority=-10))
    loaded = plugins.load(environ={})
    assert [spec.name for spec in loaded.backends if spec.name in ("fast", "cpu", "slow")] == ["fast", "cpu", "slow"]
    priorities = [spec.priority for spec in loaded.backends]
    assert priorities == sorted(priorities, reverse=True)
    assert loaded.backend("fast").distribution == "fast-device 2.5"


def test_a_broken_import_is_kept_with_its_own_words(site: Path) -> None:
    code = 'raise ImportError("libdevice.so.3: cannot open shared object file")'
    install(site, "broken-device", "1.2", "broken", "broken_import", code)
    loaded = plugins.load(environ={})
    (failure,) = loaded.failures
    assert failure.distribution == "broken-device 1.2"
    assert "libdevice.so.3: cannot open shared object file" in failure.reason
    assert failure.advice
    assert strangers(loaded) == []
    assert loaded.backend("cpu")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from anycore import hookimpl\n@hookimpl\ndef register_backends():\n    return [1]", "BackendSpec objects"),
        ("from anycore import hookimpl\n@hookimpl\ndef register_backends():\n    return 1 / 0", "ZeroDivisionError"),
        ("from anycore import hookimpl\n@hookimpl\ndef register_backend():\n    return []", "register_backend"),
        ("from anycore import hookimpl\n@hookimpl\ndef request_finished(record, text):\n    pass", "text"),
    ],
    ids=["exits", "wrong type", "raises", "unknown hook", "unknown argument"],
)
def test_a_plugin_that_misbehaves_is_kept_with_the_reason(
    site: Path, request: pytest.FixtureRequest, code: str, words: str
) -> None:
    module = "misbehaves_" + request.node.callspec.id.replace(" ", "_")
    install(site, "odd-plugin", "1.0", "odd", module, code)
    loaded = plugins.load(environ={})
    (failure,) = loaded.failures
    assert words in failure.reason
    assert strangers(loaded) == []
    assert loaded.backend("cpu")
    assert "odd (odd-plugin 1.0)" not in [name for name, _ in loaded.hooks.list_name_plugin()]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ("name=5", "BackendSpec.name must be str, not 5"),
        ("priority='high'", "BackendSpec.priority must be int, not 'high'"),
        ("priority=float('nan')", "BackendSpec.priority must be int, not nan"),
        ("open=None", "BackendSpec.open must be Callable[[int], Backend], not None"),
        ("support=None", "BackendSpec.support must be tuple[Support, ...], not None"),
        ("support=(1,)", "BackendSpec.support must be tuple[Support, ...], not (1,)"),
        ("support='all'", "BackendSpec.support must be tuple[Support, ...], not 'all'"),
        ("support=(Support(('embed',), 'causal', (), Level.NATIVE),)", "Support.tasks must be tuple[Task, ...]"),
        ("support=(Support((), 'causal', 'float32', Level.NATIVE),)", "Support.weights must be tuple[str, ...]"),
        ("support=(Support((), 'causal', (), 'best'),)", "Support.level must be Level, not 'best'"),
    ],
)
def test_what_is_declared_in_another_type_stops_nobody_else(site: Path, changes: str, words: str) -> None:
    code = (
        "from dataclasses import replace\nfrom anycore import hookimpl\n"
        "from anycore.contract.declare import BackendSpec, Level, Probe, Support\n"
        "@hookimpl\ndef register_backends():\n"
        f"    return [replace(BackendSpec('odd', (1, 0), (), Probe, print), {changes})]"
    )
    install(site, "odd-plugin", "1.0", "odd", f"declares_{abs(hash(changes))}", code)
    loaded = plugins.load(environ={})
    (failure,) = loaded.failures
    assert words in failure.reason
    assert strangers(loaded) == []


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("None", "returned NoneType, which has no name"),
        ("SimpleNamespace(name='x')", "returned SimpleNamespace 'x', which has no `"),
        ("SimpleNamespace", "returned the class SimpleNamespace, not an object of it"),
    ],
    ids=["none", "half", "class"],
)
@pytest.mark.parametrize("hook", ["register_models", "register_reply_formats", "register_tools"])
def test_what_could_not_be_used_stops_nobody_else(site: Path, hook: str, item: str, words: str) -> None:
    head = "from types import SimpleNamespace\nfrom anycore import hookimpl\n@hookimpl\n"
    code = f"{head}def {hook}():\n    return [{item}]"
    install(site, "odd-plugin", "1.0", "odd", f"unusable_{hook}_{abs(hash(item))}", code)
    (failure,) = plugins.load(environ={}).failures
    assert f"{hook} {words}" in failure.reason


def test_an_entry_point_without_a_hook_is_told(site: Path) -> None:
    """It brought nothing, and nobody said so: most often the decorator is forgotten, or the entry point is another."""
    install(site, "odd-plugin", "1.0", "odd", "hookless", "def register_backends():\n    return []")
    (failure,) = plugins.load(environ={}).failures
    assert "hookless has no hook: mark its functions with @anycore.hookimpl" in failure.reason


def test_a_hanging_import_is_given_up(site: Path) -> None:
    install(site, "hanging-device", "1.0", "hanging", "hanging_import", "import time\ntime.sleep(60)")
    started = time.monotonic()
    loaded = plugins.load(environ={"ANYCORE_PLUGIN_SECONDS": "0.2"})
    assert time.monotonic() - started < 30
    assert "did not answer within 0.2 s" in loaded.failures[0].reason
    assert "ANYCORE_PLUGIN_SECONDS" in loaded.failures[0].advice


@pytest.mark.parametrize("api", [(2, 0), (1, OURS[1] + 1), (0, 9)])
def test_h03_another_contract_is_told_in_versions(site: Path, api: tuple[int, int]) -> None:
    install(site, "future-device", "3.1", "future", f"future_{api[0]}_{api[1]}", backend("future", api=api))
    loaded = plugins.load(environ={})
    (failure,) = loaded.failures
    text = str(failure)
    assert "future-device 3.1" in text
    assert f"needs contract {api[0]}.{api[1]}, this is {OURS[0]}.{OURS[1]}" in text
    assert ("upgrade anycore" in text) == (api > OURS)
    with pytest.raises(PluginError, match=f"needs contract {api[0]}.{api[1]}, this is {OURS[0]}.{OURS[1]}"):
        loaded.backend("future")


def test_h03_the_contract_is_checked_before_the_probe_runs(site: Path) -> None:
    code = backend("future", api=(2, 0), probe='raise AssertionError("probed")')
    install(site, "future-device", "3.1", "future", "future_probe", code)
    assert "needs contract 2.0" in plugins.load(environ={}).failures[0].reason


def test_a_second_backend_of_one_name_is_refused_and_the_first_kept(site: Path) -> None:
    install(site, "a-thief", "1.0", "thief", "duplicate_cpu", backend("cpu", priority=99))
    loaded = plugins.load(environ={})
    assert loaded.backend("cpu").distribution.startswith("anycore ")
    (failure,) = loaded.failures
    assert failure.distribution == "a-thief 1.0"
    assert "already taken by anycore" in failure.reason


def test_auto_cannot_be_the_name_of_a_backend(site: Path) -> None:
    install(site, "auto-device", "1.0", "auto", "named_auto", backend("auto"))
    assert "cannot be the name of a backend" in plugins.load(environ={}).failures[0].reason


def test_a_failing_plugin_does_not_keep_its_neighbours_out(site: Path) -> None:
    install(site, "broken-device", "1.2", "broken", "broken_neighbour", "1 / 0")
    install(site, "good-device", "1.0", "good", "good_neighbour", backend("good"))
    loaded = plugins.load(environ={})
    assert strangers(loaded) == ["good"]
    assert len(loaded.failures) == 1


def test_the_environment_selects_plugins_by_distribution(site: Path) -> None:
    install(site, "first-device", "1.0", "first", "selected_first", backend("first"))
    install(site, "second-device", "1.0", "second", "selected_second", "1 / 0")
    loaded = plugins.load(environ={"ANYCORE_PLUGINS": "First_Device"})
    assert strangers(loaded) == ["first"]
    assert loaded.failures == ()
    assert strangers(plugins.load(environ={"ANYCORE_PLUGINS": ""})) == []


def test_a_selected_plugin_that_is_not_installed_is_told_with_the_nearest(site: Path) -> None:
    install(site, "first-device", "1.0", "first", "selected_near", backend("first"))
    (failure,) = plugins.load(environ={"ANYCORE_PLUGINS": "frist-device"}).failures
    assert failure.name == "frist-device"
    assert "first-device" in failure.advice


@pytest.mark.parametrize("text", ["soon", "0", "-1", "nan", "inf"])
def test_a_wrong_time_limit_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="ANYCORE_PLUGIN_SECONDS"):
        plugins.load(entries=[], environ={"ANYCORE_PLUGIN_SECONDS": text})


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        ('raise OSError("driver gone")', "OSError: driver gone"),
        ("return None", "returned NoneType"),
        ('return Probe(devices=("gpu",))', "Probe.devices must be tuple[Device, ...], not ('gpu',)"),
        ('return Probe(devices=(Device("0", "one", "chip"),))', "Device.index must be int, not '0'"),
        ("import time; time.sleep(60)", "did not answer within"),
    ],
)
def test_h01_a_probe_that_misbehaves_becomes_a_reason(site: Path, probe: str, reason: str) -> None:
    module = f"probe_{abs(hash(probe))}"
    install(site, "odd-device", "1.0", "odd", module, backend("odd", probe=probe))
    loaded = plugins.load(environ={"ANYCORE_PLUGIN_SECONDS": "0.5"})
    result = loaded.backend("odd").probe()
    assert not result.available
    assert reason in result.reason
    assert result.advice


def test_architectures_of_plugins_are_gathered_and_doubles_told(site: Path) -> None:
    code = """
from anycore import hookimpl
from anycore.models.spec import Architecture
@hookimpl
def register_models():
    return [Architecture(name="NewForCausalLM", spec=lambda config: None)]
"""
    install(site, "model-one", "1.0", "one", "models_one", code)
    install(site, "model-two", "1.0", "two", "models_two", code)
    loaded = plugins.load(environ={})
    assert [model.name for model in loaded.architectures()] == ["NewForCausalLM"]
    assert loaded.failures[0].distribution == "model-two 1.0"


def test_a_hook_that_raises_stops_neither_the_others_nor_the_caller(
    site: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raises = "from anycore import hookimpl\n@hookimpl\ndef request_finished(record):\n    raise OSError('disk full')\n"
    keeps = (
        "from anycore import hookimpl\nSEEN = []\n@hookimpl\ndef request_finished(record):\n    SEEN.append(record)\n"
    )
    install(site, "raises-log", "1.0", "raises", "hook_raises", raises)
    install(site, "keeps-log", "1.0", "keeps", "hook_keeps", keeps)
    loaded = plugins.load(environ={})
    loaded.request_finished(record())
    import hook_keeps  # type: ignore[import-not-found]

    assert [item.id for item in hook_keeps.SEEN] == ["r-1"]
    assert "disk full" in caplog.text
    assert "raises-log 1.0" in caplog.text


def record() -> RequestRecord:
    return RequestRecord(
        id="r-1",
        model="m",
        task=Task.GENERATE,
        prompt_tokens=5,
        cached_tokens=0,
        output_tokens=3,
        sequences=1,
        finish="stop",
        queue_seconds=0.0,
        first_token_seconds=0.1,
        total_seconds=0.2,
    )
