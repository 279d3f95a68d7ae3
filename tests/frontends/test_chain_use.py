"""A Chain is an ordinary module: copies, state dicts, modes, plans; and every refusal says what to do."""

import copy
import os
from typing import Any

import pytest
import torch
from exact import assert_same, plain, train
from models import CASES, Case, mlp, resnet, rows
from torch import nn

from tapestream.costs import Budget
from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.chain import Chain


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def test_a_copy_trains_like_the_original_and_apart_from_it() -> None:
    case = CASES["resnet"]
    net = Chain(case.stages(), planner="rotor")
    net(case.batch()).sum().backward()
    net.zero_grad()
    other = copy.deepcopy(net)
    assert not {id(p) for p in net.parameters()} & {id(p) for p in other.parameters()}
    before = [p.detach().clone() for p in net.parameters()]
    stages = list(copy.deepcopy(net.stages))
    assert_same(train(plain(stages), stages, case), train(other, list(other.stages), case))
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_a_copy_made_during_a_live_call_owes_nothing() -> None:
    net = Chain(mlp(), budget="1MiB")
    out = net(leaf(3, 6))
    other = copy.deepcopy(net)
    other(leaf(3, 6)).sum().backward()
    out.sum().backward()
    assert not any((*net._live.values(), *other._live.values()))


def test_state_dict_is_that_of_the_stages() -> None:
    stages = resnet()
    net = Chain(stages)
    names = {f"stages.{name}" for name in nn.ModuleList(stages).state_dict()}
    assert set(net.state_dict()) == names
    other = Chain(resnet())
    other.load_state_dict(net.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))


def test_modules_behind_functions_are_found() -> None:
    linear = nn.Linear(6, 6)
    net = Chain([lambda x: torch.tanh(linear(x)), nn.Tanh()])
    assert [id(p) for p in net.parameters()] == [id(p) for p in linear.parameters()]
    net.eval()
    assert not linear.training


def test_another_dtype_means_another_plan() -> None:
    stages = mlp()
    net = Chain(stages, planner="revolve")
    net(leaf(3, 6)).sum().backward()
    first = net.plan
    net.zero_grad()
    net.to(torch.float64)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    net(x).square().sum().backward()
    assert net.plan is not first
    (expected,) = torch.autograd.grad(plain(stages)(x).square().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_replaced_and_newly_frozen_parameters_are_noticed() -> None:
    stages = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    net = Chain(stages, planner="revolve")
    net(leaf(3, 6)).sum().backward()
    stages[2].weight = nn.Parameter(torch.randn(6, 6))
    stages[0].requires_grad_(False)
    net.zero_grad()
    x = leaf(3, 6)
    weights = [stages[2].weight, stages[2].bias]
    expected = torch.autograd.grad(plain(stages)(x).square().sum(), weights)
    net(x).square().sum().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(weights, expected, strict=True))
    assert stages[0].weight.grad is None


def test_train_and_eval_alternate() -> None:
    case = CASES["resnet"]
    ours, theirs = case.stages(), case.stages()
    net = Chain(ours, planner="rotor")

    def alternating(run: Any, stages: list[Any]) -> Any:
        turn = 0

        def call(x: torch.Tensor) -> Any:
            nonlocal turn
            turn += 1
            nn.ModuleList(s for s in stages if isinstance(s, nn.Module)).train(turn % 2 == 1)
            return run(x)

        return call

    assert_same(
        train(alternating(plain(theirs), theirs), theirs, case, 4), train(alternating(net, ours), ours, case, 4)
    )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_plain(mode: Any) -> None:
    case = CASES["resnet"]
    ours, theirs = case.stages(), case.stages()
    x = case.batch()
    with mode():
        found, expected = Chain(ours)(x), plain(theirs)(x)
    assert torch.equal(found, expected)
    assert not found.requires_grad
    for a, b in zip(ours, theirs, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a.buffers(), b.buffers(), strict=True))


def test_nothing_to_differentiate_is_plain_too() -> None:
    net = Chain([torch.tanh, torch.sigmoid])
    x = torch.randn(3)
    assert torch.equal(net(x), torch.sigmoid(torch.tanh(x)))
    assert not net(x).requires_grad


def test_profiling_has_no_side_effects() -> None:
    case = CASES["noisy"]
    stages = case.stages()
    net = Chain([*stages, nn.BatchNorm1d(6)], planner="rotor", verify=True)
    torch.manual_seed(0)
    x = leaf(3, 6)
    before = torch.get_rng_state()
    made: list[Any] = []
    net._prepare, prepare = lambda *a: made.append(prepare(*a)) or made[0], net._prepare  # type: ignore[method-assign]
    torch.manual_seed(0)
    torch.randn(3, 6)
    assert torch.equal(before, torch.get_rng_state())
    from tapestream.runner.state import take_apart

    net._prepare(take_apart(x)[0], torch.device("cpu"))
    assert torch.equal(before, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters())
    assert x.grad is None
    assert int(net.stages[-1].num_batches_tracked) == 0


# ------------------------------------------------------------------------------------------------------------ plans


def test_a_plan_serves_slightly_smaller_shapes_alone() -> None:
    stages = mlp()
    net = Chain(stages, planner="rotor")
    plans = []
    for count in (40, 36, 10):
        x = leaf(count, 6)
        net(x).square().sum().backward()
        plans.append(net.plan)
        (expected,) = torch.autograd.grad(plain(stages)(x).square().sum(), x)
        assert torch.equal(x.grad, expected)
    assert plans[0] is plans[1]
    assert plans[1] is not plans[2]


def test_a_saved_plan_can_be_used_again(tmp_path: Any) -> None:
    case = Case(lambda: mlp(6), rows(3, 6))
    first = Chain(case.stages(), planner="revolve", budget="64KiB")
    first(case.batch())
    assert first.plan is not None
    first.plan.save(tmp_path / "plan.json")
    ours, theirs = case.stages(), case.stages()
    net = Chain(ours, plan=type(first.plan).load(tmp_path / "plan.json"))
    assert_same(train(plain(theirs), theirs, case), train(net, ours, case))
    assert net.plan is not None
    assert net.plan.schedule == first.plan.schedule


def test_the_plan_of_another_chain_is_refused() -> None:
    other = Chain(mlp(3))
    other(leaf(3, 6))
    with pytest.raises(InputError, match=r"made for a chain of 3 stages, this one has 5; .*plan=None"):
        Chain(mlp(5), plan=other.plan)


def test_a_given_plan_must_fit_the_budget() -> None:
    other = Chain(mlp(5), planner="store_all")
    other(leaf(3, 6))
    assert other.plan is not None
    with pytest.raises(BudgetError):
        Chain(mlp(5), plan=other.plan, budget=other.plan.peak_nbytes // 2)(leaf(3, 6))


@pytest.mark.parametrize("planner", ["store_all", "periodic", "bisection", "revolve", "rotor", "auto"])
def test_the_least_budget_of_a_refusal_works_and_one_byte_less_does_not(planner: str) -> None:
    stages, x = mlp(), leaf(3, 6)
    with pytest.raises(BudgetError, match="budget of 1 B") as caught:
        Chain(stages, budget=1, planner=planner)(x)
    nbytes = caught.value.least_nbytes
    assert nbytes is not None
    assert str(nbytes) in str(caught.value)
    assert caught.value.stage is not None
    Chain(stages, budget=nbytes, planner=planner)(x).sum().backward()
    if planner not in ("auto", "periodic"):
        with pytest.raises(BudgetError):
            Chain(stages, budget=nbytes - 1, planner=planner)(x)


# --------------------------------------------------------------------------------------------------------- refusals


def test_texts_of_refusals() -> None:
    with pytest.raises(InputError, match=r"no planner 'roter'.*did you mean 'rotor'"):
        Chain(mlp(), planner="roter")
    with pytest.raises(InputError, match=r"no argument 'slotz'.*'revolve' has the knobs slots; did you mean 'slots'"):
        Chain(mlp(), planner="revolve", slotz=3)
    with pytest.raises(InputError, match=r"'auto' has no knobs; planner='periodic' or"):
        Chain(mlp(), slots=3)
    with pytest.raises(InputError, match=r"cannot read 'plenty' as a size in bytes.*for example '8GiB'"):
        Chain(mlp(), budget="plenty")
    with pytest.raises(InputError, match=r"budget of 0 bytes"):
        Chain(mlp(), budget=Budget(0))
    with pytest.raises(InputError, match="at least one stage"):
        Chain([])
    with pytest.raises(InputError, match="stage 1 must be a module or function, found int"):
        Chain([nn.Tanh(), 3])  # type: ignore[list-item]
    with pytest.raises(InputError, match="holds no tensor"):
        Chain(mlp())({"x": 3})


def test_tensors_on_another_device_are_refused() -> None:
    x = leaf(3, 6)
    with pytest.raises(
        InputError, match=r"stage 0 .*has parameters on cpu while its input lies on meta; call \.to\('meta'\)"
    ):
        Chain(mlp())(x.to("meta"))
    with pytest.raises(InputError, match=r"inputs lie on cpu, meta, but must lie on one device; move them with \.to"):
        Chain(mlp())((x, x.to("meta")))
    with pytest.raises(InputError, match=r"inputs lie on cpu, but device='meta' was asked for"):
        Chain(mlp(), device="meta")(x)


def test_verify_finds_a_stage_that_cannot_be_recomputed() -> None:
    calls: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x * len(calls)

    def drawing(x: torch.Tensor) -> torch.Tensor:
        return x + int.from_bytes(os.urandom(4))  # the system's own generator has no state to restore

    for stage in (counting, drawing):
        with pytest.raises(GradientError, match=rf"stage 1 \({stage.__name__}\) is not deterministic"):
            Chain([torch.tanh, stage, torch.tanh], verify=True)(leaf(3, 6))
    net = Chain([torch.tanh, nn.Dropout(0.5), nn.RReLU(), nn.BatchNorm1d(6)], verify=True)
    net(leaf(3, 6)).sum().backward()


def test_another_structure_than_profiled_is_refused() -> None:
    def changing(x: torch.Tensor) -> Any:
        return (x * 2, x) if wanted else x * 2

    wanted = False
    net = Chain([torch.tanh, changing])
    net(leaf(3, 6)).sum().backward()
    wanted = True
    with pytest.raises(InputError, match=r"(?s)stage 1 \(changing\) returned another structure .*must return the same"):
        net(leaf(3, 6))


def test_a_planner_that_moves_states_is_refused() -> None:
    chain = Chain([torch.nn.Linear(8, 8) for _ in range(12)], planner="offload", tail=2, ahead=1)
    with pytest.raises(InputError, match="'offload' moves states to a slower tier, and this chain has none"):
        chain(torch.randn(4, 8))
