"""Ways of using a streamed model: each is either bit for bit plain PyTorch, or refused by name."""

import copy
import gc
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from streamable import MODELS, WIDTH, Chained, Dense, Model, Positioned, Scaled, dense, gpt, numbers
from streaming import budget_at, everything, gradients_of, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.frontends.stream import handle_of
from tapestream.models.gpt import Block
from tapestream.storage.meter import track_memory

PLAIN = MODELS["frozen_some"]
CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)), numbers(3, WIDTH))
Pair = tuple[nn.Module, nn.Module, Any, Any]


def sgd(model: nn.Module, update: str = "step") -> Any:
    return ts.optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.9, update=update, master=None)


@pytest.fixture(params=["adversarial least", "auto full"])
def setting(request: Any, tmp_path: Path) -> dict[str, Any]:
    engine, level = request.param.split()
    options = options_of(engine, tmp_path / "home")
    return options | {"budget": budget_at(level, CASE, sgd, **options)}


@pytest.fixture
def pair(setting: dict[str, Any]) -> Iterator[Pair]:
    """A plain model and a streamed one, and an optimizer for each."""
    theirs = CASE.model()
    with streamed(CASE, **setting) as ours:
        yield theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)


@pytest.fixture
def eager(tmp_path: Path) -> Iterator[nn.Module]:
    """A streamed model that is updated within its backward."""
    options = options_of("adversarial", tmp_path)
    with streamed(CASE, budget_at("least", CASE, lambda m: sgd(m, "backward"), **options), **options) as ours:
        sgd(ours, "backward")
        yield ours


def both(pair: Pair, run: Callable[[nn.Module, Any], None], steps: int = 3) -> None:
    """``run`` some steps on both; compare gradients before and weights after each."""
    seen: list[dict[str, Any]] = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        found = {}
        for step in range(steps):
            run(model, optimizer)
            found |= {f"{step} gradient {n}": g for n, g in gradients_of(model).items()}
            optimizer.step()
            optimizer.zero_grad()
            found |= everything(model, f"{step} ")
        seen.append(found)
    assert_same(*seen)


def batch() -> torch.Tensor:
    return torch.randn(3, WIDTH)


# ----------------------------------------------------------------------------------------- backwards of several calls


def test_three_micro_batches(pair: Pair) -> None:
    both(pair, lambda model, _: [loss_at(model, CASE).backward() for _ in range(3)] and None)


@pytest.mark.parametrize("to_none", [True, False])
def test_zero_grad_before_and_within_a_step(pair: Pair, to_none: bool) -> None:
    def run(model: nn.Module, optimizer: Any) -> None:
        loss_at(model, CASE).backward()
        loss = loss_at(model, CASE)
        optimizer.zero_grad(set_to_none=to_none)
        loss.backward()
        loss = loss_at(model, CASE)
        model.zero_grad(set_to_none=to_none)
        loss.backward()

    both(pair, run)


def test_two_forwards_then_two_backwards(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        first, second = loss_at(model, CASE), loss_at(model, CASE)
        first.backward()
        second.backward()

    both(pair, run)


@pytest.mark.parametrize("before", [False, True])
def test_one_backward_through_several_calls(pair: Pair, before: bool) -> None:
    def run(model: nn.Module, _: Any) -> None:
        if before:
            loss_at(model, CASE).backward()
        loss = loss_at(model, CASE) + loss_at(model, CASE) * loss_at(model, CASE)
        loss.backward()

    both(pair, run)


def test_one_backward_through_several_calls_of_tied_blocks(tmp_path: Path) -> None:
    case = MODELS["repeated"]
    options = options_of("adversarial", tmp_path)
    budget = budget_at("least", case, sgd, **options)
    theirs = case.model()
    with streamed(case, budget, **options) as ours:
        def run(model: nn.Module, _: Any) -> None:
            loss_at(model, case).backward()
            (loss_at(model, case) + loss_at(model, case)).backward()

        both((theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)), run)


def test_a_call_on_what_another_returned(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        x = batch()
        y = model(x)
        model(x + y.mean()).square().mean().backward()

    both(pair, run)


def test_a_second_live_forward_is_refused_where_backward_updates(eager: nn.Module) -> None:
    model = eager
    loss = loss_at(model, CASE)
    with pytest.raises(GradientError, match=r"second forward.*update='backward'.*use update='step'"):
        model(batch())
    loss.backward()
    loss_at(model, CASE).backward()


# ---------------------------------------------------------------------------------------------- parts of a backward


class Peeking(Chained):
    """Also returns what the third block gave."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for k, block in enumerate(self.blocks):
            x = block(x)
            middle = x if k == 2 else middle if k > 2 else x
        return self.after(x), middle


PEEKING = Model(lambda: Peeking(dense(), None, nn.Linear(WIDTH, 2)), numbers(3, WIDTH))


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("part", ["inner", "both", "outer"])
def test_a_loss_on_an_inner_state(part: str, update: str, tmp_path: Path) -> None:
    options = options_of("adversarial", tmp_path)
    budget = budget_at("least", PEEKING, lambda m: sgd(m, update), **options)
    theirs = PEEKING.model()
    plain = torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9)
    with streamed(PEEKING, budget, **options) as ours:
        ends = []
        for model, optimizer in ((theirs, plain), (ours, sgd(ours, update))):
            seed(3)
            for _ in range(3):
                out, middle = model(batch())
                terms = {"inner": [middle], "outer": [out], "both": [out, middle]}[part]
                sum(t.square().mean() for t in terms).backward()
                del out, middle, terms
                optimizer.step()
                optimizer.zero_grad()
            ends.append(everything(model))
        assert_same(*ends)


def test_gradients_of_the_input_alone(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        x = batch().requires_grad_()
        (given,) = torch.autograd.grad(model(x).square().mean(), x)
        y = (batch() + given).requires_grad_()
        model(y).square().mean().backward(inputs=[y])
        assert y.grad is not None
        (model(batch()) * y.grad.mean()).square().mean().backward()

    both(pair, run)


def test_gradients_of_the_input_beside_those_of_parameters(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        x = batch().requires_grad_()
        model(x).square().mean().backward()
        assert x.grad is not None
        model(x.grad).square().mean().backward()

    both(pair, run)


def test_an_inner_parameter_cannot_be_asked_for(pair: Pair) -> None:
    with pytest.raises(RuntimeError):
        torch.autograd.grad(pair[1](batch()).sum(), pair[1].blocks[0].linear.weight)


def test_a_second_backward_raises(pair: Pair) -> None:
    loss = loss_at(pair[1], CASE)
    loss.backward(retain_graph=True)
    with pytest.raises(GradientError, match="second time.*retain_graph=True is not supported"):
        loss.backward()
    both(pair, lambda model, optimizer: (optimizer.zero_grad(), loss_at(model, CASE).backward()) and None)


def test_double_backward_raises(pair: Pair) -> None:
    x = batch().requires_grad_()
    (given,) = torch.autograd.grad(pair[1](x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError):
        given.square().sum().backward()


# ------------------------------------------------------------------------------------- between forward and backward


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_between_and_within_steps(pair: Pair, guard: Any) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss = loss_at(model, CASE)
        model.eval()
        with guard():
            value = float(model(torch.ones(3, WIDTH)).sum())
        model.train()
        (loss * value).backward()
        with guard():
            loss_at(model, CASE)

    both(pair, run)


def test_weights_changed_between_forward_and_backward_raise(pair: Pair) -> None:
    model = pair[1]
    loss = loss_at(model, CASE)
    with torch.no_grad():
        model.blocks[2].linear.weight.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"changed after this forward|modified by an inplace|in-place operation"):
        loss.backward()


def test_a_step_between_forward_and_backward_raises(pair: Pair) -> None:
    model, optimizer = pair[1], pair[3]
    loss_at(model, CASE).backward()
    loss = loss_at(model, CASE)
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"changed after this forward|modified by an inplace|in-place operation"):
        loss.backward()
    model.zero_grad()
    loss_at(model, CASE).backward()


def test_a_new_optimizer_between_forward_and_backward_is_refused(pair: Pair) -> None:
    loss = loss_at(pair[1], CASE)
    with pytest.raises(InputError, match="between a forward and its backward"):
        sgd(pair[1])
    loss.backward()
    pair[3].step()


def test_a_result_that_is_dropped_leaves_nothing(pair: Pair) -> None:
    ours, optimizer = pair[1], pair[3]

    def step() -> None:
        loss_at(ours, CASE).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    gc.collect()
    with track_memory() as meter:
        loss_at(ours, CASE)
        ours.zero_grad()
    assert abs(meter.end_nbytes) < 64, "a dropped forward left memory behind"


def test_dropped_forwards_change_nothing(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE)
        loss = loss_at(model, CASE)
        loss = loss_at(model, CASE)
        loss.backward()

    both(pair, run)


# ------------------------------------------------------------------------------------------------------- exceptions


class Fused(Dense):
    """Raises in the given run."""

    fuse = 10**9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Fused.fuse -= 1
        if Fused.fuse < 0:
            raise ValueError("burnt")
        return super().forward(x)


def failing(place: str, model: nn.Module) -> None:
    """One step that ends in an exception at ``place``."""
    if place in ("forward", "recompute"):
        Fused.fuse = 0 if place == "forward" else 1
    handle = None
    if place == "gradient hook":
        handle = model.blocks[4].linear.weight.register_hook(lambda g: 1 / 0)
    if place == "forward hook":
        handle = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
    try:
        with pytest.raises((ValueError, ZeroDivisionError)):
            loss = loss_at(model, FUSED)
            if place == "head":
                loss.register_hook(lambda g: 1 / 0)
            loss.backward()
    finally:
        Fused.fuse = 10**9
        if handle is not None:
            handle.remove()


FUSED = Model(lambda: Chained([Fused() if k == 3 else Dense() for k in range(6)], nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))


@pytest.mark.parametrize("place", ["forward", "recompute", "gradient hook", "forward hook", "head"])
@pytest.mark.parametrize("level", ["least", "half"])
def test_after_an_exception_the_next_step_is_exact(place: str, level: str, tmp_path: Path) -> None:
    options = options_of("adversarial", tmp_path) | {"planner": "bisection"}  # recomputes, whatever the budget
    budget = budget_at(level, FUSED, sgd, **options)
    theirs = FUSED.model()
    with streamed(FUSED, budget, **options) as ours:
        optimizer = sgd(ours)
        pair = theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), optimizer
        both(pair, lambda model, _: loss_at(model, FUSED).backward(), steps=1)
        failing(place, ours)
        handle = handle_of(ours)
        ours.zero_grad()
        assert not handle.store.copies.tickets
        assert not handle.store.gradients.fresh
        assert_same(everything(theirs), everything(ours))
        both(pair, lambda model, _: loss_at(model, FUSED).backward(), steps=2)


# ----------------------------------------------------------------------------------------- what blocks may be given


def test_a_second_argument_that_requires_a_gradient_is_refused() -> None:
    class Scaling(Dense):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    model = ts.stream(Scaled([Scaling() for _ in range(3)]), device="cpu")
    with pytest.raises(InputError, match="block 0 takes a second tensor that requires a gradient.*detach"):
        model(batch())
    ts.unstream(model)


def test_a_tensor_held_otherwise_that_requires_a_gradient_is_refused() -> None:
    class Closing(Dense):
        def __init__(self, held: list[torch.Tensor]) -> None:
            super().__init__()
            self.held = held

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.held[0]

    held = [nn.Parameter(torch.ones(WIDTH))]
    model = ts.stream(Chained([Closing(held) for _ in range(3)]), device="cpu")
    with pytest.raises(InputError, match=r"block 0 \(Closing\) uses a tensor of shape \(16,\).*make it a parameter of the block"):
        model(batch())
    ts.unstream(model)


def test_an_output_changed_in_place_between_blocks_is_right_or_refused(tmp_path: Path) -> None:
    blocks = [nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(6)]
    case = Model(lambda: Positioned(copy.deepcopy(blocks), in_place=True), numbers(3, WIDTH))
    theirs = case.model()
    with streamed(case, "1 MiB", **options_of("adversarial", tmp_path)) as ours:
        pair = theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)
        try:
            both(pair, lambda model, _: loss_at(model, case).backward())
        except (InputError, GradientError, RuntimeError) as error:
            assert "in-place" in str(error) or "in place" in str(error)  # noqa: PT017


def test_one_block_in_two_chains_is_refused(tmp_path: Path) -> None:
    class Twice(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            x = x * 2
            for block in self.blocks:
                x = block(x)
            return x

    case = Model(lambda: Twice(dense(3)), numbers(3, WIDTH))
    with streamed(case, "1 MiB", **options_of("auto", tmp_path)) as model:
        with pytest.raises(InputError, match="block 0 .*more than one chain"):
            model(batch())


def test_another_order_of_blocks_is_refused() -> None:
    class Turning(Chained):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks if self.forwards else reversed(self.blocks):
                x = block(x)
            return x

    model = Turning(dense(3))
    model.forwards = True
    ts.stream(model, device="cpu")
    model(batch())
    model.forwards = False
    with pytest.raises(InputError, match="block 2 was called where block 0 was called"):
        model(batch())
    ts.unstream(model)


# ------------------------------------------------------------------------------------------------- parameters


def test_a_copy_of_all_weights_between_steps(pair: Pair) -> None:
    """An exponential moving average that is swapped in for an evaluation."""
    averages: dict[int, dict[str, torch.Tensor]] = {}

    def run(model: nn.Module, _: Any) -> None:
        average = averages.setdefault(id(model), {n: p.detach().clone() for n, p in model.named_parameters()})
        with torch.no_grad():
            for name, p in model.named_parameters():
                average[name].lerp_(p, 0.25)
            kept = {n: p.detach().clone() for n, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.copy_(average[name])
            value = model(torch.ones(3, WIDTH)).sum()
            for name, p in model.named_parameters():
                p.copy_(kept[name])
        (loss_at(model, CASE) * value).backward()

    both(pair, run)


def test_data_replaced_between_steps(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for p in model.parameters():
            p.data = p.data * 0.5
        loss_at(model, CASE).backward()

    both(pair, run)


def test_state_dict_round_trip(pair: Pair) -> None:
    saved = [copy.deepcopy(model.state_dict()) for model in pair[:2]]
    assert_same(*saved)
    both(pair, lambda model, _: loss_at(model, CASE).backward())
    for model, state in zip(pair[:2], saved, strict=True):
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        model.load_state_dict(torch.load(file))
    both(pair, lambda model, _: loss_at(model, CASE).backward())


def test_replaced_parameters_are_refused(pair: Pair) -> None:
    theirs, ours, *_ = pair
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()), assign=True)
    with pytest.raises(InputError, match=r"before.weight.*replaced.*assign=True"):
        loss_at(ours, CASE)


def test_gradients_that_users_hold_stay(pair: Pair) -> None:
    held: dict[int, list[torch.Tensor]] = {0: [], 1: []}
    for which, model in enumerate(pair[:2]):
        seed(3)
        for _ in range(3):
            loss_at(model, CASE).backward()
            held[which].extend(p.grad for p in model.parameters() if p.grad is not None)
            model.zero_grad()
    for a, b in zip(held[0], held[1], strict=True):
        assert torch.equal(a, b)


def test_frozen_later_and_thawed(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        model.blocks[1].requires_grad_(False)
        loss_at(model, CASE).backward()
        model.blocks[1].requires_grad_(True)
        loss_at(model, CASE).backward()
        model.blocks[4].requires_grad_(False)
        loss_at(model, CASE).backward()
        model.blocks[4].requires_grad_(True)

    both(pair, run)


def test_batches_of_many_lengths(pair: Pair) -> None:
    def run(model: nn.Module, _: Any) -> None:
        for rows in (3, 1, 2, 3, 1):
            model(torch.randn(rows, WIDTH)).square().mean().backward()

    both(pair, run)


def test_hooks_on_parameters_run_once_per_backward(pair: Pair) -> None:
    counts: list[list[str]] = []
    for model in pair[:2]:
        seen: list[str] = []
        counts.append(seen)
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name, seen=seen: seen.append(name) or g * 2)
            p.register_post_accumulate_grad_hook(lambda p, name=name, seen=seen: seen.append("after " + name))

    def run(model: nn.Module, _: Any) -> None:
        loss_at(model, CASE).backward()
        (loss_at(model, CASE) + loss_at(model, CASE)).backward()

    both(pair, run)
    assert sorted(counts[0]) == sorted(counts[1])


# ------------------------------------------------------------------------------------------------------- identity


def test_identity_and_undoing(setting: dict[str, Any]) -> None:
    model = CASE.model()
    before = {name: (id(p), type(m)) for name, m in model.named_modules() for p in m.parameters()}
    parameters, state, classes = list(model.parameters()), everything(model), [type(m) for m in model.modules()]
    attributes = [set(vars(m)) for m in model.modules()]
    assert ts.stream(model, **setting) is model
    assert isinstance(model.blocks[0], Dense)
    assert isinstance(model, Chained)
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert_same(state, everything(model))
    with pytest.raises(InputError, match=r"streamed already; call tapestream\.unstream"):
        ts.stream(model, **setting)
    optimizer = sgd(model)
    loss_at(model, CASE).backward()
    optimizer.step()
    trained, gradients = everything(model), gradients_of(model)
    assert ts.unstream(model) is model
    assert not any(Path(setting["folder"]).iterdir())
    assert [type(m) for m in model.modules()] == classes
    assert [set(vars(m)) for m in model.modules()] == attributes
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert before == {name: (id(p), type(m)) for name, m in model.named_modules() for p in m.parameters()}
    assert_same(trained, everything(model))
    assert_same(gradients, gradients_of(model))
    with pytest.raises(InputError, match=r"not streamed; call tapestream\.stream"):
        ts.unstream(model)
    copy.deepcopy(model)(batch()).sum().backward()


@pytest.mark.parametrize("way", [copy.deepcopy, copy.copy, lambda m: torch.save(m, io.BytesIO())])
@pytest.mark.parametrize("part", ["model", "block"])
def test_copies_and_pickles_are_refused(pair: Pair, way: Callable[[Any], Any], part: str) -> None:
    with pytest.raises(InputError, match=r"streamed.*cannot be (copied|pickled).*state_dict\(\)"):
        way(pair[1] if part == "model" else pair[1].blocks[1])


def test_a_block_alone(pair: Pair) -> None:
    ours = pair[1]
    with pytest.raises(InputError, match=r"block 2 \(Dense\) of a streamed model was called by itself"):
        ours.blocks[2](batch())
    x = batch()
    with torch.no_grad():
        assert torch.equal(ours.blocks[2](x), pair[0].blocks[2](x))


def test_blocks_made_on_meta_become_real_one_by_one(tmp_path: Path) -> None:
    with torch.device("meta"):
        hollow = gpt()
    real = gpt()
    ts.stream(hollow, device="cpu", folder=tmp_path)
    assert isinstance(hollow.blocks[1], Block)
    assert_same(everything(real), everything(hollow))
    ts.unstream(hollow)
    assert_same(everything(real), everything(hollow))


def test_wrapping_takes_one_block_beyond_the_rest(tmp_path: Path) -> None:
    class Wide(Dense):
        def __init__(self) -> None:
            super().__init__(256)

        def initialize(self) -> None:
            for p in self.parameters():
                nn.init.normal_(p)

    with torch.device("meta"):
        hollow = Chained([Wide() for _ in range(12)])
    with track_memory() as meter:
        ts.stream(hollow, device="cpu", folder=tmp_path)
    block = sum(p.nbytes for p in hollow.blocks[0].parameters())
    assert block <= meter.peak_nbytes <= 2.5 * block + 2**14
    assert meter.end_nbytes <= 2**14
    ts.unstream(hollow)


@pytest.mark.parametrize(("engine", "home"), [("adversarial", "disk"), ("fake_streams", "disk"), ("fake_streams", "host")])
@pytest.mark.parametrize("share", [1.2, 100.0])
def test_calls_without_gradients_look_one_block_ahead(engine: str, home: str, share: float, tmp_path: Path) -> None:
    """Within half of the budget: with a narrow one there is never a second block."""
    block = 4096  # a page: that is how blocks are laid out
    outside = sum(2 * p.nbytes for n, p in CASE.model().named_parameters() if not n.startswith("blocks"))
    budget = int(2 * (outside + share * block))
    with streamed(CASE, budget, **options_of(engine, tmp_path, home)) as model:
        x, store = batch(), handle_of(model).store
        held: list[int] = []
        model.blocks[2].register_forward_hook(lambda *_: held.append(handle_of(model).pool.held_nbytes(ts.Tier.DEVICE)))
        ahead: list[int] = []
        model.blocks[2].register_forward_pre_hook(lambda *_: ahead.extend(v.index for v, t in store.copies.tickets))
        for _ in range(2):
            with torch.no_grad():
                out = model(x)
        assert torch.equal(out, CASE.model()(x))
        assert ahead == ([] if share < 2 else [3, 3])
        assert max(held) <= budget // 2
        assert handle_of(model).pool.held_nbytes(ts.Tier.DEVICE) == 0


def test_plans_serve_slightly_smaller_batches(tmp_path: Path) -> None:
    profiled: list[str] = []
    options = options_of("auto", tmp_path) | {"progress": lambda what, *_: profiled.append(what)}
    with streamed(CASE, "1 MiB", **options) as model:
        for rows in (100, 99, 80, 90, 76, 100):
            model(torch.randn(rows, WIDTH)).sum().backward()
        assert profiled.count("profiling") == len(model.blocks)
        model(torch.randn(60, WIDTH)).sum().backward()
        assert profiled.count("profiling") == 2 * len(model.blocks)
