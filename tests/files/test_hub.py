"""Models by id: what is asked of the libraries, and what their failures become."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tiny
from huggingface_hub import constants, errors

from anycore.errors import SourceError
from anycore.models.hub import DESCRIPTION
from anycore.models.source import locate

TOKEN = "hf_" + "x" * 34


@pytest.fixture(autouse=True)
def empty_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, a hub that answers nobody, and a working directory without models."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.delenv("ANYCORE_USE_MODELSCOPE", raising=False)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def snapshot(tmp_path: Path, *, weights: bool) -> Path:
    """Fill the cache as huggingface_hub would after fetching owner/name."""
    repository = tmp_path / "hub" / "models--owner--name"
    folder = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    tiny.write_json(folder / "config.json", {"architectures": ["LlamaForCausalLM"]})
    if weights:
        (folder / "model.safetensors").write_bytes(b"weights")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(folder.name)
    return folder


def answer(monkeypatch: pytest.MonkeyPatch, result: Path | Exception) -> dict[str, Any]:
    """Let the library's download give a folder or fail; return what it was asked."""
    asked: dict[str, Any] = {}

    def download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        if isinstance(result, Exception):
            raise result
        return str(result)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return asked


def test_cached_snapshot_is_used_without_a_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot(tmp_path, weights=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = locate("owner/name")
    assert (source.name, source.folder) == ("owner/name", folder)
    assert source.config()["architectures"] == ["LlamaForCausalLM"]


def test_cached_description_without_weights_is_not_taken_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot(tmp_path, weights=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert locate("owner/name", weights=False).folder == folder
    with pytest.raises(SourceError, match=r"no safetensors weights.*with the network on"):
        locate("owner/name")


def test_offline_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"'owner/name'.*HF_HUB_OFFLINE is set.*give the folder.*pkg:NAME"):
        locate("owner/name")


def test_unreachable_hub_says_what_to_do() -> None:
    with pytest.raises(SourceError, match=r"the hub cannot be reached.*give the folder.*HF_ENDPOINT"):
        locate("owner/name")


def test_what_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, snapshot(tmp_path, weights=True))
    locate("owner/name", revision="v1", weights=False)
    assert (asked["name"], asked["revision"], asked["allow_patterns"]) == ("owner/name", "v1", DESCRIPTION)
    locate("owner/name")
    assert asked["allow_patterns"] == [*DESCRIPTION, "*.safetensors"]
    assert not any("bin" in pattern or "py" in pattern for pattern in asked["allow_patterns"])
    assert "token" not in asked


def test_progress_comes_from_the_librarys_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answer(monkeypatch, snapshot(tmp_path, weights=True))
    seen: list[tuple[str, float]] = []
    locate("owner/name", progress=lambda phase, share: seen.append((phase, share)))
    small, large = asked["tqdm_class"](total=4, initial=0), asked["tqdm_class"](total=1000, initial=500)
    large.update(250)
    small.update(1)
    large.update(250)
    assert seen == [("fetching", 0.75), ("fetching", 1.0)]


def http_error(kind: type[Exception]) -> Exception:
    """An error as the library raises it, without a real response; its text shows the token."""
    error = kind.__new__(kind)
    error.args = (f"401 for http://user:{TOKEN}@host, token {TOKEN}",)
    return error


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (errors.GatedRepoError, "is gated: accept its terms.*HF_TOKEN"),
        (errors.RepositoryNotFoundError, "no such repository, or it is private"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (errors.LocalEntryNotFoundError, "cannot be reached"),
        (errors.HfHubHTTPError, "HfHubHTTPError: 401"),
        (OSError, "OSError: 401"),
    ],
)
def test_failures_say_what_to_do_and_show_no_token(
    kind: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer(monkeypatch, http_error(kind))
    with pytest.raises(SourceError, match=message) as caught:
        locate("owner/name", revision="v9")
    assert TOKEN not in caught.value.message


def test_an_error_that_is_ours_to_fix_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        locate("owner/name")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth"])
def test_o15_pickled_weights_are_never_fetched(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = snapshot(tmp_path, weights=False)
    (folder / name).write_bytes(b"pickle")
    answer(monkeypatch, folder)
    with pytest.raises(SourceError, match=f"only {name}.*Pickle files are never loaded"):
        locate("owner/name")


def test_repository_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, tmp_path)
    with pytest.raises(SourceError, match=r"no config\.json.*GGUF"):
        locate("owner/name")


def install_modelscope(monkeypatch: pytest.MonkeyPatch, download: Callable[..., str]) -> None:
    module = types.ModuleType("modelscope")
    module.snapshot_download = download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "modelscope", module)


@pytest.mark.parametrize(("model", "switch"), [("modelscope:owner/name", ""), ("owner/name", "1")])
def test_modelscope_through_its_library(
    model: str, switch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = snapshot(tmp_path, weights=True)
    asked: dict[str, Any] = {}
    install_modelscope(monkeypatch, lambda name, **options: asked.update(options, name=name) or str(folder))
    monkeypatch.setenv("ANYCORE_USE_MODELSCOPE", switch)
    source = locate(model, revision="v1", weights=False)
    assert (source.name, source.folder) == (model, folder)
    assert (asked["name"], asked["revision"], asked["allow_patterns"]) == ("owner/name", "v1", DESCRIPTION)


def test_modelscope_failure_shows_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise ValueError("no such model")

    install_modelscope(monkeypatch, fail)
    with pytest.raises(SourceError, match="ModelScope: ValueError: no such model"):
        locate("modelscope:owner/name")


def test_modelscope_absent_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "modelscope", None)
    with pytest.raises(SourceError, match=r"pip install 'anycore\[modelscope\]'"):
        locate("modelscope:owner/name")
