"""`tapestream plan --compare`: the table, its JSON, the picture, what is saved."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from tapestream.cli.app import make_app
from tapestream.planners import planners
from tapestream.planning.plan import Plan

MODEL = ["gpt", "--layers", "2", "--width", "128", "--seq", "64", "--vocabulary", "256", "--ram", "1GiB"]
TWO_CHAINS = """
import torch
from torch import nn

class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
        self.second = nn.ModuleList([nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(3)])

    def forward(self, x):
        for block in self.first:
            x = block(x)
        x = x.sum(1, keepdim=True) + x
        for block in self.second:
            x = block(x)
        return x

def both():
    return Both(), torch.randn(8, 64)
"""


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), ["plan", *arguments, "--compare"])


def test_the_table_lists_every_planner_best_first(tmp_path: Path) -> None:
    result = ask(*MODEL, "--budget", "4MiB", "--home", "host", "--save", str(tmp_path / "plan.json"))
    assert result.exit_code == 0
    assert f"{len(planners)} planners, 4.00 MiB allowed on the GPU" in result.stdout
    lines = result.stdout.splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if line.startswith("│")]
    assert all(len(row) == 8 for row in rows)
    rows = [row for row in rows if row[0]]  # others go on with a cell that is wider than its column
    assert sorted(row[0] for row in rows) == sorted(planners)
    assert Plan.load(tmp_path / "plan.json").planner == rows[0][0]
    assert f"planners {len(planners)}/{len(planners)}" in result.stderr


def test_json_says_all_and_the_picture_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tapestream.cli.compare.POINTS", 2)
    result = ask(*MODEL, "--budget", "4MiB", "--home", "host", "--json", "--plot", str(tmp_path / "trade.png"))
    assert result.exit_code == 0
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads(result.stdout)
    assert document["model"]["layers"] == 2
    found = {one["planner"]: one for one in document["planners"]}
    assert set(found) == set(planners)
    seconds = [one["seconds_per_step"] for one in document["planners"] if one["fits"]]
    assert seconds == sorted(seconds)
    assert len(seconds) > 8
    for one in found.values():
        assert one["fits"] == ("reason" not in one)
        assert not one["fits"] or one["peak_nbytes"]["device"] <= 4 * 2**20
    assert found["offload"]["applies"]
    curve = document["trade_off"]["rotor"]
    assert curve[0]["peak_nbytes"] < 4 * 2**20 < curve[-1]["peak_nbytes"]
    assert curve[0]["seconds_per_step"] > curve[-1]["seconds_per_step"]


def test_none_that_fits_is_exit_status_2_and_says_what_each_needs() -> None:
    result = ask(*MODEL, "--budget", "1MiB", "--home", "device")
    assert result.exit_code == 2
    assert result.stdout.count("needs ") >= len(planners) - 2


def test_models_of_two_chains_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "twochains.py").write_text(TWO_CHAINS)
    result = ask("twochains:both", "--blocks", "Sequential", "--budget", "1MiB", "--ram", "1GiB", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["model"]["chains"] == 2
    assert [one for one in found["planners"] if one["fits"]]
