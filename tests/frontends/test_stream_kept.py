"""What blocks and their hooks keep (results, caches, weights that hooks make) is in the budget of a streamed model."""

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from streaming import DIRECT
from things_kept import Kept, alive, step_of, whole_peak
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.planning.exceeded import limit_of

pytestmark = [
    pytest.mark.on_cpu("bytes of the CPU are measured"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.*is deprecated:FutureWarning"),
]


def plain_losses(case: Kept, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    model = case.model()
    optimizer = getattr(torch.optim, case.optimizer)(model.parameters(), lr=0.01)
    return [step_of(model, optimizer, batch) for batch in batches]


def at_its_least(case: Kept, folder: Path) -> tuple[bool, int, int]:
    """(Whether BudgetExceeded was said, bytes at the peak of a step, the budget), after a comparison with plain
    PyTorch."""
    batches = [case.batch(k) for k in range(3)]  # the user's, in no budget
    want, budget = plain_losses(case, batches), 1
    gc.collect()
    base = alive()
    for _ in range(8):
        options: dict[str, Any] = {"home": case.home} | ({"folder": folder} if case.home == "disk" else {})
        model = ts.stream(case.model(), device="cpu", machine=DIRECT, budget=budget, **options)
        try:
            return *steps_of(case, model, batches, want, base), budget
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            budget = int(error.least_nbytes * (case.room if budget == 1 else 1))
        finally:
            ts.unstream(model)
            del model
            gc.collect()
    raise AssertionError("each budget named was refused in turn")


def steps_of(
    case: Kept, model: nn.Module, batches: list[torch.Tensor], want: list[torch.Tensor], base: int
) -> tuple[bool, int]:
    optimizer = ts.optimizer(model, getattr(torch.optim, case.optimizer), lr=0.01)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = [step_of(model, optimizer, batch) for batch in batches]
        assert all(map(torch.equal, found, want))
        peak = whole_peak(lambda: step_of(model, optimizer, batches[0]), base)
    return any(issubclass(one.category, ts.BudgetExceeded) for one in said), peak


@pytest.mark.parametrize("numbers", [range(3), pytest.param(range(3, 300), marks=pytest.mark.full)], ids=str)
@pytest.mark.timeout(3600)
def test_random_models_stay_within_their_budget(numbers: range, tmp_path: Path) -> None:
    """Which keep things in several ways at once: or the call says that it holds more, never where it does not."""
    exceeded = []
    for number in numbers:
        case = Kept.drawn(number)
        said, peak, budget = at_its_least(case, tmp_path)
        assert said is (peak > limit_of(budget)), (case, peak, budget)
        exceeded += [case] if said else []
    assert 10 * len(exceeded) <= len(numbers)


@pytest.mark.thinned(3)
@pytest.mark.parametrize(
    "kind",
    ["attribute", "cleared", "deque", "entry", "object", "new_object", "slots", "scope", "lazy", "cache", "hook",
     "context", "pre_hook", "weight_norm", "spectral_norm"],
)  # fmt: skip
def test_what_is_kept_is_in_the_plan(kind: str, tmp_path: Path) -> None:
    said, peak, budget = at_its_least(Kept((kind,), home="device"), tmp_path)
    assert not said
    assert peak <= limit_of(budget)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("kind", ["attribute", "pre_hook", "weight_norm", "spectral_norm", "hook"])
def test_blocks_that_come_and_go_leave_what_they_keep(kind: str, tmp_path: Path) -> None:
    """Weights that are far larger than the states, so that the blocks are what moves."""
    said, peak, budget = at_its_least(Kept((kind,), count=10, width=160, rows=8), tmp_path)
    assert not said
    assert peak <= limit_of(budget)


@pytest.mark.parametrize("kind", ["attribute", "weight_norm"])
def test_a_step_lets_go_of_what_the_one_before_has_kept(kind: str, tmp_path: Path) -> None:
    case = Kept((kind,), count=10, width=160, rows=8)
    model = ts.stream(case.model(), device="cpu", machine=DIRECT, budget="1 GiB", home="disk", folder=tmp_path)
    optimizer = ts.optimizer(model, torch.optim.SGD, lr=0.01)
    step_of(model, optimizer, case.batch(0))
    gc.collect()
    before = alive()
    for k in range(3):
        step_of(model, optimizer, case.batch(k))
    gc.collect()
    more = alive() - before
    ts.unstream(model)
    assert more <= 1024
