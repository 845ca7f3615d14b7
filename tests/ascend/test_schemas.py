"""Every call of the backend binds to the schemas of older torch_npu releases, which were read from their wheels.

The backend runs for real, on the release that is installed; what it calls is bound to the older schema on the way.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
from engines import engine, run
from schemas import DATA

import anycore_ascend

INSTALLED = "2.13.0"
OLDER = ("2.7.1", "2.9.0")


def schemas_of(version: str) -> dict[str, Any]:
    texts = (DATA / f"torch_npu-{version}.txt").read_text().splitlines()
    return {schema.name: schema for schema in map(torch._C.parse_schema, texts)}


def bind(schema: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise TypeError unless the call fits the schema."""
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if len(args) > len(places):
        raise TypeError(f"{schema.name} takes {len(places)} arguments by place, not {len(args)}")
    given = [*places[: len(args)], *kwargs]
    unknown = set(given) - {argument.name for argument in schema.arguments}
    missing = [a.name for a in schema.arguments if not a.has_default_value() and a.name not in given]
    if unknown or missing or len(set(given)) < len(given):
        raise TypeError(f"{schema.name}: unknown {unknown}, missing {missing}, given {given}")


class Older:
    """An operator as another release registers it."""

    def __init__(self, operator: Any, schema: Any, called: set[str]) -> None:
        self.default = self  # an overload of itself, as the backend asks for it
        self.operator = operator
        self._schema = schema
        self.called = called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bind(self._schema, args, kwargs)
        self.called.add(self._schema.name)
        names = {argument.name for argument in self._schema.arguments}
        newer = {"cache_mode": "Norm"} if self._schema.name == "npu_scatter_pa_kv_cache" else {}
        return self.operator(*args, **kwargs, **{name: value for name, value in newer.items() if name not in names})


class Torch:
    """torch as the backend's modules see it, with another release's operators."""

    def __init__(self, operators: dict[str, Any]) -> None:
        self.ops = SimpleNamespace(npu=SimpleNamespace(**operators))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


Release = Callable[[str, set[str]], set[str]]


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> Release:
    """Let the backend see a release without some operators; what it calls is added to the set that comes back."""

    def choose(version: str, without: set[str]) -> set[str]:
        called: set[str] = set()
        found = {
            name: Older(getattr(torch.ops.npu, name).default, schema, called)
            for name, schema in schemas_of(version).items()
            if name not in without
        }
        for module in pkgutil.iter_modules(anycore_ascend.__path__, "anycore_ascend."):
            if hasattr(import_module(module.name), "torch"):
                monkeypatch.setattr(f"{module.name}.torch", Torch(found))
        return called

    return choose


@pytest.mark.parametrize("version", OLDER)
def test_calls_bind(release: Release, version: str, t_bert: Path, tmp_path: Path) -> None:
    called = release(version, set())
    folder = tiny.tiny_lm(tmp_path, family="mistral", window=24, layers=1)
    run(engine(folder, backend="ascend", dtype="bfloat16"), [[5, 6, 7]], max_tokens=2)
    run(engine(t_bert, backend="ascend", dtype="float32"), [[5, 6, 7]])
    wanted = {"npu_fused_infer_attention_score", "npu_fusion_attention", "npu_scatter_pa_kv_cache", "npu_add_rms_norm"}
    assert wanted <= called


def test_without_the_newer_operator_the_cache_is_written_by_the_older(release: Release, tmp_path: Path) -> None:
    """torch_npu for CANN 8.2 has no npu_scatter_pa_kv_cache."""
    folder = tiny.tiny_lm(tmp_path, layers=1)
    called = release("2.7.1", {"npu_scatter_pa_kv_cache"})
    found = run(engine(folder, backend="ascend", dtype="float16"), [[5, 6, 7]], max_tokens=4)[0].tokens
    assert found == run(engine(folder), [[5, 6, 7]], max_tokens=4)[0].tokens
    assert "npu_scatter_nd_update_" in called


def test_the_kept_schemas_are_those_of_the_installed_wheel() -> None:
    for name, kept in schemas_of(INSTALLED).items():
        live = getattr(torch.ops.npu, name).default._schema
        ours, theirs = ([(a.name, str(a.type), a.kwarg_only) for a in s.arguments] for s in (kept, live))
        assert ours == theirs, name


def test_binding_refuses() -> None:
    schema = schemas_of("2.7.1")["npu_scatter_pa_kv_cache"]
    with pytest.raises(TypeError, match="cache_mode"):
        bind(schema, (0, 0, 0, 0, 0), {"cache_mode": "Norm"})
    with pytest.raises(TypeError, match="slot_mapping"):
        bind(schema, (0, 0, 0, 0), {})
