"""The benchmark's table at a hundredth of the depth: under a hard limit where plain PyTorch fails."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapestream.models import DRANetConfig, ResNetConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.million_layers")


def test_2502_layers_under_a_hard_limit_where_plain_pytorch_fails(table: Any, tmp_path: Path) -> None:
    """40 million parameters, 162 MB, in 128 MiB for everything above the interpreter."""
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    mib = table.MIB
    job = table.Job("ResNet", ResNetConfig.cifar(2502), 2, 8, steps=2, limit=128 * mib, budget=64 * mib)
    found = table.run(job, chosen)
    assert "failed" not in found, found
    failed = table.run(replace(job, budget=0), chosen)
    assert "memory" in failed["failed"] or "alloc" in failed["failed"]
    first, second = map(float, found["losses"].split())
    assert 0 < second < first < 5
    assert found["groups"] < 200
    assert found["sweeps"] > 1.9
    assert not any(tmp_path.iterdir())


def test_jobs_survive_the_way_to_the_child(table: Any) -> None:
    for job in table.jobs(1):
        assert table.Job.from_json(job.to_json()) == job
        assert job.shallow().backbone.depth < 60


def test_the_table_is_the_one_asked_for(table: Any) -> None:
    depths = [job.backbone.depth for job in table.jobs(1)]
    assert depths == [2502, 250_002, 100_002, 1_000_002, 250_001, 2498]
    assert [job.backbone.depth for job in table.jobs(0.01)][:4] == [26, 2502, 1002, 10_002]
    segmented = table.jobs(1)[4].config
    assert isinstance(segmented, DRANetConfig)
    assert segmented.auxiliary > 0
