"""`tapestream explain`: a table, a picture, JSON, and one line of advice for what cannot be explained."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tapestream.cli.app import make_app

PROGRAMS = """
import torch
from torch import nn

W = torch.randn(32, 32, requires_grad=True)


def tanhs(x, steps=40):
    for _ in range(steps):
        x = torch.tanh(x @ W)
    return x.sum()


def alone():
    return tanhs(torch.ones(16, 32))


def with_arguments():
    return tanhs, {"x": torch.ones(16, 32), "steps": 10}


def module():
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)), torch.ones(4, 8)


def bare():
    return nn.Linear(8, 8)


def fails():
    raise ValueError("no data here")


def fails_later():
    return (lambda x: x.view(7)), torch.ones(4, 8)


def without_gradients():
    return torch.ones(3) * 2


def nothing():
    torch.tanh(W)


def number():
    return 3.0


not_a_function = 7
"""


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "programs.py").write_text(PROGRAMS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    yield
    sys.modules.pop("programs", None)
    sys.path[:] = [folder for folder in sys.path if folder != str(tmp_path)]


def ask(*words: str) -> Result:
    return CliRunner().invoke(make_app(), ["explain", *words])


def test_the_heaviest_saved_tensors_with_their_lines() -> None:
    result = ask("programs:alone", "--budget", "20KiB", "--rows", "5")
    assert result.exit_code == 0, result.output
    line = 1 + PROGRAMS.splitlines().index("        x = torch.tanh(x @ W)")
    assert result.stdout.count(f"programs.py:{line} ") == 4
    assert "programs.py:15 " in result.stdout
    assert "and 36 lighter ones" in result.stdout
    assert "recomputed" in result.stdout


def test_json_and_a_picture(tmp_path: Path) -> None:
    result = ask("programs:with_arguments", "--budget", "1MiB", "--json", "--plot", "live.png")
    found = json.loads(result.stdout)
    assert found["operations"] == 21
    assert found["sums"]["kept"] == {"tensors": 10, "nbytes": 10 * 16 * 32 * 4}
    assert found["saved"][0]["operation"] == "tanh"
    assert found["peak_nbytes"] <= found["budget_nbytes"] == 2**20
    assert (tmp_path / "live.png").read_bytes().startswith(b"\x89PNG")


def test_a_module_with_its_arguments() -> None:
    found = json.loads(ask("programs:module", "--budget", "1MiB", "--json").stdout)
    assert [row["operation"] for row in found["saved"]] == ["tanh"]


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["programs"], "name module:function"),
        (["programs:missing"], "it has tanhs, alone"),
        (["programs:not_a_function"], "no function 'not_a_function'"),
        (["no_such_module:f"], "set PYTHONPATH"),
        (["programs:bare"], "return (Linear, arguments)"),
        (["programs:fails"], "raised ValueError: no data here"),
        (["programs:fails_later"], "raised RuntimeError"),
        (["programs:without_gradients"], "saves nothing for backward"),
        (["programs:nothing"], "returned NoneType"),
        (["programs:number"], "returned float"),
        (["programs:alone", "--budget", "1KiB"], "least found to work"),
        (["programs:alone", "--planner", "best"], "best"),
        (["programs:fails", "--plot", "nodir/live.png"], "there is no folder 'nodir'; create it"),
        (["programs:fails", "--plot", "live.docx"], "end its name in one of"),
    ],
)
def test_errors_are_one_line_with_advice(words: list[str], advice: str) -> None:
    result = ask(*words)
    assert result.exit_code == 2
    assert advice in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
