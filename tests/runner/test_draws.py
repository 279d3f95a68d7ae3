"""How many random numbers were drawn: generators can be put behind them before they are."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.draws import Draws

DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "dropout": lambda: functional.dropout(torch.ones(1000), 0.1),
    "uniform": lambda: torch.rand(37),
    "many": lambda: torch.rand(5000),
    "normal": lambda: torch.randn(32),
    "integers": lambda: torch.randint(0, 17, (3, 5)),
    "permutation": lambda: torch.randperm(99),
    "doubles": lambda: torch.rand(11, dtype=torch.float64),
}


@pytest.mark.parametrize("before", [0, 1, 600, 623, 624, 625])
@pytest.mark.parametrize("name", DRAWS)
def test_generators_are_put_behind_draws(name: str, before: int) -> None:
    torch.manual_seed(5)
    torch.rand(before)
    start = TorchGenerators.capture(torch.device("cpu"))
    DRAWS[name]()
    once = TorchGenerators.capture(torch.device("cpu"))
    found = Draws.between(start, once)
    assert found is not None
    DRAWS[name]()
    twice = TorchGenerators.capture(torch.device("cpu"))
    assert found.behind(start).equals(once)
    assert found.behind(once).equals(twice)
    assert once.still() is (name == "nothing")  # nobody has drawn meanwhile


def test_what_cannot_be_told_is_not() -> None:
    start = TorchGenerators.capture(torch.device("cpu"))
    torch.randn(3)  # one number of a pair waits for the next draw
    assert Draws.between(start, TorchGenerators.capture(torch.device("cpu"))) is None
    torch.randn(1)
    start = TorchGenerators.capture(torch.device("cpu"))
    state = torch.Generator().manual_seed(77).get_state()
    other = TorchGenerators(state, start.others)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tapestream.runner.draws._MOST", 10_000)
        assert Draws.between(start, other) is None
