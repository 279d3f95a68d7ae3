"""Calls that began without notes and turn out otherwise: what they find of their beginning is what it was."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import hear_noted
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from tapestream.errors import GradientError
from tapestream.frontends.program.program import Program
from tapestream.ir import Tier
from tapestream.storage.meter import track_memory

N = 16
W, W2 = ((torch.randn(N, N, generator=torch.Generator().manual_seed(k)) / 4).requires_grad_() for k in (1, 2))
X = torch.randn(N, N, generator=torch.Generator().manual_seed(3))
LEAVES = [W, W2]


def head(x: Tensor, steps: int = 20) -> Tensor:
    for _ in range(steps):
        x = torch.sin(x @ W)
    return x


def tail(h: Tensor, steps: int = 200) -> Tensor:
    for _ in range(steps):
        h = torch.tanh(h @ W)
    return h


def outcome(function: Callable[[], Tensor]) -> list[Tensor | None]:
    torch.manual_seed(0)
    for leaf in LEAVES:
        leaf.grad = None
    y = function()
    y.backward()
    return [y.detach(), *(None if leaf.grad is None else leaf.grad.clone() for leaf in LEAVES)]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    return all(p is q or (p is not None and q is not None and torch.equal(p, q)) for p, q in zip(a, b, strict=True))


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The functions of all calls that are noted, in order."""
    return hear_noted(monkeypatch)


def base_used_after_a_write_through_its_view(x: Tensor, otherwise: bool) -> Tensor:
    h, b = head(x), torch.zeros(N, N)
    v = b[0]
    if otherwise:
        h = torch.cos(h)
        v.copy_(h[0])
        h = tail(h * b)
    return (b * h).sum()


def part_scaled_of_what_needs_a_gradient(x: Tensor, otherwise: bool) -> Tensor:
    h = head(x)
    y = h * 2
    c = y[1:]
    if otherwise:
        c.mul_(torch.cos(h[1:]))
        h = tail(y)
    return h.sum() + y.sum()


ATTENTION = nn.MultiheadAttention(N, 2)


def given_several_times(x: Tensor, otherwise: bool) -> Tensor:
    h = head(x)[:, None]
    if otherwise:
        h = tail(h + ATTENTION(h, h, h)[0])
    return h.sum()


def rows_filled(x: Tensor, otherwise: bool) -> Tensor:
    h, b = head(x), torch.zeros(N, N)
    v = b.view(-1)
    if otherwise:
        for i in range(N):
            b[i] = torch.tanh(h[i] * W2[i])
            h = h + 0.1 * b.sum()
        h = tail(h + v.view(N, N) * W2)
    return h.sum()


def sparse(x: Tensor, otherwise: bool) -> Tensor:
    s = (x @ W).to_sparse()
    h = torch.sparse.mm(s, W2)
    if otherwise:
        h = tail(h + torch.sparse.mm(s, torch.cos(h)), 50)
    return h.sum()


def hooks_on_saved_tensors(x: Tensor, otherwise: bool) -> Tensor:
    """Which the user enters without a call of torch."""
    if otherwise:
        with saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return tail(head(x)).sum()
    return head(x).sum()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        a, b = ctx.saved_tensors
        return gradients[0] * b, gradients[0] * a


def functions_of_users(x: Tensor, otherwise: bool) -> Tensor:
    h = head(x)
    y = h * 2
    if otherwise:
        h = tail(Product.apply(h, y) + Product.apply(h, h))  # type: ignore[no-untyped-call]
    return h.sum()


def hooks_on_tensors(x: Tensor, otherwise: bool) -> Tensor:
    h = head(x)
    y = h * 2
    y.retain_grad()
    y.register_hook(lambda g: g * 2)
    if otherwise:
        y.register_hook(lambda g: g + 1)
        h = tail(h * y)
    return h.sum()


def detached_in_place(x: Tensor, otherwise: bool) -> Tensor:
    h = head(x)
    kept = h * W2
    if otherwise:
        g = torch.cos(h.clone())
        g.detach_()
        h = tail(g)
    return h.sum() + kept.sum()


def dropped_out(x: Tensor, otherwise: bool) -> Tensor:
    h = functional.dropout(head(x), 0.3)
    if otherwise:
        h = tail(functional.dropout(h, 0.2) + torch.rand(N, N))
    return h.sum()


def gains_its_need_by_its_base(x: Tensor, otherwise: bool) -> Tensor:
    h, b = head(x), torch.zeros(N, N)
    v = b[0]
    if otherwise:
        h = torch.cos(h) + v
        b.copy_(h)
        h = tail(h + v * W2)
    return h.sum()


CASES = (
    base_used_after_a_write_through_its_view, part_scaled_of_what_needs_a_gradient,
    given_several_times, rows_filled, sparse, hooks_on_saved_tensors, functions_of_users, hooks_on_tensors,
    detached_in_place, dropped_out, gains_its_need_by_its_base,
)  # fmt: skip


TIGHT = {rows_filled: 1.5, sparse: 1.5}
"""Times the room with which calls are not noted, where the rest needs more."""


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("function", CASES)
def test_values_and_gradients(function: Callable[[Tensor, bool], Tensor], tight: bool, noted: list[Any]) -> None:
    """Of plain PyTorch, with all kept and with little room, or an error where that raises one."""
    otherwise = False
    program = Program(lambda x: function(x, otherwise), budget="64MiB")
    outcome(lambda: program(X))
    (known,) = program._courses._known.values()
    budget = int(TIGHT.get(function, 1.1) * known.room_nbytes) if tight else 1 << 26
    program = Program(lambda x: function(x, otherwise), budget=budget)
    outcome(lambda: program(X))
    noted.clear()
    assert same(outcome(lambda: program(X)), outcome(lambda: function(X, False)))
    assert not noted
    otherwise = True
    expected = outcome(lambda: function(X, True))
    if function is gains_its_need_by_its_base and tight:
        with pytest.raises(GradientError, match="came to require a gradient afterwards"):
            outcome(lambda: program(X))
        return
    assert same(outcome(lambda: program(X)), expected)
    assert program.report is not None
    assert function is hooks_on_saved_tensors or (program.report.reruns > 0) is tight


@pytest.mark.thinned(6)
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("budget", [45_000, 60_000, 90_000])
def test_a_view_that_is_saved_and_a_base_that_is_written_are_one_memory_in_replays(inside: bool, budget: int) -> None:
    """Plain PyTorch refuses that. So does what runs again, or it has what was there before the write."""
    outside, otherwise = torch.ones(N, N), not inside

    def function(x: Tensor, *, apart: bool = False) -> Tensor:
        h = head(x)
        base = torch.ones(N, N) if inside else outside
        view = base[0]
        if otherwise:
            h = torch.cos(h) * (view.clone() if apart else view)
            base.mul_(3.0)
            h = tail(h + base)
        return h.sum()

    program = Program(function, budget=budget if not inside else budget + 41_000)
    for turn in (inside, inside, False, False):
        otherwise = not turn
        outside.fill_(1.0)
        expected = outcome(lambda: function(X, apart=True))
        outside.fill_(1.0)
        try:
            found = outcome(lambda: program(X))
        except (GradientError, RuntimeError) as error:
            assert "modified by an inplace operation" in str(error)  # noqa: PT017
        else:
            assert same(found, expected)


@pytest.mark.parametrize("whole", [True, False])
def test_casts_of_leaves_that_are_written_into(whole: bool) -> None:
    """Plain PyTorch goes on with the cast from before, which a replay would not have."""
    leaf, otherwise = torch.eye(N).requires_grad_(), whole

    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            weight = torch.eye(N).mul(0.5).requires_grad_() if whole else leaf
            h = head(x)
            y = functional.linear(h, weight)
            if otherwise:
                with torch.no_grad():
                    weight.mul_(2.0)
                h = tail(y + functional.linear(h, weight))
        return h.float().sum() + y.float().sum()

    program = Program(function, budget=40_000 if whole else "64MiB")
    if not whole:
        for _ in range(2):
            outcome(lambda: program(X))
        otherwise = True
    if whole:
        with pytest.raises(GradientError, match="autocast was used"):
            outcome(lambda: program(X))
    else:  # all is kept
        expected = outcome(lambda: function(X))
        with torch.no_grad():
            leaf.div_(2.0)
        assert same(outcome(lambda: program(X)), expected)


@pytest.mark.parametrize("what", ["grad mode", "needs", "the kernel"])
def test_what_saves_more_by_the_same_calls_is_noted(what: str, noted: list[Any]) -> None:
    more, weights = False, [torch.eye(N) for _ in range(200)]
    query = torch.randn(1, 2, 64, 8)

    def function(x: Tensor) -> Tensor:
        h = x @ W
        if what == "grad mode":
            with torch.set_grad_enabled(more):
                h = tail(h)
            return (h @ W2).sum()
        if what == "needs":
            for weight in weights:
                h = h @ weight
            return h.sum()
        q = query * h.mean()
        return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1 if more else 0.0).sum()

    program = Program(function, budget=1 << 20)
    for more in (False, False, True):
        for weight in weights:
            weight.grad = weight.requires_grad_(more).grad
        noted.clear()
        assert same(outcome(lambda: program(X)), outcome(lambda: function(X)))
    assert noted


def test_transforms_that_the_program_catches_leave_it_noted_within_the_budget() -> None:
    otherwise = False

    def function(x: Tensor) -> Tensor:
        h = head(x)
        if otherwise:
            try:
                h = h + torch.func.grad(lambda z: z.cos().sum())(x)
            except RuntimeError:
                h = h * 0.5
            h = tail(h, 600)
        return h.sum()

    program = Program(function, budget=120_000)
    for _ in range(2):
        outcome(lambda: program(X))
    otherwise, W.grad = True, None
    with track_memory() as meter:
        program(X).backward()
    assert meter.peak_nbytes <= 1.05 * 120_000
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


@pytest.mark.full
def test_results_that_are_written_into_afterwards_hold_nothing() -> None:
    otherwise = False

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        h, b = head(x), torch.zeros(N, N)
        if otherwise:
            h = tail(h + b, 20)
        return h.sum(), b

    program = Program(function, budget="64MiB")
    for turn in (False, False, True, False, False, True):
        otherwise = turn
        loss, b = program(X)
        b.add_(loss)
        del loss, b
        gc.collect()
        assert program._live.nbytes[Tier.DEVICE] == 0


def test_a_module_that_keeps_its_output_goes_with_its_program() -> None:
    class Keeping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(N, N))

        def forward(self, x: Tensor) -> Tensor:
            self.last = torch.sin(x @ self.weight)
            return self.last.sum()

    for calls in (1, 2):
        module = Keeping()
        program = Program(module, budget="64MiB")
        for _ in range(calls):
            y = program(X)
        gone = weakref.ref(module)
        del module, program, y
        gc.collect()
        assert gone() is None


def test_several_threads_call_one_program() -> None:
    program, failed = Program(lambda x, steps: tail(x, steps).sum(), budget="64MiB"), list[BaseException]()

    def call(first: int) -> None:
        try:
            for k in range(20):
                steps = 5 + (first + k) % 3
                (ours,) = torch.autograd.grad(program(X, steps), W)
                (plain,) = torch.autograd.grad(tail(X, steps).sum(), W)
                assert torch.equal(ours, plain)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=call, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
