"""The table for a GPU runs small on the CPU, by the same code."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tapestream.cli.loop import model_of
from tapestream.models import GPTConfig, ResNetConfig

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gpu.million_layers")


def test_the_table_is_the_one_asked_for(table: Any) -> None:
    resnet, smaller, *gigantic = table.jobs(quick=False)
    assert (resnet.layers, resnet.batch) == (250_002, 32)
    assert smaller.config.parameters == pytest.approx(13e9, rel=0.02)
    assert [job.size for job in gigantic] == [2048, 8192]
    for job in gigantic:
        assert replace(job.config, shared=False, tied=True, context=2048).parameters == pytest.approx(175e9, rel=0.01)
    for job in (resnet, smaller, *gigantic):
        assert table.Job.from_json(job.to_json()) == job
        assert job.budget <= job.limit == 12e9


def test_flops_of_a_resnet_are_those_counted_one_by_one(table: Any) -> None:
    config = ResNetConfig("basic", (2, 4, 3), width=8, stem="cifar", classes=10, group_nbytes=0)
    job = table.Job("ResNet", config, 2, 16, 1, 0, 0)
    images, targets = table.batch_of(job)
    with FlopCounterMode(display=False) as counter:
        model_of(config)(images, targets).backward()
    assert table.flops_of(job) == counter.get_total_flops()


def test_flops_of_a_gpt_that_can_be_counted_by_hand(table: Any) -> None:
    """Width 64, 32 tokens, two layers: products with 64 x 192, 64 x 64, 64 x 256 and 256 x 64 numbers, and a head."""
    job = table.Job("GPT", GPTConfig(2, 64, 4, vocabulary=256), 3, 32, 1, 0, 0)
    products = 2 * 32 * (2 * (64 * 192 + 64 * 64 + 2 * 64 * 256) + 64 * 256)
    attention = 2 * (2 * 2 * 32 * 32 * 64) / 2
    assert table.flops_of(job) == 3 * 3 * (products + attention)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_steps_are_those_of_plain_pytorch(table: Any, number: int, tmp_path: Path) -> None:
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    job = table.jobs(quick=True)[number]
    found, wanted = table.streamed(job, chosen), table.plain(replace(job, steps=job.steps), "cpu")
    losses, plain = ([float(loss) for loss in row["losses"].split()] for row in (found, wanted))
    assert len(losses) == job.steps
    assert losses == pytest.approx(plain, rel=0 if job.config.__class__ is ResNetConfig else 1e-5)
    assert losses[-1] < losses[0]
    assert found["share"] > 0  # of seconds measured: small steps of a busy machine say nothing more
    assert found["planned MiB"] * 2**20 <= job.budget
    assert not any(tmp_path.iterdir())


@pytest.mark.full
def test_a_run_in_a_process_of_its_own(table: Any, tmp_path: Path) -> None:
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    job = table.jobs(quick=True)[1]
    [row] = table.rows([job], chosen)
    assert row["network"] == job.name
    assert row["step s"] > 0
    assert row["plain PyTorch"] == "fits"  # on the CPU nothing caps it
    failed = table.run(replace(job, budget=2**10), chosen)["failed"]
    assert "BudgetError" in failed
    assert "least" in failed


def test_what_plain_pytorch_fails_of_is_a_row(table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore")

    monkeypatch.setattr(table, "plain", full)
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    assert table.child(table.jobs(quick=True)[0].plain(), chosen) == {"failed": "CUDA out of memory. Tried to allocate"}
