"""Finds every wait that the library asks of an accelerator, in its source, and takes one away at a time."""

import ast
import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import tapestream

ROOT = Path(tapestream.__file__).parent
_FOR_UPDATES = {"end_updates", "end_on_host"}
_ANYWHERE = {"wait_event", "wait_stream", "synchronize", "settle_uses", "hand_over", *_FOR_UPDATES}
_OF = {
    "wait": {"api", "engine"},
    "settle": {"use"},
    "end": {"on_host"},
    "finish": {"on_host"},
}  # by what it is asked of
_NOT_HERE = {"executor/engines/fake_streams.py", "executor/engines/adversarial.py"}  # engines for tests, on the CPU


@dataclass(frozen=True)
class Wait:
    """A statement that asks for a wait: ``function`` holds it, the outermost one or a method."""

    file: str
    line: int
    function: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.function}: {self.text}"


@functools.cache
def every_wait() -> tuple[Wait, ...]:
    """All of them, by file and line."""
    found = []
    for path in sorted(ROOT.rglob("*.py")):
        file = path.relative_to(ROOT).as_posix()
        if file not in _NOT_HERE:
            found += [Wait(file, *where) for where in _waits_in(ast.parse(path.read_text()), "")]
    return tuple(found)


def _waits_in(tree: ast.AST, function: str) -> Iterator[tuple[int, str, str]]:
    for node in ast.iter_child_nodes(tree):
        if _is_wait(node):
            assert isinstance(node, ast.stmt)
            yield node.lineno, function, ast.unparse(node).splitlines()[0]
        inside = function
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.FunctionDef) and not isinstance(tree, ast.stmt)):
            inside = node.name
        elif isinstance(node, ast.FunctionDef) and isinstance(tree, ast.ClassDef):
            inside = f"{function}.{node.name}"
        yield from _waits_in(node, inside)


def _is_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.With):  # copies in such a block wait
        return ast.unparse(node.items[0].context_expr) == "_Waiting()"
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return False
    called = node.value.func
    if isinstance(called, ast.Name):
        return called.id in _ANYWHERE or called.id in ("_settle", "ready")
    if not isinstance(called, ast.Attribute):
        return False
    owner = ast.unparse(called.value).split(".")[-1].lstrip("_")
    return called.attr in _ANYWHERE or owner in _OF.get(called.attr, ())


def is_for_updates(wait: Wait) -> bool:
    """Whether it is for an update in RAM, or asked by one."""
    return wait.text == "ready()" or "on_host." in wait.text or any(f"{name}(" in wait.text for name in _FOR_UPDATES)


@contextmanager
def without(wait: Wait) -> Iterator[None]:
    """Inside, nobody asks for it: its function runs code in which the statement is missing."""
    function = _function_of(wait)
    before = function.__code__
    function.__code__ = _code_without(wait, before)
    try:
        yield
    finally:
        function.__code__ = before


def _function_of(wait: Wait) -> FunctionType:
    found: Any = importlib.import_module(".".join(("tapestream", *Path(wait.file).with_suffix("").parts)))
    for name in wait.function.split("."):
        found = vars(found)[name]
    assert isinstance(found, FunctionType), f"{wait} is in a decorated function, which this cannot change"
    return found


def _code_without(wait: Wait, like: CodeType) -> CodeType:
    tree = _Without(wait.line).visit(ast.parse((ROOT / wait.file).read_text()))
    codes = [compile(ast.fix_missing_locations(tree), like.co_filename, "exec", dont_inherit=True)]
    for code in codes:
        if code.co_qualname == like.co_qualname:
            return code
        codes.extend(inner for inner in code.co_consts if isinstance(inner, CodeType))
    raise LookupError(f"{wait} is in no function")


class _Without(ast.NodeTransformer):
    """Replaces the wait of one line."""

    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self._line and _is_wait(node) else node

    def visit_With(self, node: ast.With) -> Any:
        if node.lineno == self._line and _is_wait(node):
            return node.body
        return self.generic_visit(node)
