"""Source files, parsed, and the texts in them: what an expression may say, a template with `<names>` in its gaps."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
DEEPEST = 3
"""How many names and functions are looked up on the way to a text."""


class Module:
    """One file."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        self.path = path
        self.place = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name
        self.tree = ast.parse(path.read_text(encoding="utf-8") if text is None else text)
        self.nodes = list(ast.walk(self.tree))
        self.parents = {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self._names: dict[ast.AST, dict[str, list[ast.expr]]] = {}  # by scope: what they are set to

    def scope(self, node: ast.AST) -> ast.AST:
        """The function around a node, or the module."""
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)):
            node = self.parents[node]
        return node

    def assigned(self, name: str, node: ast.AST) -> list[ast.expr]:
        """What a name is set to in the function around a node, else in the module."""
        for scope in (self.scope(node), self.tree):
            if scope not in self._names:
                self._names[scope] = {}
                for target, value in assignments(scope):
                    self._names[scope].setdefault(target, []).append(value)
            if name in self._names[scope]:
                return self._names[scope][name]
        return []

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {node.name: node for node in self.nodes if isinstance(node, ast.FunctionDef)}

    @cached_property
    def imported(self) -> dict[str, str]:
        """Names that come from another module, and the end of its path."""
        found = (node for node in self.nodes if isinstance(node, ast.ImportFrom) and node.module)
        return {n.asname or n.name: f"{node.module.replace('.', '/')}.py" for node in found for n in node.names}  # type: ignore[union-attr]

    @cached_property
    def partials(self) -> dict[str, list[ast.expr]]:
        """Names that stand for a call with its first arguments given: what is called, then those."""
        found = (pair for node in self.nodes if isinstance(node, ast.Assign) for pair in assignments(node))
        return {n: v.args for n, v in found if isinstance(v, ast.Call) and name_of(v.func) == "partial"}


class Texts:
    """What expressions say, in any of the files."""

    def __init__(self, modules: list[Module]) -> None:
        self.modules = modules
        bodies = (pair for module in modules for node in module.tree.body for pair in assignments(node))
        self._constants = {name: value for name, value in bodies if name.isupper()}  # one name, one meaning

    def of(self, module: Module, node: ast.expr, depth: int = 0) -> list[str]:
        """Every template that an expression may be; of one that cannot be read, its name as a placeholder."""
        if isinstance(node, ast.Constant):
            return [re.sub(r"%[-+.\d]*[a-z]", "%s", node.value)] if isinstance(node.value, str) else []
        if isinstance(node, ast.JoinedStr):
            return ["".join(self._part(module, part) for part in node.values)]
        if isinstance(node, ast.IfExp):
            return self.of(module, node.body, depth) + self.of(module, node.orelse, depth)
        if isinstance(node, ast.BoolOp):
            return [text for value in node.values for text in self.of(module, value, depth)]
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            right = self.of(module, node.right, depth)
            return [one + two for one in self.of(module, node.left, depth) for two in right]
        if isinstance(node, (ast.Name, ast.Call)) and depth < DEEPEST:
            found = self._named(module, node) if isinstance(node, ast.Name) else self._returned(module, node)
            return [text for home, value in found for text in self.of(home, value, depth + 1)] or [placeholder(node)]
        return [placeholder(node)]

    def _named(self, module: Module, node: ast.Name) -> list[tuple[Module, ast.expr]]:
        if found := module.assigned(node.id, node):
            return [(module, value) for value in found]
        if (path := module.imported.get(node.id)) is not None:
            for home in self.modules:
                if home.place.endswith(path) and (found := home.assigned(node.id, home.tree)):
                    return [(home, value) for value in found]
        constant = self._constants.get(node.id)
        return [] if constant is None else [(module, constant)]

    def _returned(self, module: Module, call: ast.Call) -> list[tuple[Module, ast.expr]]:
        """What a function of ours may return, looked for here first, then anywhere; of joined lines, the first."""
        name = name_of(call.func)
        if name == "join" and "\n" in ast.literal_eval(separator_of(call)):
            given = call.args[0]
            lists = module.assigned(given.id, given) if isinstance(given, ast.Name) else [given]
            return [(module, found.elts[0]) for found in lists if isinstance(found, ast.List) and found.elts]
        for home in (m for m in (module, *self.modules) if name in m.functions):
            returns = (node for node in ast.walk(home.functions[name]) if isinstance(node, ast.Return))
            return [(home, node.value) for node in returns if node.value is not None]
        return []

    def _part(self, module: Module, part: ast.expr) -> str:
        """A part of an f-string."""
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue)
        text = self.filler(module, part.value)
        return f"'{text}'" if part.conversion == ord("r") else text

    def filler(self, module: Module, node: ast.expr) -> str:
        """What stands for an expression in a gap: a constant's value, else a placeholder."""
        if isinstance(node, ast.Name) and node.id.isupper():
            for _, value in self._named(module, node):
                if isinstance(value, ast.Constant) and isinstance(value.value, (str, int, float)):
                    return str(value.value)
        return placeholder(node)


def placeholder(node: ast.expr) -> str:
    """`<name>`, after what an expression is about: its last name that is not a function's."""
    if isinstance(node, ast.Call):
        if name_of(node.func) == "flag":
            return "<--flag>"
        about = [*node.args, *([node.func.value] if isinstance(node.func, ast.Attribute) else [])]
        about = [a for a in about if not (isinstance(a, ast.Name) and hasattr(builtins, a.id))]
        return next((placeholder(a) for a in about if not isinstance(a, ast.Constant)), "<value>")
    if isinstance(node, ast.Attribute):
        if node.attr == "value":  # of an enumeration
            return placeholder(node.value)
        return "<type>" if node.attr == "__name__" else f"<{node.attr.strip('_').lower()}>"
    if isinstance(node, ast.Name):
        return f"<{node.id.lower()}>"
    if isinstance(node, (ast.Subscript, ast.Starred)):
        return placeholder(node.value)
    if isinstance(node, ast.BinOp):
        return placeholder(node.right if isinstance(node.left, ast.Constant) else node.left)
    if isinstance(node, (ast.GeneratorExp, ast.ListComp)):
        return placeholder(node.generators[0].iter)
    if isinstance(node, ast.IfExp):
        either = [n.value for n in (node.body, node.orelse) if isinstance(n, ast.Constant) and n.value]
        return f"<{' or '.join(map(str, either))}>" if either else placeholder(node.body)
    return placeholder(node.values[0]) if isinstance(node, ast.BoolOp) else "<value>"


def separator_of(call: ast.Call) -> ast.expr:
    """What a call of `join` puts between; nothing where that is not written there."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call
    return owner if isinstance(owner, ast.Constant) else ast.Constant("")


def assignments(scope: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are set to; tuples taken apart where both sides have as many."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names = target.elts if isinstance(target, ast.Tuple) else [target]
                values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
                if len(names) == len(values):
                    yield from ((n.id, v) for n, v in zip(names, values, strict=True) if isinstance(n, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            yield node.target.id, node.value


def name_of(node: ast.AST) -> str:
    """The last part of a dotted name; "" of anything else."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
