"""Logits beside a loss: they count while the user holds them, and calls that drop them have their room."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from streamable import Model
from streaming import options_of, streamed
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.storage.meter import track_memory

WIDTH, ROWS, CLASSES, BLOCKS = 32, 128, 512, 8
STATE, LOGITS = 4 * ROWS * WIDTH, 4 * ROWS * CLASSES


class Out(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Classifier(nn.Module):
    """``saves``: the loss is one that saves the logits themselves."""

    def __init__(self, saves: bool = False) -> None:
        super().__init__()
        layers = [
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(BLOCKS)
        ]
        self.layers, self.head, self.saves = nn.ModuleList(layers), nn.Linear(WIDTH, CLASSES), saves

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Out:
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if self.saves:
            return Out(logits.square().mean(), logits)
        return Out(F.cross_entropy(logits, labels), logits)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))


CASE = Model(Classifier, batch)
Call = Callable[[nn.Module, Any], Any]


def dropping(model: nn.Module, given: Any) -> Any:
    model(*given).loss.backward()


def holding(model: nn.Module, given: Any) -> Any:
    out = model(*given)
    out.loss.backward()
    return out


def with_a_view(model: nn.Module, given: Any) -> Any:
    out = model(*given)
    loss, some = out.loss, out.logits[:1]
    del out
    loss.backward()
    return some


def turns(model: nn.Module, calls: list[Call]) -> list[int]:
    """Of the plan of each of ``calls``; the gradients of each are plain PyTorch's."""
    plain, found = CASE.model(), list[int]()
    plain.saves = model.saves
    plain.load_state_dict(model.state_dict())
    for call in calls:
        given = batch()
        for one in (plain, model):
            one.zero_grad()
            call(one, given)
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), model.parameters(), strict=True))
        found.append(ts.report(model).plan.profile.turn_nbytes)
    return found


@pytest.mark.parametrize("home", ["device", "disk"])
def test_their_room_is_used_from_the_second_call_on_that_drops_them(home: str, tmp_path: Path) -> None:
    with streamed(CASE, "1.7MiB", blocks="layers", **options_of("auto", tmp_path, home)) as model:
        first, second, third = turns(model, [dropping, dropping, dropping])
        assert first - second >= LOGITS
        assert second == third


@pytest.mark.parametrize("held", [holding, with_a_view])
def test_who_holds_them_has_them_counted_always(held: Call, tmp_path: Path) -> None:
    with streamed(CASE, "1.7MiB", **options_of("auto", tmp_path)) as model:
        found = turns(model, [held, held, dropping, dropping])
        assert found == [found[0]] * 4


def test_who_holds_them_once_has_them_counted_from_then_on(tmp_path: Path) -> None:
    with streamed(CASE, "1.7MiB", **options_of("auto", tmp_path)) as model:
        found = turns(model, [dropping, dropping, holding, dropping, dropping])
        assert found[1] == found[2] < found[0] == found[3] == found[4]


def test_who_holds_them_is_seen_where_nothing_is_recomputed(tmp_path: Path) -> None:
    """Calls of plain nodes."""
    with streamed(CASE, "1TiB", **options_of("auto", tmp_path, "device")) as model:
        found = turns(model, [dropping, dropping, holding, dropping])
        assert found[1] == found[2] < found[0] == found[3]


def test_a_smaller_batch_is_not_taken_for_somebody_who_holds(tmp_path: Path) -> None:
    with streamed(CASE, "1.7MiB", **options_of("auto", tmp_path)) as model:
        first = turns(model, [dropping])
        x, labels = batch()
        model.zero_grad()
        dropping(model, (x[:-1], labels[:-1]))
        assert turns(model, [dropping])[0] < first[0]


class Deep(Classifier):
    """Returns all states, too, and a tensor of another kind."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        states = []
        for layer in self.layers:
            x = layer(x)
            states.append(x)
        logits = self.head(x)
        return Out(F.cross_entropy(logits, labels), logits), states, labels.to_sparse()


def test_states_among_the_results_are_not_the_logits(tmp_path: Path) -> None:
    """What the simulator does not count is no room, whoever drops it."""
    with streamed(CASE, "2MiB", **options_of("auto", tmp_path)) as model:
        wanted = turns(model, [dropping, dropping])
    with streamed(Model(Deep, batch), "2MiB", **options_of("auto", tmp_path)) as model:
        for turn in wanted:
            (loss, *_), *_ = model(*batch())
            del _
            loss.backward()
            model.zero_grad()
            assert ts.report(model).plan.profile.turn_nbytes >= turn


def test_what_backward_needs_itself_is_no_room(tmp_path: Path) -> None:
    with streamed(Model(lambda: Classifier(saves=True), batch), "1.7MiB", **options_of("auto", tmp_path)) as model:
        first, second = turns(model, [dropping, dropping])
        assert first == second


def test_a_budget_that_had_to_recompute_stores_more(tmp_path: Path) -> None:
    forwards = list[int]()
    with streamed(CASE, "1.5MiB", **options_of("auto", tmp_path, "device")) as model:
        for _ in range(3):
            dropping(model, batch())
            model.zero_grad()
            forwards.append(ts.report(model).plan.simulation.forwards)
    assert forwards[1] == forwards[2] < forwards[0]


def test_the_peak_is_within_the_budget(tmp_path: Path) -> None:
    budget = 1_700_000
    with streamed(CASE, budget, **options_of("auto", tmp_path, "device")) as model:
        held = sum(p.nbytes for p in model.parameters())
        dropping(model, batch())  # what is new is measured in a first call
        model.zero_grad()
        for _ in range(4):
            given = batch()
            gc.collect()
            with track_memory() as meter:
                dropping(model, given)
                model.zero_grad()
        assert held + meter.peak_nbytes <= 1.05 * budget
