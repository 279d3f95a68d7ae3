"""The same training by plain PyTorch and by a streamed model: at both homes, at an ample and at the least budget."""

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from exact import Trace, assert_same, copy_of, seed
from streaming import DIRECT
from things_kept import alive, whole_peak
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of

WIDTH = 16
AMPLE = 2**28
HOMES = ("disk", "device")

Change = Callable[[Any, Any, int], None]
"""What is done to a model and its optimizer before a step."""


def rows(number: int = 0, count: int = 8, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number))


def squares(model: Any, number: int) -> torch.Tensor:
    """A loss of the batch ``number``."""
    loss: torch.Tensor = model(rows(number)).square().mean()
    return loss


def unchanged(model: Any, optimizer: Any, step: int) -> None:
    """The change that does nothing."""


def trained(
    model: nn.Module,
    optimizer: Any,
    loss: Callable[[Any, int], torch.Tensor] = squares,
    before: Change = unchanged,
    steps: int = 2,
) -> Trace:
    """Losses, gradients, what the model holds, and the random generator, after each step."""
    trace: Trace = {}
    for step in range(steps):
        seed(step)
        before(model, optimizer, step)
        value = loss(model, step)
        value.backward()
        trace[f"{step} loss"] = copy_of(value)
        del value
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        trace |= {f"{step} {name}": copy_of(t) for name, t in model.state_dict().items()}
        trace[f"{step} generator"] = torch.get_rng_state()
    return trace


@contextlib.contextmanager
def streamed(make: Callable[[], nn.Module], home: str, folder: Path, budget: int, **options: Any) -> Iterator[Any]:
    """A fresh model, streamed; a plain one in the end."""
    torch.manual_seed(0)
    below: dict[str, Any] = {"folder": folder} if home == "disk" else {}
    model = ts.stream(make(), device="cpu", machine=DIRECT, budget=budget, home=home, **below, **options)
    try:
        yield model
    finally:
        ts.unstream(model)


def sgd(model: nn.Module, **options: Any) -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, **options)


def plain(make: Callable[[], nn.Module], **options: Any) -> Trace:
    """Trained by plain PyTorch."""
    torch.manual_seed(0)
    model = make()
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), **options)


def assert_exact(make: Callable[[], nn.Module], folder: Path, home: str = "disk", **options: Any) -> None:
    """Plain PyTorch's bits at the least budget of one home, which holds, and with ample room at the other."""
    expected = plain(make, **options)
    assert_same(expected, at_the_least(make, home, folder, **options))
    (other,) = set(HOMES) - {home}
    with streamed(make, other, folder, AMPLE) as model:
        assert_same(expected, trained(model, sgd(model), **options))


def at_the_least(make: Callable[[], nn.Module], home: str, folder: Path, **options: Any) -> Trace:
    """What training gives at the least budget, asked for as users do; all that is alive in a step is within it."""
    gc.collect()
    base, budget = alive(), 1
    for _ in range(12):
        try:
            with streamed(make, home, folder, budget) as model:
                optimizer = sgd(model)
                found = trained(model, optimizer, **options)
                base += sum(t.nbytes for t in found.values() if t is not None)
                loss = options.get("loss", squares)
                peak = whole_peak(lambda: one_step(model, optimizer, loss), base)  # noqa: B023
                assert peak <= limit_of(budget), f"{home}: {peak} bytes within {budget}"
                return found
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = max(error.least_nbytes, budget + 1)
    raise AssertionError("each budget named was refused in turn")


def one_step(model: Any, optimizer: Any, loss: Callable[[Any, int], torch.Tensor]) -> None:
    seed(0)
    loss(model, 0).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
