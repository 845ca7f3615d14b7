"""The architecture, read from the source: which room may import which, and no vendor's name in the core."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "framework" / "anycore"
BACKENDS = ROOT / "backends"
PLUGINS = ROOT / "plugins"

VENDOR_WORDS = ("cuda", "npu", "triton", "torch_npu", "ascend", "nvidia", "nccl", "hccl", "rocm")
VENDOR_EXCEPTIONS = {"contract/backend.py": {"nccl", "hccl"}}  # a doc comment: what `collective` may hold

# What each room may import of the core; a room may always import itself. Lone files are rooms of their own.
CLI, SERVER, LLM, TEXT, ENGINE, MODELS, CONTRACT = "cli", "server", "llm", "text", "engine", "models", "contract"
BENCH, BATCH, SIMULATE = "bench", "batch", "simulate"
RANKS = "ranks"
DISTRIBUTED = "distributed"
COMMON = {"errors", "config", "__init__"}
LOADING = {"plugins", "choose", "guard", "capabilities", "evidence"}
ASKING = {"ask", "answers"}
ALLOWED = {
    CLI: {DISTRIBUTED, RANKS, SIMULATE, BENCH, BATCH, SERVER, LLM, TEXT, ENGINE, MODELS, CONTRACT, *ASKING, *COMMON}
    | LOADING,
    "__main__": {CLI},
    DISTRIBUTED: {SERVER, RANKS, ENGINE, MODELS, CONTRACT, *COMMON, *LOADING},
    SERVER: {RANKS, "toolbox", TEXT, ENGINE, MODELS, CONTRACT, "ask", "answers", *COMMON, *LOADING},
    LLM: {RANKS, "chats", "toolbox", TEXT, ENGINE, MODELS, CONTRACT, *COMMON, *LOADING},
    "chats": {"toolbox", TEXT, "engine.request", "errors"},
    "toolbox": {"text.replies", "errors"},
    RANKS: {TEXT, ENGINE, MODELS, CONTRACT, *COMMON, *LOADING},
    ENGINE: {MODELS, CONTRACT, *COMMON, *LOADING},
    MODELS: {CONTRACT, *COMMON},
    CONTRACT: {"errors"},
    BENCH: {MODELS, CONTRACT, "errors"},
    SIMULATE: {BENCH, "server.routing", ENGINE, MODELS, CONTRACT, "errors", "__init__"},
    BATCH: {SERVER, "config", "errors"},
    TEXT: {"models.spec", "models.source", "models.gguf.header", "engine.request", *COMMON},
    "plugins": {"hookspecs", "guard", CONTRACT, *COMMON},
    "choose": {"guard", CONTRACT, *COMMON},
    "ask": {"answers", ENGINE, MODELS, CONTRACT, *COMMON, *LOADING},
    "answers": {ENGINE, MODELS, CONTRACT, *COMMON, *LOADING},
    "capabilities": {"evidence", CONTRACT, *COMMON},
    "evidence": {CONTRACT, *COMMON},
    "guard": {CONTRACT},
    "hookspecs": set(),
    "config": {CONTRACT, "errors"},
    "errors": set(),
    "__init__": set(),
}
# The conformance kit drives what it tests.
KIT = {
    f"contract/{name}.py"
    for name in ("testing", "endtoend", "endtoend_cache", "endtoend_faults", "endtoend_weights", "check_ranks")
}
KIT_ALLOWED = {RANKS, CONTRACT, ENGINE, MODELS, *COMMON, *LOADING}
FOR_TYPES = {  # further imports that only a type checker sees
    "plugins": {"engine.request", "models.spec", "text.replies.parts", "toolbox"},
    "choose": {"plugins"},
    "capabilities": {"plugins"},
    "hookspecs": {CONTRACT, "engine.request", "models.spec", "text.replies.parts", "toolbox"},
    "__init__": {LLM, "toolbox", "engine.request", "hookspecs"},
}
FOR_PLUGINS = {
    "contract",
    "errors",
    "hookspecs",
    "__init__",
    "models.spec",
    "text.replies",
}  # what a backend or plugin may import

# Modules that must answer without torch, directly and through what they import at their top level.
LIGHT = ("contract.declare", "contract.host", "config", "errors", "guard", "choose", "plugins", "capabilities",
         "ask", "answers", "evidence", "engine.launch", "models.spec", "models.source", "models.catalog",
         "cli.main", "cli.flags", "cli.settings", "cli.matrix", "cli.plan", "cli.check", "cli.dry_run", "cli.simulate",
         "cli.doctor", "cli.serve", "cli.bench_serve", "cli.run_batch", "batch.lines", "server.run")  # fmt: skip
HEAVY = {"torch", "transformers", "tokenizers", "fastapi", "uvicorn"}


def sources(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def names(path: Path, *, top_only: bool = False, runtime_only: bool = True) -> Iterator[str]:
    """Yield the full names that a file imports; `from a import b` gives both a and a.b."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in walk(tree, top_only, runtime_only):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def walk(node: ast.AST, top_only: bool, runtime_only: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if runtime_only and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if top_only and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield child
        yield from walk(child, top_only, runtime_only)


def module_of(name: str) -> str | None:
    """Return the module of the core that an imported name lives in, such as "models.spec"; None for a stranger."""
    parts = name.split(".")
    if parts[0] != "anycore":
        return None
    for end in range(len(parts), 1, -1):
        path = CORE.joinpath(*parts[1:end])
        if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
            return ".".join(parts[1:end])
    return "__init__"


def allowed(module: str, permitted: set[str]) -> bool:
    return any(module == room or module.startswith(room + ".") for room in permitted)


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_imports_of_the_core_run_one_way(path: Path) -> None:
    relative = path.relative_to(CORE)
    room = relative.parts[0].removesuffix(".py")
    assert room in ALLOWED, f"say in ALLOWED what the new room {room} may import"
    permitted = KIT_ALLOWED if str(relative) in KIT else ALLOWED[room] | {room}
    at_runtime = set(names(path))
    for name in names(path, runtime_only=False):
        module = module_of(name)
        for_type = name not in at_runtime and module is not None and allowed(module, FOR_TYPES.get(room, set()))
        assert module is None or for_type or allowed(module, permitted), f"{relative} imports anycore.{module}"
        assert not name.startswith("anycore_"), f"{relative} imports a backend: {name}"


def test_every_room_of_the_table_exists() -> None:
    for room in ALLOWED:
        assert (CORE / room).is_dir() or (CORE / f"{room}.py").is_file()


@pytest.mark.parametrize("path", sources(BACKENDS) + sources(PLUGINS), ids=lambda path: str(path.relative_to(ROOT)))
def test_backends_and_plugins_see_the_contract_only(path: Path) -> None:
    for name in names(path):
        module = module_of(name)
        assert module is None or allowed(module, FOR_PLUGINS), f"{path.name} imports anycore.{module}"


@pytest.mark.parametrize("path", sources(CORE), ids=lambda path: str(path.relative_to(CORE)))
def test_the_core_names_no_vendor(path: Path) -> None:
    words = [word for word in VENDOR_WORDS if word not in VENDOR_EXCEPTIONS.get(str(path.relative_to(CORE)), ())]
    pattern = re.compile(r"(?<![a-z])(" + "|".join(words) + r")(?![a-z])", re.IGNORECASE)
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            found = pattern.search(token.string.replace("_", " ")) or pattern.search(token.string)
            assert not found, f"{path.relative_to(CORE)}:{token.start[0]} says {found and found[0]!r}"


def test_a_vendor_word_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_the_core_names_no_vendor.__globals__, "CORE", tmp_path)
    for text in ("device.type == 'cuda'", "torch.cuda", "is_npu = 1", "# on Ascend", "use_TRITON"):
        path = tmp_path / "sample.py"
        path.write_text(text + "\n")
        with pytest.raises(AssertionError, match="says"):
            test_the_core_names_no_vendor(path)
    path.write_text("input, output, ascending = 1, 2, 3\n")
    test_the_core_names_no_vendor(path)


@pytest.mark.parametrize("module", LIGHT)
def test_what_must_be_light_imports_nothing_heavy(module: str) -> None:
    todo, seen = [module], set[str]()
    while todo:
        current = todo.pop()
        if current in seen:
            continue
        seen.add(current)
        path = CORE.joinpath(*current.split("."))
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        for name in names(file, top_only=True):
            assert name.split(".")[0] not in HEAVY, f"anycore.{current}, which anycore.{module} needs, imports {name}"
            inner = module_of(name)
            if inner not in (None, "__init__"):
                todo += [inner, *(inner.rsplit(".", 1)[:1] if "." in inner else [])]


@pytest.mark.parametrize("path", sources(BACKENDS), ids=lambda path: str(path.relative_to(ROOT)))
def test_support_tables_and_probes_import_no_torch(path: Path) -> None:
    if path.stem in ("__init__", "support", "probe"):
        assert "torch" not in {name.split(".")[0] for name in names(path, top_only=True)}


def test_tokens_of_this_file_can_be_read() -> None:
    """The vendor test depends on tokenize giving strings and comments as tokens."""
    text = b"x = 'a' # b\n"
    kinds = [token.string for token in tokenize.tokenize(io.BytesIO(text).readline)]
    assert "'a'" in kinds
    assert "# b" in kinds
