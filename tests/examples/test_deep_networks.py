"""docs/deep-networks.md: its Python runs, made tiny, its links lead somewhere, its commands are known."""

import re
from pathlib import Path

import pytest
import torch
from typer.main import get_command

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.models import ResNetConfig

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "deep-networks.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TINY = {
    "250_002": "26",
    "deep(1001": "deep(35",
    'GPTConfig.named("gpt3-175b")': "GPTConfig(4, 64, 4, vocabulary=256)",
}


def test_python_runs_in_the_order_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "\n".join(SNIPPETS)
    for large, small in TINY.items():
        assert large in code
        code = code.replace(large, small)
    found: dict[str, object] = {}
    exec(compile(code, "deep-networks.md", "exec"), found)
    assert found["step"] == 1
    for name in ("model", "network", "gpt"):
        model = found[name]
        assert isinstance(model, torch.nn.Module)
        assert all(bool(p.isfinite().all()) for p in ts.unstream(model).parameters())


@pytest.mark.parametrize("code", re.findall(r"`(ResNetConfig[.(].*?\))`", PAGE))
def test_shapes_that_are_named_exist(code: str) -> None:
    assert isinstance(eval(code, {"ResNetConfig": ResNetConfig, "blocks": 100}), ResNetConfig)


def test_links() -> None:
    targets = re.findall(r"\]\(([^)#]+)(?:#([^)]+))?\)", PAGE)
    assert targets
    for target, anchor in targets:
        titles = re.findall(r"^## (.*)$", (DOCS / target).read_text(), re.MULTILINE)
        known = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
        assert not anchor or anchor in known


def test_commands() -> None:
    commands = get_command(make_app()).commands  # type: ignore[attr-defined]
    shown = re.findall(r"^\$ tapestream (\w+)(.*)$", PAGE, re.MULTILINE)
    assert len(shown) == 4
    for name, arguments in shown:
        known = {option for parameter in commands[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", arguments)) <= known
