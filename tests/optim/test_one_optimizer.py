"""One optimizer per streamed model, what it is made from, and steps that wait; else plain PyTorch, bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from streamable import WIDTH, Chained, Model, dense, numbers
from streaming import everything, loss_at, options_of, streamed
from torch import nn

import tapestream as ts
from tapestream.errors import GradientError, InputError

CASE = Model(lambda: Chained(dense(), nn.Linear(WIDTH, WIDTH)), numbers(3, WIDTH))
ADAMW = {"lr": 0.01, "foreach": False}


@pytest.fixture(params=["disk", "device"])
def model(request: Any, tmp_path: Path) -> Iterator[Any]:
    with streamed(CASE, "1 MiB", **options_of("adversarial", tmp_path, request.param)) as found:
        yield found


def parts(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of some blocks, and all others."""
    first = [p for name, p in model.named_parameters() if name.startswith(("blocks.1", "blocks.4"))]
    return first, [p for p in model.parameters() if all(p is not one for one in first)]


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    seed(number)
    loss_at(model, CASE).backward()
    optimizer.step()
    optimizer.zero_grad()


# ------------------------------------------------------------------------------------------------ two for one model


def test_one_that_was_replaced_refuses_to_be_used(model: Any) -> None:
    first = ts.optimizer(model, torch.optim.AdamW, **ADAMW)
    step(model, first)
    saved = first.state_dict()
    second = ts.optimizer(model, torch.optim.SGD, lr=0.1, foreach=False)
    loss_at(model, CASE).backward()
    before = everything(model)
    for use in (first.step, first.state_dict, first.state_in_parts, lambda: first.load_state_dict(saved)):
        with pytest.raises(
            InputError, match=r"another tapestream.optimizer\(\) was made.*make one optimizer with groups"
        ):
            use()
    assert not first.state
    assert_same(before, everything(model))
    second.step()
    first.zero_grad()  # asks for nothing that is gone


def test_two_with_a_part_of_the_model_each_are_refused(model: Any) -> None:
    one, other = parts(model)
    first = ts.optimizer(model, torch.optim.AdamW, groups=[{"params": one}], **ADAMW)
    with pytest.raises(InputError, match=r"there is one at a time.*make one with groups=.*torch's own for the smaller"):
        ts.optimizer(model, torch.optim.SGD, groups=[{"params": other}], lr=0.1)
    step(model, first)  # the first is as it was
    second = ts.optimizer(model, torch.optim.SGD, groups=[{"params": other}], lr=0.1)  # the next part's turn
    with pytest.raises(InputError, match=r"step\(\) was called on an optimizer whose state is gone"):
        first.step()
    step(model, second)


class Sociable(torch.optim.SGD):
    """Cannot do with one parameter."""

    def step(self, closure: Any = None) -> Any:
        raise RuntimeError("two parameters at least")


def test_one_that_cannot_be_made_leaves_the_one_before_whole(model: Any) -> None:
    theirs = CASE.model()
    plain, ours = torch.optim.AdamW(theirs.parameters(), **ADAMW), ts.optimizer(model, torch.optim.AdamW, **ADAMW)
    for number in range(3):
        step(theirs, plain, number)
        step(model, ours, number)
        with pytest.raises(InputError, match="could not be tried on small tensors"):
            ts.optimizer(model, Sociable, lr=0.1)
    assert_same(everything(theirs), everything(model))


def beside(model: nn.Module, is_streamed: bool) -> tuple[Any, Any]:
    """AdamW for one part, torch's own SGD for the other."""
    one, other = parts(model)
    groups = [{"params": one}]
    first = ts.optimizer(model, torch.optim.AdamW, groups=groups, **ADAMW) if is_streamed else None
    return first or torch.optim.AdamW(groups, **ADAMW), torch.optim.SGD(other, lr=0.1, momentum=0.9, foreach=False)


def test_torchs_own_may_have_the_other_part(model: Any) -> None:
    ends = []
    for net, is_streamed in ((CASE.model(), False), (model, True)):
        pair = beside(net, is_streamed)
        for number in range(3):
            seed(number)
            loss_at(net, CASE).backward()
            for optimizer in pair:
                optimizer.step()
            net.zero_grad()
        ends.append(everything(net))
    assert_same(*ends)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_parameters_in_no_group_stay(model: Any, update: str) -> None:
    theirs = CASE.model()
    plain = torch.optim.AdamW([{"params": parts(theirs)[0]}], **ADAMW)
    ours = ts.optimizer(model, torch.optim.AdamW, groups=[{"params": parts(model)[0]}], update=update, **ADAMW)
    for number in range(3):
        step(theirs, plain, number)
        step(model, ours, number)
        theirs.zero_grad()
        model.zero_grad()
    assert_same(everything(theirs), everything(model))
    assert torch.equal(CASE.model().blocks[0].linear.weight, model.blocks[0].linear.weight)


# -------------------------------------------------------------------------------------------- what they are made from


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (lambda m: [list(m.blocks[0].parameters())], r"groups\[0\] is a list; .*groups=\[\{'params': \[p, ...\]"),
        (lambda m: [*m.blocks[0].parameters(), {"params": []}], r"groups\[0\] is a Parameter; .*list of dicts"),
        (lambda m: [{"lr": 0.1}], r"groups\[0\] is a dict without params"),
        (lambda m: [{"params": list(m.named_parameters())}], r"groups\[0\] has a tuple among its params"),
        (lambda m: [{"params": set(m.parameters())}], r"groups\[0\] has a set, which has no order"),
        (lambda m: [{"params": list(m.parameters())}] * 2, "more than one parameter group"),
        (lambda m: [{"params": [next(m.parameters()) * 2]}], "non-leaf"),
        (lambda m: [], "no parameters"),
    ],
)
def test_groups_that_are_none(model: Any, groups: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ts.optimizer(model, torch.optim.SGD, groups=groups(model), lr=0.1)


def test_a_closure_that_step_needs_is_refused_when_it_is_made(model: Any) -> None:
    with pytest.raises(InputError, match=r"LBFGS.step\(\) needs a closure.*such as AdamW"):
        ts.optimizer(model, torch.optim.LBFGS)


def test_a_parameter_alone_and_one_of_no_block_or_model(model: Any) -> None:
    ends = []
    for net, is_streamed in ((CASE.model(), False), (model, True)):
        scale = nn.Parameter(torch.ones(()))
        groups = [{"params": net.blocks[2].linear.weight}, {"params": [scale], "lr": 0.5}]
        optimizer: Any = torch.optim.AdamW(groups, **ADAMW) if not is_streamed else None
        optimizer = optimizer or ts.optimizer(net, torch.optim.AdamW, groups=groups, **ADAMW)
        for number in range(3):
            seed(number)
            (loss_at(net, CASE) * scale).backward()
            optimizer.step()
            net.zero_grad()
            optimizer.zero_grad()
        ends.append(everything(net) | {"scale": scale.detach().clone()})
    assert_same(*ends)
    assert ends[1]["scale"] != 1


# ------------------------------------------------------------------------------------------------- update="backward"


@pytest.mark.parametrize("grads", [True, False])
def test_a_forward_before_the_step_of_an_update_within_backward_is_refused(model: Any, grads: bool) -> None:
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward", **ADAMW)
    step(model, optimizer)
    loss_at(model, CASE).backward()
    optimizer.zero_grad()  # undoes nothing of what blocks have had
    with (
        pytest.raises(
            GradientError, match=r"call optimizer.step\(\) after each backward, give all micro-batches to ts.accumulate"
        ),
        torch.set_grad_enabled(grads),
    ):
        loss_at(model, CASE)
    optimizer.step()
    with torch.no_grad():
        loss_at(model, CASE)
    step(model, optimizer)


def test_a_save_before_the_step_of_an_update_within_backward_is_refused(
    model: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Blocks would be saved a step ahead of the rest."""
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward", **ADAMW)
    loss_at(model, CASE).backward()
    parts: dict[str, Any]
    path = tmp_path_factory.mktemp("run") / "saves"
    for parts in ({"model": model}, {"optimizer": optimizer}):
        with pytest.raises(GradientError, match=r"ts.save\(\) came after a backward without its optimizer.step\(\)"):
            ts.save(path, **parts)
    assert not path.exists()
    optimizer.step()
    ts.save(path, model=model, optimizer=optimizer)


def test_a_backward_that_failed_after_blocks_were_updated_awaits_its_step(model: Any) -> None:
    optimizer = ts.optimizer(model, torch.optim.SGD, update="backward", lr=0.1)
    handle = model.blocks[0].linear.weight.register_hook(lambda g: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_at(model, CASE).backward()
    handle.remove()
    with pytest.raises(GradientError, match="that backward has updated the blocks already"):
        loss_at(model, CASE)
    optimizer.step()
    optimizer.zero_grad()
    step(model, optimizer)


def test_a_backward_that_updated_nothing_awaits_no_step(model: Any) -> None:
    optimizer = ts.optimizer(
        model, torch.optim.SGD, groups=[{"params": list(model.before.parameters())}], update="backward", lr=0.1
    )
    theirs = CASE.model()
    plain = torch.optim.SGD(theirs.before.parameters(), lr=0.1)
    for net, its in ((theirs, plain), (model, optimizer)):
        seed(0)
        for _ in range(2):
            loss_at(net, CASE).backward()
        its.step()
    assert_same(everything(theirs), everything(model))


def test_a_state_that_is_loaded_awaits_no_step(model: Any) -> None:
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward", **ADAMW)
    step(model, optimizer)
    weights, saved = everything(model), optimizer.state_dict()
    saved = {
        **saved,
        "state": {k: {n: torch.as_tensor(t).clone() for n, t in v.items()} for k, v in saved["state"].items()},
    }
    loss_at(model, CASE).backward()
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    model.zero_grad()
    step(model, optimizer)
