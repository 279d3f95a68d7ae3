"""Everyday training on a device gives the bits of plain PyTorch, however far the host is ahead: see `scenarios`."""

import pytest
import torch
from scenarios import SCENARIOS, unequal


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str, device: str) -> None:
    if device == "cuda:1" and torch.cuda.device_count() < 2:
        pytest.skip("there is one device")
    assert unequal(SCENARIOS[name](device)) == []


def test_what_differs_is_told() -> None:
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5])
    assert unequal([(one, one.clone()), (None, None)]) == []
    assert unequal([(one, None), (None, one), (one, other), (one, other.double())]) == [
        "0: there is only that of plain PyTorch",
        "1: there is only ours",
        "2: (2,) differs by up to 0.5",
        "3: (2,) torch.float32 became (2,) torch.float64",
    ]
