"""The silent failures known in this field, through every front-end: the bits of plain PyTorch, or an error that names
the cause; never a wrong gradient.

Each network is taken as the stages of a `Chain`, as the step of a `Loop` (stages that are the same every time), as the
blocks of a streamed model, and as one function by `Program`, at budgets under which much is computed again. With a
folder that the tape moves to: `frontends/test_silent_failures_moved.py`.
"""

import gc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from hazard_calls import (
    BY_AUTO,
    FRONTENDS,
    ROWS,
    Call,
    Trace,
    assert_as_plain,
    assert_ran_again,
    assert_same,
    drawn,
    plainly,
    steps,
    through,
    tightly,
)
from hazards import KINDS, WIDTH, Net, net_of
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, GradientError
from tapestream.frontends.program import candidates

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.thinned(8)
@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_values_gradients_and_buffers_are_plain_pytorchs(kind: str, frontend: str, tmp_path: Path) -> None:
    assert_as_plain(kind, frontend, tmp_path, steps)


@pytest.mark.thinned(12)
@pytest.mark.parametrize("kind", KINDS)
def test_programs_by_the_default_planner(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five calls: of the third on, plans that hold parts of stretches, whatever time the search for them takes."""
    monkeypatch.setattr(candidates, "_CALLS", 10**6)
    five = partial(steps, batches=5)
    least = assert_as_plain(kind, BY_AUTO, tmp_path, five)
    theirs, net = net_of(kind), net_of(kind)
    assert_same(
        five(plainly(theirs, kind, BY_AUTO), theirs), five(through(net, kind, BY_AUTO, 5 * least // 4, tmp_path), net)
    )


def drawn_otherwise() -> None:
    """The generators are somewhere else, where nothing of the call left or found them."""
    drawn(99)


def set_back() -> None:
    """To where the call of `drawn(0)` found them."""
    drawn(0)


def least_for(kind: str, frontend: str, folder: Path) -> int:
    """The least budget in which single calls work."""
    return tightly(kind, frontend, folder, lambda call, net: steps(call, net, batches=2))[1]


@pytest.mark.thinned(2)
@pytest.mark.parametrize("between", [drawn_otherwise, set_back])
@pytest.mark.parametrize("kind", ["dropout", "python's and numpy's numbers"])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_generators_are_the_users_between_call_and_backward(
    frontend: str, kind: str, between: Callable[[], None], tmp_path: Path
) -> None:
    """Drawn from for something else, or set back to where the call began: nothing that is computed again sees it."""

    def gradients(run: Call, net: Net) -> Trace:
        y = run(drawn(0))
        between()
        y.square().sum().backward()
        assert torch.equal(torch.rand(3), expected_next), "the generator goes on as if nothing had run again"
        return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}

    between()
    expected_next = torch.rand(3)
    assert_as_plain(kind, frontend, tmp_path, gradients)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("turned", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_a_second_call_is_not_served_from_the_first(frontend: str, turned: bool, tmp_path: Path) -> None:
    """Two calls at other inputs, then both backwards, with the least budget that both find room in."""
    kind = "dropout"

    def both(run: Call, net: Net, *, ours: bool) -> Trace:
        results = [run(drawn(number) * (number + 1)) for number in range(2)]
        for result in reversed(results) if turned else results:
            result.square().sum().backward()  # refused where the first has given way
        if ours:
            assert_ran_again(run, net)  # the second one, in what the first has left
        found: Trace = {
            f"gradient {name}": None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()
        }
        return found | {f"result {n}": result.detach().clone() for n, result in enumerate(results)}

    theirs = net_of(kind)
    expected = both(plainly(theirs, kind, frontend), theirs, ours=False)
    least = least_for(kind, frontend, tmp_path / "least")
    # A streamed model keeps parameters in whatever room there is; what it computes again is then up to the planner.
    options = {"planner": "revolve", "slots": 1} if frontend == "stream" else {}
    budget = least * 9 // 8
    for attempt in range(16):
        net = net_of(kind)
        call = through(net, kind, frontend, budget, tmp_path / str(attempt), **options)
        try:
            found = both(call, net, ours=True)
        except BudgetError as error:
            assert error.least_nbytes is not None  # noqa: PT017
            assert budget < error.least_nbytes < 8 * least  # noqa: PT017
            budget = error.least_nbytes  # what it names works in the end
            continue
        finally:
            if frontend == "stream":
                ts.unstream(net)
        assert_same(expected, found)
        return
    raise AssertionError("there is room for no two calls")


def stepped(p: nn.Parameter) -> None:
    with torch.no_grad():
        p.mul_(0.5)


def swapped(p: nn.Parameter) -> None:
    p.data = torch.ones_like(p)


@pytest.mark.parametrize("change", [stepped, swapped])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_weights_that_are_others_by_the_time_of_backward_are_refused(
    frontend: str, change: Callable[[nn.Parameter], None], tmp_path: Path
) -> None:
    def use(call: Call, net: Net) -> None:
        y = call(drawn(0))
        assert_ran_again(call, net)
        with torch.no_grad():
            change(net.blocks[0].linear.weight)
        with pytest.raises((GradientError, ts.StorageError), match=r"weight|modified|changed|replaced"):
            y.sum().backward()

    tightly("dropout", frontend, tmp_path, use)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("dropped", [True, False])
@pytest.mark.parametrize("frontend", FRONTENDS)
def test_nothing_that_is_saved_stays(frontend: str, dropped: bool, tmp_path: Path) -> None:
    """Neither after a call that is dropped nor while its result is held after backward."""
    kind, net = "dropout", net_of("dropout")
    call = through(net, kind, frontend, least_for(kind, frontend, tmp_path / "least"), tmp_path / "run")
    results: list[torch.Tensor] = []

    def once(number: int) -> None:
        y = call(drawn(number))
        assert_ran_again(call, net)
        if not dropped:
            y.sum().backward()
            results.append(y)

    left = []
    try:
        for number in range(3):  # profiles, and plans for what comes again
            once(number)
            gc.collect()
        gc.disable()
        for number in range(3):
            with ts.track_memory() as meter:
                once(number)
                if frontend == "loop":
                    gc.collect()  # what a loop keeps of a call that is dropped goes with cycles
            left.append(meter.end_nbytes)
        state = ROWS * WIDTH * 4
        assert max(left) <= (2 * state if frontend == "chain" else state)  # the result; a chain holds its input with it
    finally:
        gc.enable()
        if frontend == "stream":
            ts.unstream(net)
