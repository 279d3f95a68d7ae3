"""Everyday training on a device gives the bits of plain PyTorch, however far the host is ahead: see `scenarios`."""

import sys
from typing import Any

import pytest
import torch
from scenarios import SCENARIOS, unequal


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, device: str) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    assert unequal(SCENARIOS[name](device)) == []


ODDS = {"late": {"lag": 60}, "poisoned": {"poison": 1}, "slow copies": {"copy_in": 5_000, "copy_out": 5_000}}


@pytest.mark.full
@pytest.mark.skipif("simulated_gpu" not in sys.modules, reason="a real GPU is late by itself")
@pytest.mark.parametrize("odds", ODDS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_twenty_times(name: str, odds: str, simulator: Any) -> None:
    for number in range(20):
        device = "cuda:1" if number % 2 else "cuda"
        with simulator.knobs(seed=number, **ODDS[odds]):
            assert unequal(SCENARIOS[name](device)) == [], f"run {number} on {device}"


def test_what_differs_is_told() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert unequal([(one, one.clone()), (None, None)]) == []
    assert unequal([(one, None), (None, one), (one, other), (one, other.double())]) == [
        "0: there is only that of plain PyTorch",
        "1: there is only ours",
        "2: (2,) differs by up to 0.5",
        "3: (2,) torch.float32 became (2,) torch.float64",
    ]
