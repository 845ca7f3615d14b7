"""Models from the Hugging Face hub and from ModelScope, through their own libraries; called by `source.locate`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from anycore.errors import SourceError
from anycore.models.source import Progress

DESCRIPTION = ["*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken"]
WEIGHTS = ["*.safetensors"]
OTHER_FORMATS = ["onnx/*", "openvino/*", "original/*", "coreml/*", "tf/*", "flax/*", "consolidated*"]
MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)


def fetch_hub(name: str, revision: str | None, weights: bool, progress: Progress | None) -> Path:
    """Return the folder of a Hugging Face repository's snapshot."""
    _check_id(name)
    from huggingface_hub import constants, errors, snapshot_download

    options: dict[str, Any] = {"tqdm_class": _bar(progress)} if progress else {}
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=DESCRIPTION + (WEIGHTS if weights else []),
            ignore_patterns=OTHER_FORMATS,
            **options,
        )
    except errors.GatedRepoError as error:
        reason = f"it is gated: accept its terms at {constants.ENDPOINT}/{name} and set HF_TOKEN to your token"
        raise _failure(name, reason) from error
    except errors.RevisionNotFoundError as error:
        raise _failure(name, f"it has no revision {revision!r}: correct --revision") from error
    except errors.RepositoryNotFoundError as error:
        reason = "the hub has no such repository, or it is private: correct the name, or set HF_TOKEN for a private one"
        raise _failure(name, reason) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _failure(name, _offline_advice(constants.HF_HUB_OFFLINE)) from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError) as error:
        raise _failure(name, f"{type(error).__name__}: {_without_token(error)}") from error
    except Exception as error:  # the HTTP libraries differ between versions of huggingface_hub
        if type(error).__module__.split(".")[0] not in ("httpx", "httpcore", "requests", "urllib3"):
            raise
        raise _failure(name, _offline_advice(constants.HF_HUB_OFFLINE)) from error
    return _complete(Path(folder), name, weights)


def fetch_modelscope(name: str, revision: str | None, weights: bool, progress: Progress | None) -> Path:
    """Return the folder of a ModelScope repository's snapshot."""
    _check_id(name)
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        advice = "ModelScope ids need the modelscope library: pip install 'anycore[modelscope]'"
        raise _failure(name, advice) from error
    if progress:
        progress("fetching", 0.0)
    try:
        folder = snapshot_download(
            name,
            revision=revision,
            allow_patterns=DESCRIPTION + (WEIGHTS if weights else []),
            ignore_patterns=OTHER_FORMATS,
        )
    except Exception as error:  # the library raises its own, its HTTP library's and plain ones
        raise _failure(name, f"ModelScope: {type(error).__name__}: {_without_token(error)}") from error
    if progress:
        progress("fetching", 1.0)
    return _complete(Path(folder), name, weights)


def _check_id(name: str) -> None:
    if not MODEL_ID.fullmatch(name) or "--" in name or ".." in name:
        raise SourceError(
            f"{name!r} is neither an existing path nor a model id such as owner/name: letters, digits, '-', '_' and '.'"
        )


def _complete(folder: Path, name: str, weights: bool) -> Path:
    """Return the folder if the snapshot has what was asked for; a cache may hold less when there is no network."""
    if not (folder / "config.json").is_file():
        reason = "the repository holds no config.json; if it holds GGUF files, download one of them and name the file"
        raise _failure(name, reason)
    if weights and not any(folder.glob("*.safetensors")):
        pickles = [p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern)]
        carried = f" (only {', '.join(pickles)})" if pickles else ""
        raise _failure(
            name,
            f"there are no safetensors weights{carried}. Pickle files are never loaded: choose a repository or "
            "revision with safetensors; if only the description was cached, run again with the network on",
        )
    return folder


def _failure(name: str, reason: str) -> SourceError:
    return SourceError(f"model {name!r} is no path here and could not be fetched: {reason}", param="model")


def _offline_advice(switched_off: bool) -> str:
    state = "HF_HUB_OFFLINE is set" if switched_off else "the hub cannot be reached"
    return (
        f"{state} and the cache does not hold it. Fetch it where there is a network and give the folder, "
        "set HF_ENDPOINT to a mirror, or use ANYCORE_USE_MODELSCOPE=1 or a pkg:NAME"
    )


def _without_token(error: BaseException) -> str:
    """Return the first line of an error's text without any token."""
    text = (str(error).strip().splitlines() or [""])[0]
    for token in (os.environ.get("HF_TOKEN"), os.environ.get("MODELSCOPE_API_TOKEN")):
        if token:
            text = text.replace(token, "***")
    return re.sub(r"hf_\w+|(?<=Bearer )\S+|(?<=://)[^/@\s]+(?=@)", "***", text)


def _bar(progress: Progress) -> Callable[..., Any]:
    """Make a tqdm class that prints nothing and reports to `progress`; of several bars the largest one counts."""
    from huggingface_hub import utils

    largest = 0.0

    class Bar(utils.tqdm):  # type: ignore[name-defined, misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call, unused-ignore]
            self.total = kwargs.get("total")
            self.n = kwargs.get("initial", 0)

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal largest
            self.n += n or 0
            if self.total and self.total >= largest:
                largest = self.total
                progress("fetching", min(1.0, self.n / self.total))
            return None

    return Bar
