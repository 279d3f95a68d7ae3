"""What blocks are given and something else in the forward uses later: gradients added in plain PyTorch's order."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import seed
from pairs import sgd
from streamable import Model, numbers
from streaming import assert_exact, budget_at, loss_at, options_of, streamed
from torch import nn
from torch.nn import functional as F

from benchmarks.common import streamed_peak_nbytes
from tapestream.errors import GradientError, InputError
from tapestream.frontends.module.calls.following import Following
from tapestream.frontends.module.observing.reused import Reused
from tapestream.frontends.module.stream import handle_of

WIDTH = 24


class Residual(nn.Module):
    """Uses its input three times, and what conditions it twice."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), nn.Linear(width, width)
        self.shift, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """(rows, width) twice to the same."""
        gate = torch.sigmoid(self.gate(F.silu(given)))
        return x + gate * self.inner(self.norm(x) + self.shift(F.silu(given))) * torch.tanh(x)


class Reusing(nn.Module):
    """Blocks, what conditions them, and ``tail(self, states, given)``; ``then(self, x, given)`` goes on between."""

    def __init__(self, tail: Callable[..., torch.Tensor], count: int = 4, parts: int = 1) -> None:
        super().__init__()
        self.enter, self.condition = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList(nn.ModuleList(Residual() for _ in range(count)) for _ in range(parts))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(parts))
        self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.tail = tail

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to a scalar or another tensor."""
        given, x = torch.tanh(self.condition(x)), self.enter(x)
        states = [x]
        for blocks, between in zip(self.parts, self.between, strict=True):
            for block in blocks:
                x = block(x, given)
                states.append(x)
            x = between(x)
        return self.tail(self, [*states, x], given)


def conditioned(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """As in DiT and Flux: the last norm is conditioned, too."""
    return model.out(model.norm(states[-1]) * (1 + F.silu(given)) + given)


def skipping(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """As in a UNet: every state is concatenated or added to something later."""
    x = states[-1]
    for state in reversed(states[:-1]):
        x = torch.cat([x, state], dim=-1).unflatten(-1, (2, -1)).mean(-2) + state.T.T
    return model.out(x)


def pyramid(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """As in a backbone with a neck: each state has a norm of its own use."""
    return torch.stack(tuple(model.norm(state) * torch.sigmoid(state) for state in states)).sum(0)


def overheard(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Asks for gradients of what it goes on with, which is about the tensors themselves."""
    model.heard = states[1]
    states[1].retain_grad()
    assert states[1].requires_grad
    assert states[1].grad_fn is not None
    return model.out(states[-1]) * states[1] + states[1].exp() + states[1].real


def written(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Writes into what the last block made, which is then another."""
    last = states[-1]
    x = last.sigmoid()
    last.add_(1)
    return model.out(x + last) + F.silu(given)


def twice(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """One loss over all: what conditions everything is used between, in a second chain, and behind it."""
    return model.out(states[-1]) * given + model.norm(states[0]) * given


def added(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
    """Skips written into something else."""
    x = model.between[0](states[-1])
    for state in states[:-1]:
        x += state
        x[:1] = state[:1]
        x.sub_(state, alpha=0.1)
    return model.out(x)


CASES = {
    "added": (added, 1),
    "conditioned": (conditioned, 1), "skips": (skipping, 1), "pyramid": (pyramid, 1), "overheard": (overheard, 1),
    "written": (written, 1), "two chains": (twice, 2), "two chains, skips": (skipping, 2),
}  # fmt: skip


def case_of(name: str) -> Model:
    tail, parts = CASES[name]
    return Model(lambda: Reusing(tail, 4, parts), numbers(64, WIDTH))


@pytest.mark.thinned(6)
@pytest.mark.parametrize("level", ["half", "least"])
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_plain_pytorchs(name: str, level: str, tmp_path: Path) -> None:
    case, found = case_of(name), options_of("adversarial", tmp_path)
    assert_exact(case, budget_at(level, case, sgd, **found), **found)


@pytest.mark.parametrize("name", ["conditioned", "skips"])
def test_micro_batches_and_updates_within_backward(name: str, tmp_path: Path) -> None:
    case, found = case_of(name), options_of("fake_streams", tmp_path)
    assert_exact(case, budget_at("least", case, sgd, **found), micro_batches=2, **found)
    budget = budget_at("least", case, lambda m: sgd(m, "backward"), **found)
    assert_exact(case, budget, update="backward", **found)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("level", ["half", "least"])
@pytest.mark.parametrize("name", [name for name in CASES if name != "two chains"])  # which holds what it never uses
def test_peaks(name: str, level: str, tmp_path: Path) -> None:
    """What is held for the later use, and its gradient, counts."""
    tail, parts = CASES[name]
    case, found = Model(lambda: Reusing(tail, 6, parts), numbers(2048, WIDTH)), options_of("auto", tmp_path)
    budget = budget_at(level, case, sgd, **found)
    with streamed(case, budget, **found) as model:
        optimizer = sgd(model)

        def step() -> None:
            loss_at(model, case).backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        assert streamed_peak_nbytes(model, step, "cpu") <= budget


class Nothing(Reusing):
    """Between blocks, functions that do nothing, and give back their argument itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        given, x = torch.tanh(self.condition(x)), self.enter(x)
        for block in self.parts[0]:
            x, given = block(x.contiguous(), given.to(x.dtype)), F.dropout(given.float(), 0.5, training=False)
        x.contiguous().register_hook(lambda gradient: 2 * gradient)
        return conditioned(self, [x], given)


def test_functions_that_do_nothing(tmp_path: Path) -> None:
    case, found = Model(lambda: Nothing(conditioned), numbers(64, WIDTH)), options_of("adversarial", tmp_path)
    assert_exact(case, budget_at("least", case, sgd, **found), **found)


class Outside(Reusing):
    """The residual is outside of the blocks: each state is used once more, right behind its block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        given, x = torch.tanh(self.condition(x)), self.enter(x)
        for block in self.parts[0]:
            x = x + block(x, given)
        return self.out(x)


def test_what_is_used_again_at_once_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what counts does not grow with the depth."""
    counted, held = [], Reused.held_nbytes.fget
    assert held is not None
    monkeypatch.setattr(Reused, "held_nbytes", property(lambda self: counted.append(held(self)) or counted[-1]))
    found = options_of("adversarial", tmp_path)
    case = Model(lambda: Outside(conditioned, 4), numbers(64, WIDTH))
    assert_exact(case, budget_at("least", case, sgd, **found), **found)
    deep = Model(lambda: Outside(conditioned, 16), numbers(64, WIDTH))
    with streamed(deep, "1 GiB", **found) as model:
        loss_at(model, deep)
    assert 0 < counted[-1] == counted[0] <= 4 * 64 * WIDTH * 4


def test_a_gradient_asked_for_inside_is_refused_by_name(tmp_path: Path) -> None:
    def asking(model: Any, states: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(states[1].sin().sum(), states[1], retain_graph=True)
        return model.out(states[-1]) + slope + states[1]

    case, found = Model(lambda: Reusing(asking), numbers(64, WIDTH)), options_of("auto", tmp_path)
    with (
        streamed(case, "1 MiB", **found) as model,
        pytest.raises(GradientError, match=r"inside of the model's forward"),
    ):
        loss_at(model, case)


def test_sums_go_on_from_later_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without that the bits differ: the models here can tell."""
    monkeypatch.setattr(Following, "current", lambda self, tensor: tensor)
    found = options_of("adversarial", tmp_path)
    for name in ("conditioned", "skips", "pyramid", "two chains"):
        case = case_of(name)
        with pytest.raises(AssertionError):
            assert_exact(case, budget_at("least", case, sgd, **found), **found)


class Shifted(nn.Module):
    """Blocks that save nothing of their input, so that plain PyTorch lets it be changed afterwards."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.enter, self.out, self.how = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), how
        self.blocks = nn.ModuleList(Shift() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        """(rows, width) to the same, or with a state."""
        first = x = self.enter(x).tanh() + 0
        for block in self.blocks:
            x = block(x)
        if self.how == "before any use":
            first.mul_(2)
            return self.out(x) + first.sin()
        view = first.view(-1)
        if self.how == "a view":
            view.mul_(2)
            return self.out(x) + first.sin()
        if self.how == "beside a view":
            first.mul_(2)
            return self.out(x) + view.view_as(x).sin()
        if self.how == "the last use":
            first.mul_(2)
            return self.out(x)
        return self.out(x) + 3 * view.view_as(x), first, view


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift


def test_changes_in_place(tmp_path: Path) -> None:
    """Where a tensor and what stands for it would each know half of what happened to them, that is refused."""
    found = options_of("adversarial", tmp_path)
    for how in ("before any use", "the last use"):
        assert_exact(Model(lambda how=how: Shifted(how), numbers(64, WIDTH)), 2**20, **found)
    for how in ("a view", "beside a view"):
        plain = Model(lambda how=how: Shifted(how), numbers(64, WIDTH))
        loss_at(plain.model(), plain).backward()  # is well there
        with streamed(plain, "1 MiB", **found) as model, pytest.raises(InputError, match=r"changed in place.*clone"):
            loss_at(model, plain)
    late = Model(lambda: Shifted("afterwards"), numbers(64, WIDTH))
    with streamed(late, "1 MiB", **found) as model:
        out, first, view = model(*late.batch())
        first.detach().mul_(2)
        with pytest.raises(GradientError, match=r"changed in place.*clone"):
            (out.sum() + view.sum()).backward()


def test_what_was_asked_for_is_the_whole_gradient(tmp_path: Path) -> None:
    """`retain_grad` on a state that is used later, too."""
    case, found = case_of("overheard"), options_of("adversarial", tmp_path)
    plain = case.model()
    seed(3)
    loss_at(plain, case).backward()
    with streamed(case, budget_at("least", case, sgd, **found), **found) as model:
        sgd(model)
        seed(3)
        loss_at(model, case).backward()
        torch.testing.assert_close(model.heard.grad, plain.heard.grad, rtol=1e-6, atol=0)
        del model.heard


def test_models_that_use_nothing_again_are_not_followed(tmp_path: Path) -> None:
    """There no function between blocks costs more."""
    for tail, followed in ((lambda model, states, given: model.out(states[-1]), False), (conditioned, True)):
        case, found = Model(lambda tail=tail: Reusing(tail), numbers(64, WIDTH)), options_of("auto", tmp_path)
        with streamed(case, budget_at("least", case, sgd, **found), **found) as model:
            loss_at(model, case).backward()
            last = handle_of(model).last
            assert last is not None
            assert {segment.reused for segment in last.segments} == {followed}


def test_dropped_states_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is handed on in place of a state goes with that."""
    sizes, note = [0], Following.note

    def noting(self: Following, tensor: torch.Tensor, now: torch.Tensor | None) -> None:
        note(self, tensor, now)
        sizes.append(len(self._noted) if now is not None else 0)

    monkeypatch.setattr(Following, "note", noting)

    class Narrow(Reusing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given, x = torch.tanh(self.condition(x)), self.enter(x)
            for block in self.parts[0]:
                x = block(x, given)
            return conditioned(self, [x], given)

    case, found = Model(lambda: Narrow(conditioned, 8), numbers(64, WIDTH)), options_of("auto", tmp_path)
    with streamed(case, budget_at("least", case, sgd, **found), **found) as model:
        loss_at(model, case).backward()
    assert 1 <= max(sizes) <= 3
