"""docs/my-model-does-not-fit.md: its links and commands are right. Python of all pages uses names that exist."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import tapestream as ts
from tapestream.cli.app import make_app

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "my-model-does-not-fit.md").read_text(encoding="utf-8")
PAGES = {page.name: page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md"))}
SNIPPETS = [
    pytest.param(code, id=f"{name}-{number}")
    for name, page in PAGES.items()
    if name != "deep-networks.md"  # which is run
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
]


def test_links() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", GUIDE)
    assert targets
    assert [target for target in targets if not (DOCS / target).is_file()] == []
    titles = {re.sub(r"\W+", "-", title.lower()) for title in re.findall(r"^## (.*)$", GUIDE, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", GUIDE)) <= titles


def of_ours(code: str) -> Iterator[tuple[str, set[str | None]]]:
    """Calls of ``ts.name``: the name, and the keywords given."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "ts":
            yield node.func.attr, {keyword.arg for keyword in node.keywords}


@pytest.mark.parametrize("code", SNIPPETS)
def test_python(code: str) -> None:
    for name, keywords in of_ours(code):
        parameters = inspect.signature(getattr(ts, name)).parameters
        if any(one.kind is one.VAR_KEYWORD for one in parameters.values()) and name != "optimizer":
            continue  # what is to be saved is the caller's
        known = set(parameters)
        if name == "optimizer":
            known |= set(inspect.signature(torch.optim.AdamW).parameters)
        assert keywords <= known


def test_the_loop_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGES["loops.md"], re.DOTALL)
    assert "100_000" in code
    found: dict[str, object] = {}
    exec(compile(code.replace("100_000", "200"), "loops.md", "exec"), found)
    weight = found["weight"]
    assert isinstance(weight, torch.Tensor)
    assert weight.grad is not None


def test_commands() -> None:
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    shown = re.findall(r"^\$ tapestream (\w+)(.*)$", GUIDE, re.MULTILINE)
    assert shown
    for name, arguments in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known
