"""The benchmark's table made small, under hard limits: its deep network at a hundredth of the depth where plain PyTorch
fails, and every row for two steps."""

import importlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapestream.models import DRANetConfig, GPTConfig, ResNetConfig

ROOT = Path(__file__).parents[2]
# Of each row of the table: the share of the depth, or of a GPT's parameters, and a budget in MiB.
SMALL = [
    (0.01, 4), (0.01, 16), (0.002, 32), (0.01, 48), (0.002, 64), (0.002, 32), (0.002, 96), (0.002, 48), (0.001, 48),
    (0.0002, 32),
]  # fmt: skip
HUNDREDTHS = {2: 128, 4: 96, 5: 48}  # those that are shallower above


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.million_layers")


def test_2502_layers_under_a_hard_limit_where_plain_pytorch_fails(table: Any, tmp_path: Path) -> None:
    """40 million parameters, 162 MB, in 144 MiB for everything above the interpreter."""
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    mib = table.MIB
    job = table.Job("ResNet", ResNetConfig.cifar(2502), 2, 8, steps=2, limit=144 * mib, budget=64 * mib)
    found = table.run(job, chosen)
    assert "failed" not in found, found
    failed = table.run(job.plain(), chosen)
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    first, second = map(float, found["losses"].split())
    assert 0 < second < first < 5
    assert found["groups"] < 200
    assert found["sweeps"] > 1.9
    assert found["saved MiB"] > 150
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "scale", "budget"),
    [
        *(pytest.param(n, *small, marks=pytest.mark.full if n else ()) for n, small in enumerate(SMALL)),
        *(pytest.param(n, 0.01, budget, marks=pytest.mark.full) for n, budget in HUNDREDTHS.items()),
    ],
)
def test_every_row_trains_small_within_its_budget(
    table: Any, number: int, scale: float, budget: int, tmp_path: Path
) -> None:
    """What the child may take beside its budget, for Python objects, threads and code, is 128 MiB."""
    assert len(table.jobs(scale)) == len(SMALL)
    job, mib = table.jobs(scale)[number], table.MIB
    job = replace(job, steps=2, batch=min(2, job.batch), size=min(64, job.size))
    job = replace(job, budget=budget * mib, limit=(budget + 128) * mib)
    found = table.run(job, table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path)))
    assert "failed" not in found, found
    first, second = map(float, found["losses"].split())
    assert math.isfinite(first)
    assert math.isfinite(second)
    assert first != second
    assert found["planned peak MiB"] <= budget
    assert found["process peak MiB"] <= budget + 128
    assert found["moved MiB"] > 0
    assert len(found["steps s"].split()) == 2


def test_jobs_survive_the_way_to_the_child(table: Any) -> None:
    for job in table.jobs(1):
        assert table.Job.from_json(job.to_json()) == job
        assert job.shallow().layers < 60


def test_the_table_is_the_one_asked_for(table: Any) -> None:
    found = table.jobs(1)
    depths = [2502, 25_002, 250_002, 100_002, 1_000_002, 250_001, 2498, 48, 32, 96]
    assert [job.layers for job in found] == depths
    assert [job.layers for job in table.jobs(0.01)][:5] == [26, 252, 2502, 1002, 10_002]
    segmented = found[5].config
    assert isinstance(segmented, DRANetConfig)
    assert segmented.auxiliary > 0
    gigantic = found[-1].config
    assert isinstance(gigantic, GPTConfig)
    assert gigantic.shared
    assert replace(gigantic, shared=False).parameters == pytest.approx(175e9, rel=0.01)


def test_a_run_replaces_its_own_row_in_the_file(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others stay, in the order of the table; a deeper run is compared with the shallowest known."""
    steps = {2502: 10.0, 250_002: 11.0}

    def measured(job: Any, chosen: Any) -> dict[str, Any]:
        return {"step us/layer": steps[job.layers], "process peak MiB": 4.0} if job.budget else {"failed": "no memory"}

    monkeypatch.setattr(table, "run", measured)
    chosen = table.Settings("cpu", quick=False, rounds=1, threads=1, save=True, folder=str(tmp_path))
    shallow, _, deep, *_ = table.jobs(1)
    for job in (deep, shallow):
        monkeypatch.setattr(table, "commit", lambda layers=job.layers: f"at {layers}")
        table.update([job], chosen, tmp_path)
    assert json.loads((tmp_path / "million_layers.json").read_text())["commit"] == "as in the rows, where known"
    rows = json.loads((tmp_path / "million_layers.json").read_text())["rows"]
    assert [(row["layers"], row["commit"]) for row in rows] == [(2502, "at 2502"), (250_002, "at 250002")]
    assert rows[1]["seconds per layer, of the shallowest's"] == 1.1
    assert rows[1]["plain PyTorch"] == "no memory"
    assert rows[1]["claim"].endswith("1.15 times the seconds of the shallowest")
    assert rows[1]["met"] == "yes"
    steps[2502] = 9.0
    table.update([shallow], chosen, tmp_path)
    rows = json.loads((tmp_path / "million_layers.json").read_text())["rows"]
    assert rows[1]["seconds per layer, of the shallowest's"] == 1.222
    assert rows[1]["met"] == "no"


def test_saves_go_beside_the_steps_that_are_there(table: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And stand for themselves where none are."""

    def measured(job: Any, chosen: Any) -> dict[str, Any]:
        steps = {"step us/layer": 10.0, "process peak MiB": 4.0} if job.steps else {}
        return {**steps, "save us/layer": 3.0 - (job.steps > 0)} if job.budget else {"failed": "no memory"}

    monkeypatch.setattr(table, "run", measured)
    chosen = table.Settings("cpu", quick=False, rounds=1, threads=1, save=True, folder=str(tmp_path))
    shallow, middle, deep, *_ = table.jobs(1)
    table.update([deep], chosen, tmp_path)
    table.update([replace(job, steps=0) for job in (shallow, middle, deep)], chosen, tmp_path)
    rows = json.loads((tmp_path / "million_layers.json").read_text())["rows"]
    assert [row["layers"] for row in rows] == [2502, 25_002, 250_002]
    assert [row["save us/layer"] for row in rows] == [3.0] * 3
    assert ["met" in row for row in rows] == [False, False, True]
    assert rows[2]["step us/layer"] == 10.0
