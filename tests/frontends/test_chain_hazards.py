"""What could go silently wrong in a recomputation goes right or raises."""

import copy
import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from exact import PLANNERS, assert_same, called_once, copy_of, plain, seed, train
from models import CASES, Case, Noisy, mlp, rows
from torch import nn

from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.frontends.chain import Chain
from tapestream.runner.ambient import recomputing
from tapestream.runner.state import take_apart
from tapestream.storage.meter import track_memory


def least(stages: Any, state: Any, planner: str = "rotor", slack_nbytes: int = 0) -> Chain:
    """A chain at the least budget that works, so that much is recomputed."""
    with pytest.raises(BudgetError) as caught:
        Chain(stages, budget=1, planner=planner)(state)
    return Chain(stages, budget=caught.value.least_nbytes + slack_nbytes, planner=planner)


@pytest.fixture(params=["store_all", "rotor"])
def make(request: pytest.FixtureRequest) -> Callable[[Any, Any], Chain]:
    """Builds a chain that stores everything, or one that recomputes as much as it can."""
    if request.param == "store_all":
        return lambda stages, state, **_: Chain(stages, planner="store_all")
    return least


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


# ---------------------------------------------------------------------------------------------- several live calls


def test_a_second_call_before_the_first_backward(make: Any) -> None:
    stages = mlp()
    x, y = leaf(3, 6), leaf(3, 6)
    net = make(stages, x)
    net(x).sum().backward()
    net.budget = type(net.budget)(None)  # room for two live calls
    x.grad = None
    for module in net.stages:
        module.zero_grad()
    run = plain(stages)
    expected = torch.autograd.grad((run(x) * 2).sum() + run(y).square().sum(), [x, y, *net.parameters()])
    one, two = net(x), net(y)
    ((one * 2).sum() + two.square().sum()).backward()
    found = [x.grad, y.grad, *(p.grad for p in net.parameters())]
    for a, b in zip(expected[:2], found[:2], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(expected[2:], found[2:], strict=True):
        torch.testing.assert_close(a, b)  # two nodes for one parameter: the parts are added in another order


def test_backwards_in_the_order_of_the_calls() -> None:
    stages = mlp()
    x, y = leaf(3, 6), leaf(3, 6)
    net = Chain(stages, planner="bisection")
    one, two = net(x).square().sum(), net(y).square().sum()
    one.backward()
    two.backward()
    for t in (x, y):
        (expected,) = torch.autograd.grad(plain(stages)(t).square().sum(), t)
        assert t.grad is not None
        assert torch.equal(t.grad, expected)


def test_calls_that_wait_for_backward_share_one_budget() -> None:
    stages = mlp()
    x = leaf(3, 6)
    full = Chain(stages, planner="store_all")
    held = full(x)
    assert full.plan is not None
    net = Chain(stages, budget=full.plan.peak_nbytes)
    first = net(x)
    later = net(x)
    with pytest.raises(BudgetError, match="is taken by calls whose backward has not run yet"):
        first.sum().backward()  # it gave way: see test_giving_way
    later.sum().backward()
    del held


def test_every_live_call_is_counted() -> None:
    """A plan made beside one live call must not serve beside two: the budget would be exceeded."""
    stages = mlp()
    x = leaf(3, 6)
    stored = Chain(stages, planner="store_all")
    stored(x)
    assert stored.plan is not None
    net = Chain(stages, budget=int(2.5 * stored.plan.peak_nbytes), planner="store_all")
    outs = [net(x), net(x)]
    outs.append(net(x))  # the first one gives way: see test_giving_way
    outs[2].sum().backward()
    outs[1].sum().backward()
    with pytest.raises(BudgetError):
        outs[0].sum().backward()


def test_two_chains_in_one_graph() -> None:
    case = Case(lambda: mlp(6), rows(3, 6))
    ours, theirs = case.stages(), case.stages()
    one, two = Chain(ours[:3], planner="revolve"), Chain(ours[3:], planner="bisection")
    assert_same(
        train(lambda x: plain(theirs[3:])(plain(theirs[:3])(x) * 2), theirs, case),
        train(lambda x: two(one(x) * 2), ours, case),
    )


@pytest.mark.parametrize("seeds", range(6))
@pytest.mark.parametrize("requires", [False, True])
def test_a_stage_whose_graph_depends_on_chance(make: Any, seeds: int, requires: bool) -> None:
    """Profiling may have seen the layer dropped, so that its output carried no gradient, or the other way round."""

    def stages() -> list[nn.Module]:
        torch.manual_seed(5)
        return [Noisy(6) for _ in range(4)]

    ours, theirs = stages(), stages()
    seed(seeds)
    x = torch.randn(3, 6, requires_grad=requires)
    net = make(ours, x, slack_nbytes=1024)  # another draw means another profile
    for step in range(5):
        outcome = []
        for run, modules in ((net, ours), (plain(theirs), theirs)):
            seed(100 * seeds + step)
            out = run(x)
            if out.requires_grad:
                out.square().sum().backward()
            outcome.append([copy_of(out), *(copy_of(p.grad) for m in modules for p in m.parameters())])
            nn.ModuleList(modules).zero_grad()
        for a, b in zip(*outcome, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b)


def test_a_recompute_of_another_structure_raises() -> None:
    def changing(state: Any) -> Any:
        y = torch.tanh(state["x"])
        return {"x": y, "more": y.sum()} if recomputing() and armed else {"x": y}

    armed, state = False, {"x": leaf(3, 6)}
    net = least([changing] * 6, state)
    net(state)["x"].sum().backward()
    armed = True
    with pytest.raises(GradientError, match=r"\(changing\) returned another structure when"):
        net(state)["x"].sum().backward()


# ------------------------------------------------------------------------------------------------ ways to differentiate


def test_gradients_of_chosen_tensors(make: Any) -> None:
    stages = mlp()
    x = leaf(3, 6)
    net = make(stages, x)
    weights = list(net.parameters())[::2]
    expected = torch.autograd.grad(plain(stages)(x).square().sum(), [x, *weights])
    found = torch.autograd.grad(net(x).square().sum(), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert all(p.grad is None for p in net.parameters())
    assert x.grad is None


def test_a_second_backward_raises(make: Any) -> None:
    x = leaf(3, 6)
    loss = make(mlp(), x)(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="differentiated a second time"):
        loss.backward()


def test_function_transforms_raise_or_work(make: Any) -> None:
    x = torch.randn(3, 6)
    stages = mlp()
    net = make(stages, x)
    for transform in (torch.func.grad(lambda t: net(t).sum()), torch.func.vmap(net)):
        try:
            found = transform(x)
        except (RuntimeError, InputError):
            continue
        run = plain(stages)
        expected = (
            torch.func.grad(lambda t, run=run: run(t).sum())(x) if found.shape == x.shape else torch.func.vmap(run)(x)
        )
        torch.testing.assert_close(found, expected)


# ------------------------------------------------------------------------------------------------------------- hooks


def test_hooks_run_as_often_as_in_plain_pytorch(make: Any) -> None:
    calls: list[str] = []

    def stages() -> list[Any]:
        torch.manual_seed(0)
        block = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        return [block, nn.Linear(6, 6), block, nn.Tanh()]

    def count(run: Callable[[Any], Any], modules: list[Any]) -> tuple[list[str], torch.Tensor]:
        calls.clear()
        x = leaf(3, 6)
        x.register_hook(lambda g: calls.append("input"))
        for name, p in nn.ModuleList(modules).named_parameters():
            p.register_hook(lambda g, name=name: calls.append(name) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"after {name}"))
        out = run(x)
        out.register_hook(lambda g: calls.append("output"))
        out.square().sum().backward()
        return sorted(calls), modules[0][0].weight.grad

    theirs, ours = stages(), stages()
    net = make(ours, leaf(3, 6))
    net(leaf(3, 6)).sum().backward()
    net.zero_grad()
    torch.manual_seed(1)
    expected = count(plain(theirs), theirs)
    torch.manual_seed(1)
    found = count(net, ours)
    assert found[0] == expected[0]
    assert torch.equal(found[1], expected[1])


def test_recomputing_is_true_in_recomputes_and_profiling_alone() -> None:
    seen: list[int] = []

    def counting(x: torch.Tensor) -> torch.Tensor:
        if not recomputing():
            seen.append(1)
        return torch.tanh(x)

    x = leaf(3, 6)
    net = least([counting] * 4, x)
    seen.clear()
    for _ in range(2):
        net(x).sum().backward()
    assert net.plan is not None
    assert net.plan.simulation.forwards > 4
    assert len(seen) == 8
    assert not recomputing()


# -------------------------------------------------------------------------------------------------------- captured
# tensors


def test_a_captured_leaf_gets_its_gradient(make: Any) -> None:
    x, w = leaf(3, 6), leaf(6, 6)
    stages = [torch.tanh, lambda t: t @ w, torch.sigmoid, lambda t: t @ w]
    expected = torch.autograd.grad(plain(stages)(x).square().sum(), [x, w])
    make(stages, x)(x).square().sum().backward()
    assert x.grad is not None
    assert w.grad is not None
    assert torch.equal(x.grad, expected[0])
    assert torch.equal(w.grad, expected[1])


def test_a_captured_leaf_alone_makes_the_chain_differentiable(make: Any) -> None:
    x, w = torch.randn(3, 6), leaf(6, 6)
    net = make([torch.tanh, lambda t: t @ w, torch.sigmoid], x)
    net(x).sum().backward()
    (expected,) = torch.autograd.grad(plain([torch.tanh, lambda t: t @ w, torch.sigmoid])(x).sum(), w)
    assert w.grad is not None
    assert torch.equal(w.grad, expected)


def test_a_captured_tensor_with_a_history_raises() -> None:
    x = leaf(3, 6)
    scaled = leaf(6, 6) * 2
    with pytest.raises(GradientError, match=r"stage 1 .*computed before the stage.*pass it through the state"):
        Chain([torch.tanh, lambda t: t @ scaled])(x)


def test_a_tensor_captured_only_later_raises(make: Any) -> None:
    held: list[torch.Tensor] = []
    x = leaf(3, 6)
    net = make([torch.tanh, lambda t: t @ held[0] if held else t * 2, torch.sigmoid], x)
    net(x).sum().backward()
    held.append(leaf(6, 6))
    with pytest.raises(InputError, match=r"stage 1 .*did not use when it was profiled"):
        net(x).sum().backward()
    held[0] = held[0] * 2
    with pytest.raises(GradientError, match=r"stage 1 .*computed before the stage"):
        net(x).sum().backward()


class Leaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.x: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = torch.tanh(self.linear(x))
        return self.x * 2


def test_a_tensor_that_escapes_raises(make: Any) -> None:
    x = leaf(3, 6)
    stages = [nn.Linear(6, 6), Leaking(), nn.Linear(6, 6), nn.Tanh()]
    net = make(stages, x, slack_nbytes=1024)  # what the stage holds on to changes its profile
    out = net(x)
    assert stages[1].x is not None
    with pytest.raises(GradientError, match=r"stage 1 \(Leaking\).*Return the tensor as part of the stage's output"):
        (out.sum() + stages[1].x.square().sum()).backward()


# --------------------------------------------------------------------------------------------------- changes in place


def test_the_input_changed_before_backward_raises(make: Any) -> None:
    x = leaf(3, 6)
    stages = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    copy = x * 1
    out = make(stages, copy)(copy)
    with torch.no_grad():
        copy.add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        out.sum().backward()


def test_weights_changed_before_backward_raise(make: Any) -> None:
    x = leaf(3, 6)
    stages = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()]
    net = make(stages, x)
    out = net(x)
    with torch.no_grad():
        stages[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
        out.sum().backward()


@pytest.mark.on_cpu("its modules are made before there is a device")
@pytest.mark.parametrize("last", [nn.Sigmoid(), nn.Linear(6, 6)])
def test_the_output_changed_before_backward_raises_or_is_right(make: Any, last: nn.Module) -> None:
    x = leaf(3, 6)
    stages = [nn.Linear(6, 6), nn.Tanh(), last]
    out = make(stages, x)(x)
    out.mul_(3)
    if isinstance(last, nn.Sigmoid):
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            out.sum().backward()
        return
    out.sum().backward()
    (expected,) = torch.autograd.grad((plain(stages)(x) * 3).sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


def test_a_stage_that_writes_where_two_tensors_of_the_state_lie_raises() -> None:
    stages = [lambda x: (y := x * 2, y[:, :3]), lambda s: (torch.relu_(s[0]), s[1]), lambda s: s[0].sum() + s[1].sum()]
    with pytest.raises(InputError, match=r"stage 1 .*shares memory with another tensor"):
        Chain(stages)(leaf(3, 6))


def test_a_stage_that_writes_into_the_whole_chains_input_leaves_it_alone(make: Any) -> None:
    x = leaf(3, 6)
    y = x * 1
    before = y.detach().clone()
    make([nn.ReLU(inplace=True), nn.Linear(6, 6), nn.ReLU(inplace=True)], y)(y).sum().backward()
    assert torch.equal(y, before)


# ----------------------------------------------------------------------------------------------------------- exceptions


class Failing(nn.Module):
    """Raises in the forward phase, in recomputes or never."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.when = nn.Linear(6, 6), "never"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        if self.when == ("recompute" if recomputing() else "forward"):
            raise ValueError("burnt")
        return y


def live_tensors() -> int:
    while gc.collect():  # what finalizers let go of, too
        pass
    return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())


@pytest.fixture
def chain_that_fails() -> tuple[Chain, Failing, torch.Tensor]:
    x, failing = leaf(3, 6), Failing()
    net = least([nn.Linear(6, 6), nn.Tanh(), failing, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)], x)
    net(x).sum().backward()
    net.zero_grad()
    return net, failing, x


@pytest.mark.parametrize("when", ["forward", "recompute"])
def test_an_exception_leaves_nothing_behind(chain_that_fails: tuple[Chain, Failing, torch.Tensor], when: str) -> None:
    net, failing, x = chain_that_fails
    x.grad = None
    before = live_tensors()
    for _ in range(2):
        failing.when = when
        state = torch.get_rng_state()
        try:
            net(x).sum().backward()
            raise AssertionError("the stage did not fail")
        except ValueError as error:
            assert "burnt" in str(error)  # noqa: PT017
        del state
        assert not recomputing()
        for p in net.parameters():
            p.grad = None
    x.grad = None
    assert live_tensors() == before
    failing.when = "never"
    net(x).square().sum().backward()
    (expected,) = torch.autograd.grad(plain(list(net.stages))(x).square().sum(), x)
    assert x.grad is not None
    assert torch.equal(x.grad, expected)


@pytest.mark.thinned(6)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full if number % 2 else ()) for number, name in enumerate(CASES)]
)
def test_profiling_leaves_nothing_behind(name: str) -> None:
    """An output that a stage saves under hooks must not keep its own graph alive."""
    case = CASES[name]
    stages = case.stages()
    called_once(case, stages)
    x = case.batch().requires_grad_(case.input_requires)
    state = case.state(x)
    before = live_tensors()
    for _ in range(2):
        Chain(stages, planner="revolve")._prepare(take_apart(state)[0], x.device)
    assert live_tensors() <= before


@pytest.mark.thinned(2)
@pytest.mark.on_cpu("bytes of the CPU are measured")
@pytest.mark.parametrize("planner", PLANNERS)
def test_nothing_is_left_after_a_step_or_a_dropped_call(planner: str) -> None:
    x = leaf(3, 6)
    net = Chain([nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()], planner=planner)
    net(x).sum().backward()
    net.zero_grad()
    x.grad = None
    before = live_tensors()
    with track_memory() as meter:  # tensors that only C++ holds count too
        for _ in range(3):
            net(x).sum().backward()
            net(x)  # no backward at all
            net.zero_grad()
            x.grad = None
    assert meter.end_nbytes == 0
    assert meter.peak_nbytes > 0
    assert live_tensors() == before
    assert not any(net._live.values())


def test_a_long_stage_that_draws_from_numpy_only_sometimes_is_recomputed_with_the_same_numbers() -> None:
    """It did not draw while it was profiled; stages of several milliseconds are watched at every call."""
    draws = False

    class Sometimes(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(600, 600))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(x @ self.weight) @ self.weight
            return y * float(numpy.random.rand()) if draws else y * 0.5

    torch.manual_seed(0)
    stages = [Sometimes() for _ in range(4)]
    x = torch.randn(3000, 600, requires_grad=True)
    net = Chain(stages, planner="periodic", segments=4)
    net(x).sum().backward()
    assert net.plan is not None
    if any(cost.forward_seconds < 5e-3 for cost in net.plan.profile.stages):
        pytest.skip("this machine is too fast for the stage to count as long")
    draws = True
    results = []
    for run in (net, torch.nn.Sequential(*stages)):
        for t in (x, *net.parameters()):
            t.grad = None
        numpy.random.seed(1)
        run(x).sum().backward()
        results.append([x.grad, *(p.grad for p in net.parameters())])
    for mine, expected in zip(*results, strict=True):
        assert mine is not None
        assert expected is not None
        assert torch.equal(mine, expected)


# ----------------------------------------------------------------------------------------------------------- buffers


def test_a_mean_that_the_first_input_leaves_as_it_was(make: Any) -> None:
    """Zeros say nothing of whether BatchNorm writes its mean."""
    stages: list[Any] = [nn.BatchNorm1d(6), *mlp()]
    theirs = copy.deepcopy(stages)
    zeros = torch.zeros(3, 6, requires_grad=True)
    net = make(stages, zeros)
    for x in (zeros, leaf(3, 6)):
        net(x).sum().backward()
        plain(theirs)(x.detach()).sum().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.equal(getattr(stages[0], name), getattr(theirs[0], name)), name


class Keeping(nn.Module):
    """Keeps a tensor whose graph saves nothing: of its input, or of its own weights alone."""

    def __init__(self, *, of_input: bool) -> None:
        super().__init__()
        self.linear, self.of_input = nn.Linear(16, 16), of_input

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = x * 2 if self.of_input else self.linear.bias * 2
        return torch.tanh(self.linear(x))


@pytest.mark.on_cpu("what is recomputed is planned by bytes on the CPU")
@pytest.mark.parametrize("of_input", [True, False])
def test_what_a_stage_keeps_has_its_graph(of_input: bool) -> None:
    """Short stages run without one where nothing outlives them; the gradient through such a tensor was lost."""
    stages = [Keeping(of_input=of_input) for _ in range(6)]
    x = torch.randn(8, 16)

    def differentiated(net: Any) -> list[torch.Tensor]:
        (net(x).square().mean() + stages[1].kept.sum()).backward()
        found = [p.grad.clone() for stage in stages for p in stage.parameters() if p.grad is not None]
        for stage in stages:
            stage.zero_grad()
            del stage.kept
        return found

    wanted, net = differentiated(nn.Sequential(*stages)), least(stages, x)
    if of_input:
        with pytest.raises(GradientError, match="inside of stage"):
            differentiated(net)
    else:
        assert all(map(torch.equal, wanted, differentiated(net)))
