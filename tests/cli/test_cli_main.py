"""The command `anycore` itself: what it imports, how errors end, and what help says."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from anycore import __version__
from anycore.cli.main import COMMANDS, dispatch, main, module_of, overview, parser_of
from anycore.errors import DoesNotFit, PluginError

HEAVY = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn", "numpy", "zmq", "rich")


MODULES = 400
"""More than light commands load (about 290), less than with the smallest of HEAVY; ci/bench/startup.py times them."""


def test_python_runs_the_package_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "anycore", "version"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert __version__ in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ["matrix"],
        ["matrix", "--json"],
        ["matrix", "--model", "MODEL"],
        ["check", "MODEL"],
        ["plan", "MODEL", "--device", "h200"],
        ["doctor"],
        ["version"],
        ["--help"],
    ],
    ids=" ".join,
)
def test_light_commands_import_nothing_heavy_and_little_at_all(t_lm: Path, words: list[str]) -> None:
    words = [str(t_lm) if word == "MODEL" else word for word in words]
    program = (
        "import sys; from anycore.cli.main import main; code = main(sys.argv[1:]); "
        f"loaded = [name for name in {HEAVY} if name in sys.modules]; "
        "print(len(sys.modules), loaded, file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, _, loaded = done.stderr.splitlines()[-1].partition(" ")
    assert loaded == "[]"
    assert int(count) < MODULES


def test_serve_reads_its_flags_without_torch() -> None:
    program = (
        "import sys; from anycore.cli.main import main; code = main(['serve', 'm', '--max-num-seqs', '0']); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False", "False"], done.stderr


def test_every_command_has_a_module_help_and_a_line_in_the_overview() -> None:
    for name in COMMANDS.keys() - {"version"}:
        module = module_of(name)
        assert module.__doc__
        assert callable(module.run)
        text = parser_of(name).format_help()
        assert text.startswith(f"usage: anycore {name}")
        assert f"  {name} " in overview()


@pytest.mark.parametrize("words", [["version"], ["--version"], ["-V"]])
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 0
    assert capsys.readouterr().out == f"anycore {__version__}\n"


def test_without_a_command_the_overview_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "anycore serve demo" in capsys.readouterr().out
    assert main(["--help"]) == 0


def test_an_unknown_command_exits_2_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["matrx"]) == 2
    assert "there is no command matrx; did you mean matrix?" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "code"), [(["bench"], 2), (["bench", "--help"], 0), (["bench", "-h"], 0)])
def test_the_first_word_of_several_commands_shows_these(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == code
    out = capsys.readouterr().out
    assert "usage: anycore bench COMMAND" in out
    assert all((name in out) == name.startswith("bench ") for name in COMMANDS if " " in name)


def test_a_wrong_second_word_is_told_as_it_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "server", "--url", "x"]) == 2
    assert "there is no command bench server; did you mean bench serve?" in capsys.readouterr().err


@pytest.mark.parametrize("error", [DoesNotFit("needs 5, has 3"), PluginError("no device")])
def test_a_deliberate_error_is_one_message_and_its_exit_code(
    error: DoesNotFit | PluginError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise error

    monkeypatch.setattr("anycore.cli.matrix.run", fail)
    assert main(["matrix"]) == error.exit_code
    assert capsys.readouterr().err == f"anycore: {error.message}\n"


def test_a_traceback_shows_only_when_debugging(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(options: object) -> int:
        raise PluginError("no device")

    monkeypatch.setattr("anycore.cli.matrix.run", fail)
    monkeypatch.setenv("ANYCORE_LOG", "debug")
    assert main(["matrix"]) == PluginError.exit_code
    assert "Traceback" in capsys.readouterr().err


def test_a_fault_of_our_own_is_told_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("anycore.cli.matrix.run", lambda options: 1 // 0)
    assert main(["matrix"]) == 70
    text = capsys.readouterr().err
    assert "internal error: ZeroDivisionError" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, 1), (errno.EACCES, 1), (errno.EINVAL, 70)])
def test_what_the_operating_system_refuses_is_no_fault_of_ours(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(options: object) -> int:
        raise OSError(number, os.strerror(number), "/data/out")

    monkeypatch.setattr("anycore.cli.matrix.run", refused)
    assert main(["matrix"]) == code
    text = capsys.readouterr().err
    assert ("internal error" in text) == (code == 70)
    assert os.strerror(number) in text
    assert "/data/out" in text


def test_a_user_without_a_home_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Containers run under user ids that no file knows, with nothing in the environment."""

    def unknown(number: int) -> object:
        raise KeyError(number)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("ANYCORE_CACHE", raising=False)
    assert main(["doctor"]) == 2
    assert "Set ANYCORE_CACHE or HOME" in capsys.readouterr().err


def test_an_interrupt_exits_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("anycore.cli.main.dispatch", interrupt)
    assert main(["matrix"]) == 130


def test_a_wrong_log_level_in_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYCORE_LOG", "loud")
    assert main(["matrix"]) == 2
    assert "ANYCORE_LOG must be one of debug, info, warning, error, not 'loud'" in capsys.readouterr().err


def test_a_reader_that_goes_away_is_no_error() -> None:
    program = "import sys; from anycore.cli.main import main; sys.exit(main(['matrix', '--json']))"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) in (0, 141)


def test_standard_streams_that_are_closed_become_the_null_device(tmp_path: Path) -> None:
    """It was an internal error as soon as something asked stderr whether it is a terminal."""
    report = tmp_path / "report"
    code = (
        "import os, subprocess, sys\nfrom anycore.cli.main import main\ncode = main(['version'])\n"
        "child = subprocess.run([sys.executable, '-c', 'import os; [os.fstat(n) for n in range(3)]']).returncode\n"
        f"with open({str(report)!r}, 'w') as file:\n"
        "    print(code, child, file.fileno() > 2, sys.stderr.isatty(), sys.stdin.read() == '', file=file)\n"
    )
    command = 'exec "$0" -c "$1" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", command, sys.executable, code], check=True)
    assert report.read_text().split() == ["0", "0", "True", "False", "True"]


def test_dispatch_returns_what_the_command_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anycore.cli.matrix.run", lambda options: 7)
    assert dispatch(["matrix"]) == 7
