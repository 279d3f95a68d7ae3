"""Functions of PyTorch that are many nodes of the graph: what each node has saved goes as it is reversed, as plain."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tapestream.errors import BudgetError
from tapestream.frontends.program.program import Program
from tapestream.planning.exceeded import limit_of
from tapestream.storage.meter import track_memory

NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(16, 32, 2, batch_first=True),
    "LSTM, both ways": lambda: nn.LSTM(16, 32, 2, bidirectional=True, batch_first=True),
    "LSTM, without biases": lambda: nn.LSTM(16, 32, 2, bias=False, batch_first=True),
    "GRU": lambda: nn.GRU(16, 32, 3, batch_first=True),
    "tanh": lambda: nn.RNN(16, 32, 3, batch_first=True),
    "relu": lambda: nn.RNN(16, 32, 2, nonlinearity="relu", bidirectional=True, batch_first=True),
}


class Net:
    """A network, its input, and a loss."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(1)
        self.net, self.x = NETWORKS[name](), torch.randn(8, 40, 16)
        self.parameters = list(self.net.parameters())

    def loss(self) -> Any:
        return self.net(self.x)[0].square().mean()

    def step(self, loss: Callable[[], torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
        """The peak in bytes, and the gradients."""
        for p in self.parameters:
            p.grad = None
        with track_memory() as meter:
            loss().backward()  # type: ignore[no-untyped-call]
        return meter.peak_nbytes, [p.grad.clone() for p in self.parameters if p.grad is not None]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(torch.equal, some, others))


@pytest.mark.parametrize("name", NETWORKS)
def test_holds_no_more_than_plain(name: str) -> None:
    net = Net(name)
    plain, wanted = net.step(net.loss)
    gradients = sum(g.nbytes for g in wanted)
    program = Program(net.loss, budget="1GiB")
    program().backward()  # a first call is measured, which nothing else must be doing
    for _ in range(2):
        peak, found = net.step(program)
        assert equal(found, wanted)
        assert peak <= limit_of(plain)
    with pytest.raises(BudgetError) as raised:
        Program(net.loss, budget=1)()
    least = raised.value.least_nbytes
    assert least is not None
    assert least <= limit_of(plain)  # which the gradients do not count in
    program = Program(net.loss, budget=least)
    program().backward()
    for _ in range(2):
        peak, found = net.step(program)
        assert equal(found, wanted)
        assert peak - gradients <= limit_of(least)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("budget", ["1GiB", "least"])
def test_part_of_a_backward_and_then_others(name: str, budget: str) -> None:
    """What the first part has let go of comes back."""
    net = Net(name)
    with pytest.raises(BudgetError) as raised:
        Program(net.loss, budget=1)()
    program = Program(net.loss, budget=budget if budget != "least" else 2 * (raised.value.least_nbytes or 0))

    def several(loss: torch.Tensor) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        parameters = net.parameters
        for wanted in (parameters[-1:], parameters[:1], parameters, parameters[1:3]):
            found += torch.autograd.grad(loss, wanted, retain_graph=True)
        return found

    wanted = several(net.loss())
    for _ in range(3):
        assert equal(several(program()), wanted)
