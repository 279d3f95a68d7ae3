"""Profiles of equal streamed models are equal, so that the budget which an error names suffices for the next one."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import seed
from streamable import MODELS, WIDTH, Chained, Dense, Model, numbers
from streaming import K, least_for, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.costs import Profile
from tapestream.errors import InputError


class Litters(nn.Module):
    """Leaves garbage in cycles, and makes enough objects for the collector to come by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ring: list[Any] = [x * 2]
        ring.append(ring)
        assert len([[k] for k in range(3000)]) == 3000
        return x + ring[0].detach()


CASES = {name: MODELS[name] for name in ("gpt", "gpt_autocast", "resnet", "lstm", "unet", "spectral", "two_chains")} | {
    "litters": Model(
        lambda: Chained([nn.Sequential(Litters(), Dense()) for _ in range(3)], Litters(), Litters()), numbers(3, WIDTH)
    )
}


def disturb(number: int) -> None:
    """Free unseen what a meter saw, so that it remembers sizes where other tensors will lie."""
    sizes = torch.randint(1, 2000, (200,), generator=torch.Generator().manual_seed(number)).tolist()
    with ts.track_memory():
        kept = [torch.empty(size) for size in sizes]
    del kept


def nbytes_of(profile: Profile) -> list[Any]:
    """Everything in it but seconds."""
    stages = [
        (c.output_nbytes, c.saved_nbytes, c.forward_extra_nbytes, c.record_extra_nbytes, c.backward_extra_nbytes,
         c.cotangent_nbytes, c.reads_input, c.reads_output) for c in profile.stages
    ]  # fmt: skip
    return [*stages, profile.carried, profile.initial_nbytes, profile.outside_nbytes, profile.turn_nbytes]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", CASES)
def test_equal_models_give_equal_bytes(name: str) -> None:
    found = []
    for k in range(6):
        disturb(k)
        for case in (CASES[name], CASES[[*CASES][k]]):
            with streamed(case, "1 TiB", **options_of("auto", Path(), "device")) as model:
                seed(3)
                loss_at(model, case).backward()
                if case is CASES[name]:
                    found.append(nbytes_of(ts.report(model).plan.profile))
    assert found == [found[0]] * len(found)


class Headed(nn.Module):
    """Two states are dropped before the head runs: the last block's input, and the first's, which a caller holds."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.chain = nn.Linear(WIDTH, WIDTH), Chained([Dense() for _ in range(6)])
        self.head = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.chain(self.before(x))
        return torch.tanh(self.head(y)).square().mean()


def test_what_the_caller_drops_makes_no_room_for_the_head() -> None:
    case = Model(Headed, numbers(64, WIDTH))
    with streamed(case, "1 TiB", **options_of("auto", Path(), "device")) as model:
        loss_at(model, case).backward()
        found = ts.report(model).plan.profile.turn_nbytes
    state, logits = 64 * WIDTH * 4, 3 * 64 * WIDTH * 4
    # tanh's output and four more of its size for the gradient of the mean of squares, less the cotangent of the state.
    assert 5 * logits - state <= found <= 5 * logits


SETTINGS = [
    ("gpt", "adversarial", "disk", "step", "auto"),
    ("resnet", "auto", "device", "backward", "store_all"),
    ("lstm", "fake_streams", "disk", "backward", "store_all"),
    ("unet", "auto", "disk", "step", "rotor"),
    ("two_chains", "fake_streams", "host", "step", "auto"),
    ("litters", "adversarial", "disk", "backward", "periodic"),
    ("spectral", "fake_streams", "disk", "step", "revolve"),
]  # fmt: skip


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "engine", "home", "update", "planner"), SETTINGS)
def test_the_least_budget_suffices_for_the_next_model(
    name: str, engine: str, home: str, update: Any, planner: str, tmp_path: Path
) -> None:
    case, options = CASES[name], options_of(engine, tmp_path, home) | {"planner": planner}

    def optimizer(model: nn.Module) -> Any:
        return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)

    with streamed(case, 1, **options) as model:
        optimizer(model)
        least = least_for(model, case)
    for k in range(4):
        disturb(k)
        with streamed(case, least, **options) as model:
            rule = optimizer(model)
            seed(3)
            loss_at(model, case).backward()
            rule.step()
            plan = ts.report(model).plan
            assert plan.peak_nbytes <= least
            assert home != "disk" or plan.simulation.peak_nbytes[K] > 0


class Renormed(Chained):
    """An embedding before the blocks that brings its rows to a norm whenever they are looked up."""

    def __init__(self) -> None:
        super().__init__([Dense() for _ in range(3)])
        self.words = nn.Embedding(20, WIDTH, max_norm=0.5)
        self.decays = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.decays:
            with torch.no_grad():
                self.words.weight.mul_(0.9)
        found: torch.Tensor = super().forward(self.words(x))
        return found


def test_an_embedding_is_not_renormalised_by_profiling(tmp_path: Path) -> None:
    """Nor where the budget is refused; a second time changes the last bits."""
    torch.manual_seed(0)
    model, ids = Renormed(), torch.arange(20).reshape(4, 5)
    weight = model.words.weight.detach().clone()
    ts.stream(model, budget=1, **options_of("auto", tmp_path))
    with pytest.raises(ts.BudgetError):
        model(ids)
    assert torch.equal(model.words.weight, weight)
    ts.unstream(model)
    plain = copy.deepcopy(model)
    ts.stream(model, budget="1 GiB", **options_of("auto", tmp_path))
    assert torch.equal(model(ids), plain(ids))
    assert torch.equal(model.words.weight, plain.words.weight)
    ts.unstream(model)


def test_a_forward_that_changes_a_parameter_is_refused(tmp_path: Path) -> None:
    model = Renormed()
    model.decays = True
    ts.stream(model, budget="1 GiB", **options_of("auto", tmp_path))
    with pytest.raises(InputError, match=r"changes its parameter 'words.weight' in place"):
        model(torch.arange(20).reshape(4, 5))
    ts.unstream(model)
