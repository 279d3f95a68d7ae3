"""What users give by mistake is told when it is given, with what was meant, not by the first call that plans."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError


def net() -> nn.Module:
    return nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))


def step(x: torch.Tensor) -> torch.Tensor:
    return x


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "stream, budget": (lambda: ts.stream(net(), device="cpu", buget="1MiB"), "did you mean 'budget'"),
    "stream, folder": (lambda: ts.stream(net(), device="cpu", foldr="x"), "did you mean 'folder'"),
    "Chain": (lambda: ts.Chain(list(net()), buget="1MiB"), "Chain has no argument 'buget'.*did you mean 'budget'"),
    "Loop": (lambda: ts.Loop(step, buget="1MiB"), "Loop has no argument 'buget'.*did you mean 'budget'"),
    "knob": (lambda: ts.Chain(list(net()), planner="revolve", slot=3), "has the knobs slots; did you mean 'slots'"),
    "planner": (lambda: ts.Chain(list(net()), planner="revolv"), "did you mean 'revolve'"),
    "function": (lambda: ts.stream(step), "found a function; ts.Program takes functions"),
    "class": (lambda: ts.stream(nn.Linear), "found the class Linear"),
    "stages": (lambda: ts.Chain(nn.Linear(3, 3)), "in a list; found Linear"),
    "no stages": (lambda: ts.Chain([]), "found an empty one"),
    "stream, device": (lambda: ts.stream(net(), device="tpu"), "device='tpu' was asked for"),
    "Chain, device": (lambda: ts.Chain(list(net()), device="tpu"), "device='tpu' was asked for"),
    "Program, device": (lambda: ts.Program(step, device="tpu"), "device='tpu' was asked for"),
    "stream, folder of another kind": (lambda: ts.stream(net(), device="cpu", folder=3), "folder=3 was given"),
    "Chain, folder of another kind": (lambda: ts.Chain(list(net()), folder=3), "folder=3 was given"),
    "report of a Chain": (
        lambda: ts.report(ts.Chain(list(net()))),
        "this Chain has not been called with gradients yet",
    ),
    "optimizer of parameters": (lambda: ts.optimizer(net().parameters(), torch.optim.SGD), "give the model itself"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_told_at_once(mistake: str) -> None:
    make, message = MISTAKES[mistake]
    with pytest.raises(InputError, match=message):
        make()


def test_a_refused_folder_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home"
    with pytest.raises(InputError, match="did you mean 'budget'"):
        ts.stream(net(), device="cpu", folder=folder, buget="1MiB")
    assert not folder.exists()


def test_knobs_of_planners_and_of_open_loops_are_known() -> None:
    ts.Chain(list(net()), planner="revolve", slots=3)
    ts.Loop(step, slots=3, rule="wang_moin")


def test_plans_are_short_at_a_prompt() -> None:
    chain = ts.Chain(list(net()), budget="1MiB")
    chain(torch.randn(2, 3))
    assert repr(chain.plan).startswith("<Plan by store_all for 3 stages: ")
    assert ts.__version__


def test_a_batch_without_numbers_is_refused_with_what_to_give() -> None:
    net = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)])
    ts.stream(net, budget="1MiB", device="cpu")
    with pytest.raises(InputError, match=r"batch is on the meta device.*torch\.zeros"):
        ts.plan(net, torch.empty(2, 4, device="meta"))
    ts.unstream(net)
