"""Ranks of one group, memory told by a child, and the steps of ours beside DeepSpeed, which need not be installed."""

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[2]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.ranks_deepspeed")


def trained(rank: int, ranks: int, folder: str, table: Any) -> list[bool]:
    """Whether two steps of each home give the weights of DistributedDataParallel."""
    case, found = table.case_of(quick=True), []
    plain = case.network()
    averaged = nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.AdamW(averaged.parameters(), fused=True)
    step = table.stepper(rank, case, averaged, optimizer)
    step()
    step()
    for home, part in table.HOMES.values():
        network = case.network()
        step = table.our_step(rank, case, network, home, 10 * 2**20 // part, folder)
        step()
        step()
        with table.ts.whole(network):
            found.append(table.same_bits(list(plain.parameters()), list(network.parameters())))
        table.ts.unstream(network)
    return found


def test_steps_of_ours_are_those_of_plain_ranks(table: Any, tmp_path: Path) -> None:
    assert table.in_ranks(2, str(tmp_path), trained, table) == [[True, True]] * 2
    assert not any(tmp_path.iterdir())


def test_memory_is_told_by_a_child(table: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{ROOT}")
    chosen = table.Settings("cpu", quick=True, rounds=1, threads=1, save=False, folder=str(tmp_path))
    assert table._held(2, "device", 10 * 2**20, chosen) > 2**20


def test_without_deepspeed_one_line(
    table: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("deepspeed") is not None:
        pytest.skip("it is installed")
    monkeypatch.setattr(sys, "argv", ["ranks_deepspeed", "--quick"])
    table.main()
    assert capsys.readouterr().out.startswith("DeepSpeed is not installed")
