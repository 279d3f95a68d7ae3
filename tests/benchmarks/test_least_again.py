"""The bound on what plans of programs run again."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import numpy
import pytest
import torch
from torch import nn

import tapestream as ts
from benchmarks.least_again import borders_of, least_seconds, seconds_again
from tapestream.frontends.program.sizes import Sizes
from tapestream.storage.meter import track_memory

ROWS, WIDTH = 32, 64
NBYTES = ROWS * WIDTH * 4  # of one value


@pytest.fixture(autouse=True)
def seconds_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sizes, "seconds", lambda sizes: 1.0 + numpy.arange(len(sizes.record)) % 5)


def test_values_that_save_the_most_seconds_are_kept() -> None:
    """Eight results of equal size that backward reads, each long to make by its number: room for three of them."""

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = x.exp()
        return x.sum()

    run = ts.Program(program, budget="1GiB")
    borders = borders_of(run)
    run(torch.full((ROWS, WIDTH), -40.0, requires_grad=True)).backward()
    found = [least_seconds(borders[-1], count * NBYTES) for count in range(10)]
    seconds = [1, 2, 3, 4, 5, 1, 2, 3]  # the k-th result is needed by the next one too, where that runs again
    assert found[0] == pytest.approx(sum(seconds))
    assert found[3] == pytest.approx(sum(seconds) - (5 + 4 + 3))
    assert found[8] == found[9] == 0
    assert all(a > b for a, b in pairwise(found[:9]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("share", [0.45, 0.6, 0.8])
@pytest.mark.parametrize("kind", ["linear", "convolutional"])
def test_no_plan_is_below_the_bound(kind: str, share: float) -> None:
    torch.manual_seed(0)
    block: tuple[Callable[[], nn.Module], ...]
    if kind == "linear":
        block = (partial(nn.Linear, WIDTH, WIDTH), nn.GELU, partial(nn.LayerNorm, WIDTH))
        make = partial(torch.randn, ROWS, WIDTH)
    else:
        block = (partial(nn.Conv2d, 4, 4, 3, padding=1), partial(nn.BatchNorm2d, 4), nn.ReLU)
        make = partial(torch.randn, 4, 4, 16, 16)
    net = nn.Sequential(*(layer() for _ in range(12) for layer in block))
    x = make()
    with track_memory() as meter:
        loss = net(x).square().sum()
    del loss
    budget = int(share * meter.end_nbytes)
    run = ts.Program(lambda x: net(x).square().sum(), budget=budget)
    borders = borders_of(run)
    for _ in range(4):
        run(x).backward()
    least = least_seconds(borders[-1], budget)
    assert 0 < least <= seconds_again(run, borders[-1])
