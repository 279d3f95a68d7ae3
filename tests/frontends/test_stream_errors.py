"""What is refused, by what text, and what is left when storage fails."""

import os
from collections import UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from streamable import MODELS, WIDTH, Chained, Dense, Model, dense, numbers
from streaming import everything, gradients_of, least_for, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.module.stream import handle_of

CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))


def sgd(model: nn.Module, update: str = "step") -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "home": ({"home": "attic"}, "home='attic' was asked for; homes are 'auto', 'device', 'host' and 'disk'"),
    "host on the CPU": ({"home": "host"}, "home='host' was asked for with device='cpu'.*use home='disk' with folder="),
    "disk without a folder": ({"home": "disk"}, "home='disk' was asked for without a folder; add folder="),
    "device": ({"device": "tpu"}, "tpu"),
    "engine": ({"engine": "steam"}, "steam"),
    "budget": ({"budget": "much"}, "much"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_are_refused_by_name_and_leave_the_model_alone(name: str) -> None:
    options, text = REFUSED[name]
    model = CASE.model()
    with pytest.raises((InputError, RuntimeError) if name == "device" else InputError, match=text):
        ts.stream(model, **{"device": "cpu", **options})
    assert type(model) is Chained
    assert_same(everything(CASE.model()), everything(model))
    model(torch.randn(3, WIDTH)).sum().backward()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_no_gpu() -> None:
    with pytest.raises(InputError, match="finds no CUDA GPU; use device='cpu'"):
        ts.stream(CASE.model(), device="cuda")


def test_planners_and_knobs_are_refused_at_once() -> None:
    for options, text in (({"planner": "guess"}, "guess"), ({"speed": 3}, "no argument 'speed'.*'auto' has no knobs")):
        with pytest.raises(InputError, match=text):
            ts.stream(CASE.model(), device="cpu", **options)


def test_models_without_blocks_and_odd_blocks() -> None:
    with pytest.raises(InputError, match=r"no blocks were found in Linear.*name them with blocks="):
        ts.stream(nn.Linear(2, 2), device="cpu")
    with pytest.raises(InputError, match="blocks= names a Dense that is not part of the model"):
        ts.stream(CASE.model(), device="cpu", blocks=[Dense()])
    model = CASE.model()
    with pytest.raises(InputError, match="blocks overlap"):
        ts.stream(model, device="cpu", blocks=[model.blocks[0], model.blocks[0].linear])
    tied = CASE.model()
    tied.before.weight = tied.blocks[0].linear.weight
    with pytest.raises(InputError, match=r"'linear.weight' of block 0 \(Dense\) is shared with before.*untie it"):
        ts.stream(tied, device="cpu")
    assert type(tied) is Chained


def test_a_model_that_calls_no_block() -> None:
    class Idle(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.before(x)

    model = ts.stream(Idle(dense(), nn.Linear(WIDTH, WIDTH)), device="cpu")
    with pytest.raises(InputError, match="called none of its blocks; name the right ones"):
        model(torch.randn(3, WIDTH))
    ts.unstream(model)


@pytest.mark.parametrize("name", ["gpt", "two_chains", "lstm", "tied"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_the_least_budget_of_the_message_works(name: str, update: str, tmp_path: Path) -> None:
    case = MODELS[name]
    with streamed(case, 1, **options_of("auto", tmp_path)) as model:
        sgd(model, update)
        with pytest.raises(BudgetError, match=r"was asked for.*(least|need)"):
            loss_at(model, case)
        least = least_for(model, case)
        handle_of(model).budget = ts.Budget(least - 1)
        handle_of(model).replan()
        with pytest.raises(BudgetError):
            loss_at(model, case)


def test_optimizer_options(tmp_path: Path) -> None:
    with streamed(CASE, "1 MiB", **options_of("auto", tmp_path)) as model:
        for make, options, text in (
            (torch.optim.SGD, {"update": "later"}, "update='later' was asked for; it is 'step' or 'backward'"),
            (torch.optim.SGD, {"master": "fp64"}, "master='fp64' was asked for"),
            (torch.optim.SGD, {"speed": 1}, "SGD does not take these options"),
            (torch.optim.Muon, {}, "Muon only supports 2D parameters"),
            (torch.optim.LBFGS, {}, r"LBFGS.step\(\) needs a closure.*AdamW, SGD or Adagrad"),
        ):
            with pytest.raises(InputError, match=text):
                ts.optimizer(model, make, **{"lr": 0.1, **options})
    with pytest.raises(InputError, match="not streamed; call"):
        ts.optimizer(CASE.model(), torch.optim.SGD, lr=0.1)


# ----------------------------------------------------------------------------------------------- plan, report, verify


def test_plans_are_files_and_arguments(tmp_path: Path) -> None:
    x = torch.randn(3, WIDTH)
    options = options_of("auto", tmp_path / "home")
    theirs, model = CASE.model(), CASE.model()
    made = ts.plan(model, x, budget="16 KiB", **options)
    assert type(model) is Chained
    assert_same(everything(theirs), everything(model))
    assert not any((tmp_path / "home").iterdir())
    made.save(tmp_path / "plan")
    loaded = ts.Plan.load(tmp_path / "plan")
    assert loaded.schedule == made.schedule
    with streamed(CASE, "16 KiB", plan=loaded, **options) as streaming:
        out = streaming(x)
        out.sum().backward()
        assert ts.report(streaming).plan.schedule == made.schedule
        plain = CASE.model()
        plain(x).sum().backward()
        assert_same(gradients_of(plain), gradients_of(streaming))
    other = Model(lambda: Chained(dense(4)), numbers(3, WIDTH))
    with (
        streamed(other, "16 KiB", plan=loaded, **options) as streaming,
        pytest.raises(InputError, match="made for a chain of 6 stages, this one has 4"),
    ):
        loss_at(streaming, other)
    with (
        streamed(MODELS["two_chains"], "1 MiB", plan=loaded, **options) as streaming,
        pytest.raises(InputError, match="plan= is for one chain of blocks, this model has 2"),
    ):
        loss_at(streaming, MODELS["two_chains"])


def test_a_report_before_a_step_and_after(tmp_path: Path) -> None:
    with streamed(CASE, "16 KiB", **options_of("auto", tmp_path)) as model:
        with pytest.raises(InputError, match="not been called with gradients yet"):
            ts.report(model)
        loss_at(model, CASE).backward()
        report = ts.report(model)
        assert report.peak_nbytes[ts.Tier.DISK] > 0
        assert sum(report.bytes_moved.values()) > 0
        assert "moved" in str(report)
        assert sum(ts.report(model).bytes_moved.values()) == 0


class Random(Dense):
    """Not deterministic: nothing sets the system's generator back."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * int.from_bytes(os.urandom(2))


class Wrong(Dense):
    """Other weights when it is recomputed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2.0 if ts.recomputing() else 1.0)


def test_verify_finds_what_is_not_deterministic(tmp_path: Path) -> None:
    case = Model(lambda: Chained([Random() if k == 2 else Dense() for k in range(4)]), numbers(3, WIDTH))
    with (
        streamed(case, "1 MiB", verify=True, **options_of("auto", tmp_path)) as model,
        pytest.raises((InputError, GradientError), match=r"stage 2|block 2"),
    ):
        loss_at(model, case)


def test_verify_catches_a_wrong_block(tmp_path: Path) -> None:
    case = Model(lambda: Chained([Wrong() if k == 2 else Dense() for k in range(6)]), numbers(3, WIDTH))
    options = options_of("auto", tmp_path)
    with (
        streamed(case, "1 MiB", planner="bisection", **options) as model,
        pytest.raises(GradientError, match="differs between the planned and the stored step"),
    ):
        ts.verify(model, case.batch())
    with streamed(CASE, "16 KiB", planner="bisection", **options) as model:
        before, state = everything(model), torch.get_rng_state()
        loss_at(model, CASE).backward()
        gradients = gradients_of(model)
        torch.set_rng_state(state)
        ts.verify(model, CASE.batch())
        assert_same(before, everything(model))
        assert_same(gradients, gradients_of(model))
        sgd(model, "backward")
        with pytest.raises(InputError, match="verify before making the optimizer"):
            ts.verify(model, CASE.batch())


class Named(nn.Module):
    """Takes its batch by name, as most models of language do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chained([Dense() for _ in range(4)])

    def forward(self, *, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x) * scale
        return found


class Told(nn.Module):
    """Returns a loss for people to read, without a gradient, beside what is differentiated; ``wrong``: by a block that
    gives other gradients when it runs again."""

    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.inner = Chained([Wrong() if wrong and k == 2 else Dense() for k in range(6)])

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        found = self.inner(x)
        return {"loss": found.detach().mean(), "found": found}


@pytest.mark.parametrize("wrong", [False, True])
def test_verify_differentiates_the_rest_where_the_loss_has_no_gradient(wrong: bool, tmp_path: Path) -> None:
    case = Model(lambda: Told(wrong), numbers(3, WIDTH))
    with streamed(case, "1 MiB", planner="bisection", **options_of("auto", tmp_path)) as model:
        if wrong:
            with pytest.raises(GradientError, match="differs between the planned and the stored step"):
                ts.verify(model, case.batch())
        else:
            ts.verify(model, case.batch())


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_plan_and_verify_take_a_mapping_as_arguments_by_name(kind: Any, tmp_path: Path) -> None:
    batch = kind({"x": torch.randn(3, WIDTH), "scale": torch.ones(())})
    options = options_of("auto", tmp_path)
    model = Named()
    made = ts.plan(model, batch, budget="1 MiB", **options)
    ts.stream(model, budget="1 MiB", plan=made, **options)
    ts.verify(model, batch)
    assert ts.plan(model, batch).schedule == made.schedule
    ts.unstream(model)


def test_plan_and_verify_take_a_list_as_arguments_by_position(tmp_path: Path) -> None:
    with streamed(CASE, "1 MiB", **options_of("auto", tmp_path)) as model:
        ts.verify(model, list(CASE.batch()))
        assert ts.plan(model, list(CASE.batch())).schedule == ts.plan(model, CASE.batch()).schedule


@pytest.mark.parametrize("blocks", [3, [3], [None], 2.5])
def test_blocks_that_are_neither_modules_nor_names_are_refused(blocks: Any) -> None:
    with pytest.raises(InputError, match=r"blocks= names .*, of type .*; give modules, their classes, or names"):
        ts.stream(CASE.model(), budget="1 MiB", blocks=blocks)
