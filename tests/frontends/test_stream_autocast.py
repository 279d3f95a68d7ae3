"""Several calls of a streamed model within one autocast: refused where gradients would be added in another dtype."""

from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from pairs import sgd
from streamable import Chained, Model, numbers
from streaming import budget_at, gradients_of, loss_at, options_of, streamed, train
from torch import nn

from tapestream.errors import GradientError

WIDE = 32


class Twice(nn.Module):
    """Uses one weight twice, so that it is cast once for both: what runs it must clear autocast's cache."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(torch.tanh(self.linear(x))))


class Once(Twice):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Uncast(nn.Module):
    """Nothing that autocast would cast."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale)


KINDS = {kind.__name__: Model(lambda kind=kind: Chained([kind() for _ in range(4)]), numbers(3, WIDE))
         for kind in (Once, Twice, Uncast)}  # fmt: skip
"""Models by the kind of their blocks."""


def gradients_within(model: nn.Module, case: Model, *, calls: int) -> Any:
    seed(3)
    with torch.autocast("cpu", torch.bfloat16):
        sum(loss_at(model, case) for _ in range(calls)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("home", ["disk", "device"])
@pytest.mark.parametrize("kind", KINDS)
def test_refused_or_exact(kind: str, home: str, tmp_path: Path) -> None:
    """Where blocks move, their casts are not plain PyTorch's: the sum of two calls is refused, one call is exact."""
    case, found, plain = KINDS[kind], options_of("auto", tmp_path, home), KINDS[kind].model()
    budget = 8 * budget_at("least", case, sgd, **found)
    with streamed(case, budget, **found | {"planner": "periodic"}) as model:
        optimizer = sgd(model)
        with torch.autocast("cpu", torch.bfloat16):
            train(model, optimizer, case, steps=1)
        plain.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()})
        calls = 2
        if home == "disk" and kind != "Uncast":
            calls = 1
            with pytest.raises(GradientError, match="two calls of one model that were made within one autocast"):
                gradients_within(model, case, calls=2)
            optimizer.zero_grad()
        assert_same(gradients_within(plain, case, calls=calls), gradients_within(model, case, calls=calls))
