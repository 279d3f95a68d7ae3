"""Memory and objects that something outside of torch may change inside a program, and users' code inside a call."""

import array
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from side_by_side import compare, least
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tapestream.errors import GradientError
from tapestream.frontends.program.program import Program

SIZE = 32
torch.manual_seed(0)
W = nn.Parameter(torch.randn(SIZE, SIZE) / 6)


def made() -> tuple[torch.Tensor]:
    return (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)),)


def often(body: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            y = (x @ W).detach() * 1.0
            x = torch.tanh(x @ W) + torch.sin(body(y))
        return x

    return program


def by_numpy(y: torch.Tensor) -> torch.Tensor:
    shown = y.numpy()
    shown *= 0.5
    return y


def by_array(y: torch.Tensor) -> torch.Tensor:
    numpy.asarray(y[:4])[:] = 0
    return y


def by_dlpack(y: torch.Tensor) -> torch.Tensor:
    torch.from_dlpack(y).mul_(0.5)
    return y


def by_storage(y: torch.Tensor) -> torch.Tensor:
    y.untyped_storage().fill_(0)
    return y


@pytest.mark.parametrize("body", [by_numpy, by_array, by_dlpack, by_storage])
def test_writes_that_torch_does_not_see_are_refused_where_something_has_to_run_again(body: Any) -> None:
    run = often(body)
    compare(run, [W], made, 2**30, calls=3, planner="auto", reruns=False)
    program = Program(run, budget=least(run, [W], made, 0), planner="revolve")
    with pytest.raises(GradientError, match="NumPy, DLPack, its storage or its address"):
        program(*made()).sum().backward()


def test_what_is_only_read_or_written_by_torch_is_no_matter() -> None:
    def body(y: torch.Tensor) -> torch.Tensor:
        assert float(y.numpy().sum()) == float(y.sum()) or y.data_ptr()
        y.mul_(0.5)
        assert y.numpy().shape == y.shape
        return y.add_(0.1)

    run = often(body)
    for budget in (least(run, [W], made, 0), 2**30):
        compare(run, [W], made, budget, calls=3, planner="auto", reruns=budget < 2**30)


def test_arrays_and_bytes_that_go_on_changing() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        numbers, raw = array.array("f", [1.0] * SIZE), bytearray(4 * SIZE)
        for i in range(8):
            numbers[i] = raw[4 * i] = i
            x = torch.tanh(x @ W) * torch.tensor(numbers) + torch.frombuffer(raw, dtype=torch.uint8)[::4].clone()
        return x

    for budget in (least(run, [W], made, 0), 2**30):
        compare(run, [W], made, budget, calls=3, reruns=budget < 2**30)


class Box:
    """Stands for a tensor by torch's protocol."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(one.tensor if isinstance(one, Box) else one for one in args), **(kwargs or {}))


def test_objects_that_stand_for_tensors() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        box = Box(torch.zeros(SIZE))
        for _ in range(8):
            x = torch.tanh(x @ W)
            box.tensor += x.detach().mean(0)
            x = torch.sin(torch.add(x, box))
        return x

    for budget in (least(run, [W], made, 0), 2**30):
        compare(run, [W], made, budget, calls=3, reruns=budget < 2**30)


def test_functions_that_calls_are_given_run_as_often_as_in_plain_pytorch() -> None:
    def distance(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a - b).norm(dim=1) * random.random()

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(x @ W)
            x = x + nn.functional.triplet_margin_with_distance_loss(
                x, x.roll(1, 0), x.roll(2, 0), distance_function=distance
            )
        return x

    compare(run, [W], made, 2**30, calls=3, planner="auto", reruns=False)
    with pytest.raises(GradientError, match="draws from Python's or NumPy's"):
        compare(run, [W], made, least(run, [W], made, 0))


def test_what_a_mode_of_the_users_counts_is_what_the_program_does() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(x @ W)
        return x

    counted = []
    for one in (run, Program(run, budget=2**30)):
        with FlopCounterMode(display=False) as mode:
            one(*made())
        counted.append(mode.get_total_flops())
    assert counted[0] == counted[1] > 0
