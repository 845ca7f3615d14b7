"""`anycore matrix` and `anycore doctor`: the table as declared, and what is absent with reason and next step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from installed import anycore, install, install_echo

from anycore import plugins
from anycore.cli import doctor
from anycore.cli.main import main
from anycore.cli.matrix import markdown, plain, rows, show_table
from anycore.config import ENVIRONMENT
from anycore.contract.declare import CONTRACT_VERSION

VERSION = ".".join(map(str, CONTRACT_VERSION))


Said = Callable[..., str]


@pytest.fixture
def with_echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Said:
    """What a command prints where the echo backend is installed and plays a script."""
    monkeypatch.syspath_prepend(tmp_path)
    install_echo(tmp_path)

    def said(*words: str, **script: Any) -> str:
        monkeypatch.setenv("ANYCORE_ECHO", json.dumps(script))
        assert main(list(words)) == 0
        return capsys.readouterr().out

    return said


def test_json_holds_every_row_as_declared(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    loaded = plugins.load()
    assert [backend["name"] for backend in report["backends"]] == [spec.name for spec in loaded.backends]
    for backend, spec in zip(report["backends"], loaded.backends, strict=True):
        rows = [{name: value for name, value in row.items() if name != "evidence"} for row in backend["support"]]
        assert rows == [json.loads(msgspec.json.encode(row)) for row in spec.support]
        assert backend["distribution"] == spec.distribution


def test_a_plugin_of_another_distribution_is_shown_with_its_devices(tmp_path: Path) -> None:
    """In a process of its own, as users start it."""
    script = {"ANYCORE_ECHO": '{"devices": 2, "chip": "80"}'}
    done = anycore("matrix", "--json", path=install_echo(tmp_path), env=script)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    echo = next(backend for backend in report["backends"] if backend["name"] == "echo")
    assert echo["distribution"] == "anycore-echo 0.1.0"
    assert [device["chip"] for device in echo["probe"]["devices"]] == ["80", "80"]


@pytest.mark.parametrize(
    ("script", "reason", "advice"),
    [
        ({"failure": "library"}, "libecho.so.1: cannot open shared object file", "Install the echo runtime."),
        ({"failure": "permission"}, "Permission denied: '/dev/echo0'", "Add this user to the group echo."),
        ({"devices": 0}, "the driver sees 0 devices", "Check the cable."),
        ({"driver": "11.4"}, "driver 11.4 found, 12.1 or newer needed", "Upgrade the echo driver."),
        ({"failure": "raise"}, "RuntimeError: echo: the probe itself failed", "report it to its authors"),
    ],
)
def test_h01_an_absent_device_is_shown_with_reason_and_next_step(
    with_echo: Said, script: dict[str, Any], reason: str, advice: str
) -> None:
    for command in ("matrix", "doctor"):
        lines = with_echo(command, **script).splitlines()
        (line,) = [line for line in lines if "no device" in line and "echo" in line]
        assert "echo (anycore-echo 0.1.0)" in line
        assert reason in line
        assert advice in line


def test_h03_a_plugin_of_another_contract_is_shown(with_echo: Said) -> None:
    for command in ("matrix", "doctor"):
        told = f"plugin echo (anycore-echo 0.1.0): needs contract 2.0, this is {VERSION}."
        assert told in with_echo(command, api=[2, 0])


def test_h03_doctor_gives_all_versions_as_json(with_echo: Said) -> None:
    report = json.loads(with_echo("doctor", "--json", driver="11.4"))
    assert report["contract"] == list(CONTRACT_VERSION)
    assert report["packages"].keys() >= {"torch", "transformers", "fastapi", "pluggy"}
    assert "ruff" not in report["packages"]
    versions = {backend["name"]: backend["probe"]["versions"] for backend in report["backends"]}
    assert versions["echo"] == {"driver": "11.4", "driver needed": "12.1"}
    assert versions["cpu"]["torch"] == report["packages"]["torch"]


def test_a_hanging_plugin_does_not_stop_the_matrix(tmp_path: Path) -> None:
    install(tmp_path, "hanging-device", "1.0", "hanging", "hanging_matrix", "import time\ntime.sleep(60)")
    done = anycore("matrix", path=tmp_path, env={"ANYCORE_PLUGIN_SECONDS": "0.3"})
    assert "plugin hanging (hanging-device 1.0): TimeoutError: did not answer within 0.3 s." in done.stdout
    assert "cpu" in done.stdout
    assert done.returncode == 0


def test_a_script_that_is_wrong_is_this_plugins_failure(with_echo: Said) -> None:
    told = with_echo("matrix", devicez=2)
    assert "plugin echo (anycore-echo 0.1.0): TypeError:" in told
    assert "devicez" in told


REPORT: dict[str, Any] = {
    "backends": [
        {
            "name": "one",
            "distribution": "one 1.0",
            "probe": {"devices": [], "reason": "it is off", "advice": "Turn it on."},
            "support": [
                {
                    "level": "native",
                    "tasks": ["embed", "rerank"],
                    "attention": "bidirectional",
                    "weights": ["float32"],
                    "schemes": ["w8a8", "fp8"],
                    "kv_caches": ["int8"],
                    "features": ["token_types"],
                    "architectures": [],
                    "head_dims": [64, 128],
                    "block_sizes": [],
                    "chips": ["80"],
                    "note": "a [note]",
                    "evidence": "proven on a board, 2026-01-02",
                }
            ],
            "evidence_troubles": ["a file is no report"],
        }
    ],
    "failures": [{"name": "two", "distribution": "two 2.0", "reason": "it broke", "advice": "Mend it."}],
}


def test_plain_text_has_a_line_a_row_and_a_line_a_trouble() -> None:
    cells = (
        "one", "native", "embed, rerank", "bidirectional", "float32", "w8a8, fp8", "int8", "token_types", "any",
        "64, 128", "any", "80", "proven on a board, 2026-01-02",
    )  # fmt: skip
    assert rows(REPORT) == [(cells, "a [note]")]
    lines = plain(REPORT)
    columns, note = lines[1].split("\n")
    assert [word.strip() for word in columns.split("  ") if word] == list(cells)
    assert note == "    a [note]"
    assert lines[-3:] == [
        "one (one 1.0): no device: it is off. Turn it on.",
        "a file is no report",
        "plugin two (two 2.0): it broke. Mend it.",
    ]


def test_markdown_is_a_table_and_a_list() -> None:
    lines = markdown(REPORT)
    start = "| one | native | embed, rerank | bidirectional | float32 | w8a8, fp8 | int8 | token_types |"
    assert lines[2].startswith(start)
    assert lines[0].count("|") == lines[1].count("|") == lines[2].count("|")
    assert lines[-1] == "- plugin two (two 2.0): it broke. Mend it."


def test_the_table_of_a_terminal_says_the_same(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setenv("COLUMNS", "260")
    show_table(REPORT)
    text = capsys.readouterr().out
    for words in (
        "embed, rerank",
        "bidirectional",
        "proven on a board,",
        "64, 128",
        "a [note]",
        "it is off. Turn it on.",
        "it broke. Mend",
    ):
        assert words in text


def test_o06_doctor_masks_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secrets = {"ANYCORE_API_KEY": "sk-marker", "HF_TOKEN": "hf-marker", "ANYCORE_CACHE": str(tmp_path)}
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    for words in (["doctor"], ["doctor", "--json"]):
        assert main(words) == 0
        said = capfd.readouterr()
        assert "marker" not in said.out + said.err
        assert "***" in said.out
        assert str(tmp_path) in said.out


def test_doctor_shows_every_variable_that_is_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    for name, meaning in ENVIRONMENT.items():
        assert name in text
        assert meaning in text


def test_doctor_exits_1_when_no_backend_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "examine", lambda environ: {"backends": [{"available": False}]})
    assert main(["doctor", "--json"]) == 1


def test_one_backend_and_one_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrix", "--json", "--backend", "cpu", "--task", "generate"]) == 0
    (backend,) = json.loads(capsys.readouterr().out)["backends"]
    assert backend["name"] == "cpu"
    assert backend["support"]
    assert all("generate" in row["tasks"] for row in backend["support"])
    assert main(["matrix", "--backend", "cup"]) == 3
    assert "Did you mean cpu?" in capsys.readouterr().err
