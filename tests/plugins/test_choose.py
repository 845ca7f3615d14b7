"""Choosing a backend: what is asked for is used or refused with every reason, never replaced in silence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from anycore_echo import Script, spec

from anycore import plugins
from anycore.choose import Choice, choose, fall_back, open_backend
from anycore.contract.declare import BackendSpec, Device, Level, Need, Probe, Support, Task
from anycore.errors import PluginError, Unsupported
from anycore.plugins import PluginFailure, Plugins

ALL = tuple(Task)


def installed(*specs: BackendSpec, failures: tuple[PluginFailure, ...] = ()) -> Plugins:
    """The given backends and a CPU that computes float32 only."""
    cpu = BackendSpec(
        name="cpu",
        api=(1, 0),
        support=(Support(tasks=ALL, attention="causal", weights=("float32",), level=Level.NATIVE),),
        probe=lambda: Probe(devices=(Device(0, "a processor", "x86"),)),
        open=lambda index: None,  # type: ignore[arg-type,return-value]
    )
    ranked = sorted((*specs, cpu), key=lambda item: -item.priority)
    return Plugins(tuple(ranked), failures, plugins.load(entries=[]).hooks)


def need(device: Device, weights: str = "float32", **more: object) -> Need:
    fields = {"task": Task.GENERATE, "attention": "causal", "architecture": "LlamaForCausalLM", "head_dim": 64}
    return Need(**{**fields, "weights": weights, "chip": device.chip, **more})  # type: ignore[arg-type]


FAILURES = [
    ("library", "libecho.so.1: cannot open shared object file", "Install the echo runtime."),
    ("permission", "[Errno 13] Permission denied: '/dev/echo0'", "Add this user to the group echo."),
]


@pytest.mark.parametrize(("failure", "reason", "advice"), FAILURES)
def test_h01_explicit_backend_is_refused_with_its_own_reason(failure: str, reason: str, advice: str) -> None:
    with pytest.raises(PluginError) as caught:
        choose(installed(spec(Script(failure=failure))), need, "echo")
    text = str(caught.value)
    assert f"echo: OSError: {reason}" in text or f"echo: PermissionError: {reason}" in text
    assert advice in text
    assert "cpu: would do, with --backend cpu" in text
    assert caught.value.exit_code != 0


def test_h01_every_backend_is_listed_with_its_own_reason() -> None:
    broken = PluginFailure("odd", "odd-device 1.0", "ImportError: no odd", "Repair it.")
    absent = spec(Script(name="other", failure="permission"))
    with pytest.raises(PluginError) as caught:
        choose(installed(spec(Script(devices=0)), absent, failures=(broken,)), partial(need, weights="float16"), "echo")
    lines = str(caught.value).splitlines()
    assert lines[0] == "backend echo cannot serve this:"
    assert any("echo: the driver sees 0 devices. Check the cable." in line for line in lines)
    assert any("other: PermissionError" in line for line in lines)
    assert any("cpu: no support for generate" in line for line in lines)
    assert any("plugin odd (odd-device 1.0): ImportError: no odd. Repair it." in line for line in lines)


@pytest.mark.parametrize("failure", ["library", "permission"])
def test_h01_auto_takes_the_cpu_with_a_notice(failure: str) -> None:
    choice = choose(installed(spec(Script(priority=10, failure=failure))), need, "auto")
    assert choice.spec.name == "cpu"
    (notice,) = choice.notices
    assert notice.startswith("backend auto takes cpu, not echo: ")
    assert "cannot open shared object file" in notice or "Permission denied" in notice


def test_h01_auto_tells_of_plugins_that_failed() -> None:
    broken = PluginFailure("odd", "odd-device 1.0", "ImportError: no odd", "Repair it.")
    choice = choose(installed(failures=(broken,)), need, "auto")
    assert "ImportError: no odd" in choice.notices[0]


def test_h01_auto_takes_the_best_that_works_and_says_nothing() -> None:
    choice = choose(installed(spec(Script(priority=10)), spec(Script(name="worse"))), need, "auto")
    assert (choice.spec.name, choice.notices) == ("echo", ())


@pytest.mark.parametrize(("devices", "seen"), [(2, "devices seen: 0, 1"), (0, "the driver sees 0 devices")])
def test_h01_a_device_that_is_not_there_lists_those_seen(devices: int, seen: str) -> None:
    with pytest.raises(PluginError, match=seen):
        choose(installed(spec(Script(devices=devices))), need, "echo", device=7)


def test_a_device_is_taken_by_its_index() -> None:
    assert choose(installed(spec(Script(devices=3))), need, "echo", device=2).device.name == "Echo 2"


def test_h01_an_unknown_backend_names_the_known_and_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"found: cpu, echo\. Did you mean echo\?"):
        choose(installed(spec(Script())), need, "ehco")


def test_h03_an_old_driver_is_told_with_both_versions() -> None:
    old = Script(driver="11.4", driver_needed="12.1")
    with pytest.raises(PluginError, match=r"driver 11\.4 found, 12\.1 or newer needed\. Upgrade the echo driver\."):
        choose(installed(spec(old)), need, "echo")


def test_h05_a_chip_without_kernels_is_refused_with_the_list_and_an_alternative() -> None:
    with pytest.raises(Unsupported) as caught:
        choose(installed(spec(Script(chip="75", built_for=("80", "90")))), need, "echo")
    assert "chip 75 is not among 80, 90" in str(caught.value)
    assert "cpu: would do, with --backend cpu" in str(caught.value)


def test_h05_a_chip_with_kernels_is_taken() -> None:
    assert choose(installed(spec(Script(chip="80", built_for=("80", "90")))), need, "echo").device.chip == "80"


@pytest.mark.parametrize("script", [Script(failure="library"), Script(chip="75", built_for=("80",))])
def test_h06_an_explicit_backend_never_falls_back_unless_allowed(script: Script) -> None:
    found = installed(spec(script))
    with pytest.raises((PluginError, Unsupported)):
        choose(found, need, "echo")
    choice = choose(found, need, "echo", allow_cpu_fallback=True)
    assert choice.spec.name == "cpu"
    assert choice.notices[0].startswith("falling back to cpu (--allow-cpu-fallback): echo: ")


def test_h06_a_fallback_the_cpu_cannot_serve_is_refused_with_both_reasons() -> None:
    with pytest.raises(Unsupported) as caught:
        choose(installed(spec(Script(failure="library"))), partial(need, weights="float16"), "echo", 0, True)
    assert "cannot open shared object file" in str(caught.value)
    assert "weights float16" in str(caught.value)


def test_h06_a_backend_whose_plugin_failed_may_fall_back_too() -> None:
    broken = PluginFailure("odd", "odd-device 1.0", "ImportError: no odd", "Repair it.")
    found = installed(failures=(broken,))
    with pytest.raises(PluginError, match="ImportError: no odd"):
        choose(found, need, "odd")
    assert "ImportError: no odd" in choose(found, need, "odd", allow_cpu_fallback=True).notices[0]


def test_h06_a_device_that_does_not_open_is_told_with_its_words() -> None:
    found = installed(spec(Script(failure="open")))
    with pytest.raises(PluginError, match=r"cannot open device 0 \(Echo 0\): RuntimeError: echo: device 0 does not"):
        open_backend(choose(found, need, "echo"))
    assert fall_back(found, need, "echo does not open").spec.name == "cpu"


def test_h10_needs_are_tried_in_their_order() -> None:
    def needs(device: Device) -> Sequence[Need]:
        return [need(device, "bfloat16"), need(device, "float32")]

    def chosen(script: Script) -> Choice:
        return choose(installed(spec(script)), needs, "echo")

    assert chosen(Script()).need.weights == "bfloat16"
    assert chosen(Script(weights=("float16", "float32"))).need.weights == "float32"


def test_h10_a_refusal_names_the_need_that_was_wanted_most() -> None:
    found = installed(spec(Script(weights=("float16",))))
    with pytest.raises(Unsupported, match="weights bfloat16 are not among float16"):
        choose(found, lambda device: [need(device, "bfloat16"), need(device)], "echo")


def test_without_any_backend_the_message_says_what_to_do() -> None:
    empty = Plugins((), (), plugins.load(entries=[]).hooks)
    with pytest.raises(PluginError, match="reinstall anycore"):
        choose(empty, need, "auto")
