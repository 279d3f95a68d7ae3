"""Optimizers of every kind, streamed as plain PyTorch steps them, bit for bit, or refused by name; none otherwise."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from low_bits import KeepsCodes
from streaming import options_of
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError, InputError

WIDTH = 12
HOMES = {"device": "auto", "disk": "adversarial", "host": "fake_streams"}


class Kind(torch.optim.Optimizer):
    """Descends; what each kind does besides is its own."""

    def __init__(self, params: Any, lr: float = 0.01, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.begin()
        for group in self.param_groups:
            self.enter(group)
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def begin(self) -> None: ...
    def enter(self, group: dict[str, Any]) -> None: ...
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"])


class CountsInGroup(Kind):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, count=0)

    def enter(self, group: dict[str, Any]) -> None:
        group["count"] += 1

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
        mean.mul_(0.9).add_(p.grad, alpha=0.1)
        p.sub_(mean / (1 - 0.9 ** group["count"]), alpha=group["lr"])


class CountsInPlace(Kind):
    """The count is a tensor in the group, and an entry of a list on the optimizer."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.counts = [0]
        for group in self.param_groups:
            group["count"] = torch.zeros(())

    def begin(self) -> None:
        self.counts[0] += 1

    def enter(self, group: dict[str, Any]) -> None:
        group["count"] += 1

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] / float(group["count"] + self.counts[0]))


class CountsOnItself(Kind):
    """Once for each group, be there gradients or not."""

    calls = 0

    def enter(self, group: dict[str, Any]) -> None:
        self.calls = self.calls + 1

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] / (1 + self.calls))


class CountsInState(Kind):
    """Under a key that is no parameter's."""

    def begin(self) -> None:
        self.state["count"] = self.state.get("count", 0) + 1

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad, alpha=group["lr"] / self.state["count"])


class KnowsItsGroups(Kind):
    """By their order, since it was made."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.rates = [group["lr"] for group in self.param_groups]

    def step(self, closure: Any = None) -> None:
        for group, rate in zip(self.param_groups, self.rates, strict=True):
            for p in group["params"]:
                if p.grad is not None:
                    p.data.sub_(p.grad, alpha=group["lr"] + rate)


class LooksAtTheFirst(Kind):
    """At the dtype and the device of its groups' first parameters."""

    def enter(self, group: dict[str, Any]) -> None:
        first = group["params"][0]
        group["one"] = torch.ones((), dtype=first.dtype, device=first.device)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * group["one"], alpha=group["lr"])


class Past(Kind):
    """Keeps three gradients of each, in a state that it makes anew."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        past = self.state[p].get("past", torch.zeros(3, *p.shape, dtype=p.dtype, device=p.device))
        self.state[p]["past"] = torch.cat([past[1:], p.grad[None]])  # type: ignore[index]
        p.sub_(self.state[p]["past"].mean(0), alpha=group["lr"])


class MakesStateAtOnce(Kind):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for p in [p for group in self.param_groups for p in group["params"]]:
            self.state[p] = {"start": p.detach().clone()}

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad + (p - self.state[p]["start"]), alpha=group["lr"])


class AllAtOnce(Kind):
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(some, [p.grad for p in some], alpha=-group["lr"])


class NormsAtOnce(Kind):
    """One tensor of a number for each parameter."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            with torch.no_grad():
                rates = torch.stack(torch._foreach_norm([p.grad for p in some])).clamp(min=1.0).reciprocal()
                made = torch._foreach_mul([p.grad for p in some], rates.mul(-group["lr"]).unbind())
                torch._foreach_add_(some, made)


class MultipliesBatches(Kind):
    """With as small matrices as those that it is tried on, a batch has the bits of each."""

    def __init__(self, params: Any, lr: float = 0.01, foreach: bool | None = None) -> None:
        super().__init__(params, lr, foreach=foreach)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            alike: dict[torch.Size, list[torch.Tensor]] = {}
            for p in some:
                alike.setdefault(p.shape, []).append(p)
            for shape, row in alike.items():
                if len(shape) != 2 or group["foreach"] is False:
                    made = [p.grad @ p.grad.mT @ p.grad if len(shape) == 2 else p.grad for p in row]
                else:
                    batch = torch.stack([p.grad for p in row])
                    made = list((batch @ batch.mT @ batch).unbind())
                torch._foreach_add_(row, made, alpha=-group["lr"])


class PutsAnotherTensorThere(Kind):
    """As ``p.data = ...`` does, and for parameters alone."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        if isinstance(p, nn.Parameter) and p.requires_grad:
            p.data = p.data - group["lr"] * p.grad


def descend(p: torch.Tensor, gradient: torch.Tensor, lr: float) -> None:
    p.sub_(torch.tanh(gradient), alpha=lr)


class Compiles(Kind):
    """With what must be compiled, as those of torchao do."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        rule = torch.compile(descend, fullgraph=True, backend="eager")
        rule(p.detach(), p.grad, group["lr"])


class WritesIntoGradients(Kind):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad.add_(p, alpha=0.1), alpha=group["lr"])  # type: ignore[union-attr]


class NormOfAll(Kind):
    def begin(self) -> None:
        found = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
        self.total = torch.stack(found).norm() if found else torch.ones(())

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad * (1e3 / self.total).clamp(max=1), alpha=group["lr"])


class MeanOfValues(Kind):
    """Pulls all parameters of a group towards the value of its first one."""

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad + group["params"][0].mean(), alpha=group["lr"])


class CountsEachTensor(Kind):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, count=0)

    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        group["count"] += 1
        p.sub_(p.grad, alpha=group["lr"] / group["count"])


class Draws(Kind):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        p.sub_(p.grad + torch.randn_like(p), alpha=group["lr"])


class CompilesAndDraws(Compiles):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        super().update(p, group)
        p.sub_(torch.randn_like(p), alpha=group["lr"])


class Grows(Kind):
    def update(self, p: torch.Tensor, group: dict[str, Any]) -> None:
        self.state[p]["all"] = torch.cat([self.state[p].get("all", p.new_zeros(0)), p.grad.flatten()])
        p.sub_(self.state[p]["all"].mean(), alpha=group["lr"])


class WantsAClosure(Kind):
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("a closure is needed")


EXACT = [
    CountsInGroup,
    CountsInPlace,
    CountsOnItself,
    CountsInState,
    KnowsItsGroups,
    LooksAtTheFirst,
    Past,
    MakesStateAtOnce,
    AllAtOnce,
    NormsAtOnce,
    PutsAnotherTensorThere,
    Compiles,
    WritesIntoGradients,
]
REFUSED = {
    NormOfAll: "looks across tensors",
    MeanOfValues: "looks across tensors",
    CountsEachTensor: "looks across tensors",
    Draws: "draws random numbers",
    CompilesAndDraws: "draws random numbers",
    Grows: "changes its shape",
    KeepsCodes: "keeps a state 'mean' that is a Codes",
    WantsAClosure: "a closure is needed",
}
OF_TORCH = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
}
REFUSED_OF_TORCH = {"LBFGS": "needs a closure", "SparseAdam": "does not support dense gradients"}


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, WIDTH), *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(3))
    )


def groups_of(one: nn.Module, matrices: bool = False) -> list[dict[str, Any]]:
    every = list(one.parameters())
    wide = [p for p in every if p.dim() == 2]
    if matrices:
        return [{"params": wide[:2]}, {"params": wide[2:], "lr": 0.03}]
    return [{"params": wide}, {"params": [p for p in every if p.dim() != 2], "lr": 0.03}]


def train(one: nn.Module, optimizer: Any, steps: range = range(3), clip: bool = False) -> dict[str, torch.Tensor]:
    """Parameters after each step, and what the optimizer shows in the end."""
    found, rates = {}, [group["lr"] for group in optimizer.param_groups]
    for step in steps:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * 0.9**step
        batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        one(batch).square().mean().backward()
        if clip:
            nn.utils.clip_grad_norm_(one.parameters(), 0.05)
        torch.manual_seed(step)
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step} {name}": p.detach().clone() for name, p in one.named_parameters()}
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for number, group in enumerate(optimizer.state_dict()["param_groups"]):
        for key, value in group.items():
            if isinstance(value, int | float | torch.Tensor):
                found[f"group {number} {key}"] = torch.as_tensor(value)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[key]) for key, value in one.items())


@contextlib.contextmanager
def streamed(home: str, folder: Path) -> Iterator[nn.Module]:
    """Its first layer belongs to no block."""
    made = ts.stream(model(), budget="1MiB", **options_of(HOMES[home], folder, home, "cpu"))
    try:
        yield made
    finally:
        ts.unstream(made)


def check(make: Any, home: str, update: str, folder: Path, groups: Callable[[nn.Module], Any] = groups_of) -> None:
    theirs = model()
    clip = update == "step"  # the other allows no clipping
    wanted = train(theirs, make(groups(theirs), lr=0.02), clip=clip)
    with streamed(home, folder) as ours:
        optimizer = ts.optimizer(ours, make, lr=0.02, update=update, groups=groups(ours))
        assert same(wanted, train(ours, optimizer, clip=clip))


@pytest.mark.on_cpu("homes are its own")
@pytest.mark.thinned(3)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("make", EXACT)
def test_every_kind_is_exact(make: type[Kind], update: str, home: str, tmp_path: Path) -> None:
    check(make, home, update, tmp_path)


@pytest.mark.on_cpu("homes are its own")
@pytest.mark.thinned(2)
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("name", OF_TORCH)
def test_all_of_torch_are_exact_or_refused(name: str, update: str, tmp_path: Path) -> None:
    if name in REFUSED_OF_TORCH:
        with streamed("disk", tmp_path) as ours, pytest.raises(InputError, match=REFUSED_OF_TORCH[name]):
            ts.optimizer(ours, OF_TORCH[name], update=update, lr=0.02)
        return
    for home in ("disk", "device"):
        check(OF_TORCH[name], home, update, tmp_path, lambda one: groups_of(one, name == "Muon"))


@pytest.mark.on_cpu("homes are its own")
@pytest.mark.parametrize("make", REFUSED)
def test_others_are_refused_and_the_advice_works(make: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    with streamed("disk", tmp_path) as ours, pytest.raises(InputError, match=REFUSED[make]) as found:
        ts.optimizer(ours, make)
    if make is WantsAClosure:
        return
    assert f"make it yourself, {make.__name__}(model.parameters(), ...)" in str(found.value)
    theirs = model()
    wanted = train(theirs, make(theirs.parameters(), lr=0.02))
    for home in HOMES:
        with streamed(home, tmp_path) as ours:
            assert same(wanted, train(ours, make(ours.parameters(), lr=0.02)))


@pytest.mark.on_cpu("homes are its own")
def test_batches_of_several_parameters_are_refused_and_the_advice_works(tmp_path: Path) -> None:
    with streamed("disk", tmp_path) as ours, pytest.raises(InputError, match="looks across tensors") as found:
        ts.optimizer(ours, MultipliesBatches)
    assert "give ts.optimizer(model, MultipliesBatches, ...) foreach=False" in str(found.value)
    theirs = model()
    wanted = train(theirs, MultipliesBatches(groups_of(theirs), lr=0.02, foreach=False))
    with streamed("disk", tmp_path) as ours:
        optimizer = ts.optimizer(ours, MultipliesBatches, lr=0.02, foreach=False, groups=groups_of(ours))
        assert same(wanted, train(ours, optimizer))


@pytest.mark.parametrize("make", [CountsInGroup, CountsInPlace, CountsOnItself, CountsInState])
def test_checkpoints_hold_the_counters(make: type[Kind], tmp_path: Path) -> None:
    theirs = model()
    plain = make(groups_of(theirs), lr=0.02)
    train(theirs, plain)
    wanted = train(theirs, plain, range(3, 5))
    with streamed("device", tmp_path) as ours:
        first = ts.optimizer(ours, make, lr=0.02, groups=groups_of(ours))
        train(ours, first)
        ts.save(tmp_path / "saved", model=ours, optimizer=first)
    with streamed("device", tmp_path) as ours:
        second = ts.optimizer(ours, make, lr=0.02, groups=groups_of(ours))
        ts.load(tmp_path / "saved", model=ours, optimizer=second)
        assert same(wanted, train(ours, second, range(3, 5)))


def test_groups_without_gradients_are_counted(tmp_path: Path) -> None:
    theirs = model()
    plain = CountsInGroup(groups_of(theirs))
    with streamed("device", tmp_path) as ours:
        optimizer = ts.optimizer(ours, CountsInGroup, groups=groups_of(ours))
        for step in range(3):
            for one, stepped in ((theirs, plain), (ours, optimizer)):
                one(torch.ones(2, 8)).square().mean().backward()
                for p in one.parameters():
                    p.grad = None if step == 0 or (step == 1 and p.dim() == 2) else p.grad
                stepped.step()
                stepped.zero_grad()
            assert [g["count"] for g in optimizer.param_groups] == [g["count"] for g in plain.param_groups]
        assert same(dict(theirs.named_parameters()), dict(ours.named_parameters()))


class Late(Kind):
    """Looks across tensors in a later step than any that is tried."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr, norm=0.0, count=0)

    def enter(self, group: dict[str, Any]) -> None:
        group["count"] += 1
        if group["count"] > 20:
            group["norm"] = float(sum(p.grad.norm() for p in group["params"] if p.grad is not None))


def test_what_no_trial_has_seen_is_noticed(tmp_path: Path) -> None:
    with streamed("disk", tmp_path) as ours:
        optimizer = ts.optimizer(ours, Late, groups=groups_of(ours))
        train(ours, optimizer, range(20))
        with pytest.raises(GradientError, match=r"writes param_groups\[\d\]\['norm'\].* it looks across tensors"):
            train(ours, optimizer, range(20, 21))


def test_gradients_that_a_step_has_written_into_are_not_added_to(tmp_path: Path) -> None:
    with streamed("disk", tmp_path) as ours:
        optimizer = ts.optimizer(ours, WritesIntoGradients)
        train(ours, optimizer, range(1))
        ours(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(GradientError, match=r"call optimizer\.zero_grad"):
            ours(torch.ones(2, 8))
        optimizer.zero_grad(set_to_none=False)
        ours(torch.ones(2, 8)).sum().backward()


def test_a_rate_changed_after_blocks_were_updated_is_refused(tmp_path: Path) -> None:
    with streamed("disk", tmp_path) as ours:
        optimizer = ts.optimizer(ours, torch.optim.SGD, lr=0.1, update="backward")
        ours(torch.ones(2, 8)).sum().backward()
        optimizer.param_groups[0]["lr"] = 0.05
        with pytest.raises(GradientError, match="was changed between backward"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
        optimizer.zero_grad()
        train(ours, optimizer)


class CallsTwice(Kind):
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            closure(), closure()
        super().step()


def test_a_closure_that_is_called_twice_is_refused(tmp_path: Path) -> None:
    with streamed("device", tmp_path) as ours:
        optimizer = ts.optimizer(ours, CallsTwice)
        with pytest.raises(InputError, match="calls its closure 2 times"):
            optimizer.step(lambda: 0.0)
        train(ours, optimizer)
