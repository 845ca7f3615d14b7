"""Tiny model folders shared by the tests of one session, each built when a test first asks for it."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

# Kernels are interpreted where there is no GPU; triton reads this when it is first imported.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import tiny
from garbage import keep_imports, look_through
from selfchecks import check_once

from anycore.config import cache_dir

# Another interpreter's: ci/ascend_suite.py runs them.
collect_ignore = [] if "STANDIN_SOC" in os.environ else ["ascend"]


def cache_of_tests() -> TemporaryDirectory[str]:
    """A cache that goes with the session: what tests keep, such as tiny tokenizers, does not land in the user's.

    What takes long to get is still shared with it: fetched packages and compiled kernels.
    """
    shared = cache_dir()
    own = TemporaryDirectory(prefix="anycore-tests-")
    for name in ("pkg", "kernels"):
        (shared / name).mkdir(parents=True, exist_ok=True)
        (Path(own.name) / name).symlink_to((shared / name).resolve(), target_is_directory=True)
    return own


if "PYTEST_XDIST_WORKER" not in os.environ:  # workers inherit it
    CACHE = cache_of_tests()
    os.environ["ANYCORE_CACHE"] = CACHE.name


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What files import while they are collected stays: the garbage collector need not pass over it again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        keep_imports()
        gc.enable()
        check_once()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of several workers none shall be left with a long test when the others have no more: files with such come first.

    Files stay whole, for what their tests share is opened once.
    """
    if hasattr(config, "workerinput"):
        slow = {item.path for item in items if item.get_closest_marker("slow")}
        items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """What a file's tests have opened goes with its last one: engines are large, and are circles of references."""
    if nextitem is None or nextitem.path != item.path:
        look_through()


@pytest.fixture(scope="session")
def t_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_lm(tmp_path_factory.mktemp("t-lm"))


@pytest.fixture(scope="session")
def t_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_bert(tmp_path_factory.mktemp("t-bert"))


@pytest.fixture(scope="session")
def t_xlmr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_xlmr(tmp_path_factory.mktemp("t-xlmr"))


@pytest.fixture(scope="session")
def t_ce(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_cross_encoder(tmp_path_factory.mktemp("t-ce"))


@pytest.fixture(scope="session")
def t_ce_xlmr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_cross_encoder(tmp_path_factory.mktemp("t-ce-xlmr"), "xlmr")


@pytest.fixture(scope="session")
def t_qemb(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_embedder(tmp_path_factory.mktemp("t-qemb"))


@pytest.fixture(scope="session")
def t_qrr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.tiny_reranker(tmp_path_factory.mktemp("t-qrr"))


@pytest.fixture(autouse=True)
def log_handlers() -> Iterator[None]:
    """Commands that run within a test write their log to what is standard error then: it goes when the test ends."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in root.handlers[:]:
        if type(handler) is logging.StreamHandler and handler not in before:
            root.removeHandler(handler)
    root.setLevel(level)
