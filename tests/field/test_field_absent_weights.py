"""Models whose weights are not there: refused with what to do, before anything is drawn or trained."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from both_sides import AMPLE, HOMES, WIDTH, plain, sgd, trained
from exact import assert_same
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

accelerate = pytest.importorskip("accelerate")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(4)])


def one_weight(model: Any, folder: Path) -> Any:
    model[2][0].weight = nn.Parameter(model[2][0].weight.to("meta"))
    return model


def one_buffer(model: Any, folder: Path) -> Any:
    model[1][1].running_mean = model[1][1].running_mean.to("meta")
    return model


def one_block(model: Any, folder: Path) -> Any:
    model[3].to("meta")
    return model


def offloaded_to_ram(model: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(model, execution_device=torch.device("cpu"), offload_buffers=True)


def offloaded_to_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder), execution_device=torch.device("cpu"))


def dispatched(model: Any, folder: Path) -> Any:
    places = {"0": "cpu", "1": "cpu", "2": "disk", "3": "disk"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


WAYS = (one_weight, one_buffer, one_block, offloaded_to_ram, offloaded_to_disk, dispatched)


def stream(model: Any, home: str, folder: Path) -> Any:
    below: dict[str, Any] = {"folder": folder / "home"} if home == "disk" else {}
    return ts.stream(model, device="cpu", budget=AMPLE, home=home, **below)


@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("way", WAYS)
def test_refused_by_name(way: Callable[[Any, Path], Any], home: str, tmp_path: Path) -> None:
    model, random = way(net(), tmp_path), torch.get_rng_state()
    with pytest.raises(InputError, match=r"meta device|accelerate's hooks"):
        stream(model, home, tmp_path)
    assert torch.equal(random, torch.get_rng_state())


@pytest.mark.parametrize("home", HOMES)
def test_the_advice_works(home: str, tmp_path: Path) -> None:
    """The model without the hooks, whose weights are there again."""
    expected = plain(net)
    model = offloaded_to_ram(net(), tmp_path)
    accelerate.hooks.remove_hook_from_module(model, recurse=True)
    torch.manual_seed(0)
    model = stream(model, home, tmp_path)
    assert_same(expected, trained(model, sgd(model)))
    ts.unstream(model)
