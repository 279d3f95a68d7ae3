"""Blocks that are at home in RAM, on the disk what finds no room there: plain PyTorch's bits, within both budgets."""

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from pairs import sgd
from place import DEVICE
from streamable import MODELS, Chained, Dense
from streaming import TWO_HOPS, H, K, all_of, budget_at, streamed, train
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Kind, Tier
from tapestream.passes.memory import block_values

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], int]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01}, 4),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, 3),
}
WIDE = 128  # blocks of several pages
SHARES = (0.25, 0.4, 0.55, 0.7)  # of what all takes, that RAM may hold
SETTINGS = [
    (*which, ("least", "half")[number % 2], SHARES[number % 3 + number % 2])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]


def options(folder: Path) -> dict[str, Any]:
    engine = "fake_streams" if DEVICE == "cpu" else "auto"
    return {"device": DEVICE, "engine": engine, "home": "auto", "machine": TWO_HOPS, "folder": folder}


def maker(name: str, update: str) -> Callable[[Any], Any]:
    make, knobs, _ = OPTIMIZERS[name]
    return lambda model: ts.optimizer(model, make, update=update, master=None, **knobs)


@pytest.mark.filterwarnings("ignore:page-locked memory takes")  # gaps: a few pages are much here
@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "level", "share"), SETTINGS)
def test_training_is_exact_and_within_the_host_budget(
    name: str, optimizer: str, update: str, level: str, share: float, tmp_path: Path
) -> None:
    case, (make, knobs, times) = MODELS[name], OPTIMIZERS[optimizer]
    plain = case.model().to(DEVICE)
    trainable = [p for p in plain.parameters() if p.requires_grad]
    budget = budget_at(level, case, maker(optimizer, update), **options(tmp_path))
    if name == "dropping":
        torch.manual_seed(0)
    expected = train(plain, make(trainable, **knobs), case, gradients=update == "step")
    host = int(share * times * sum(p.nbytes for p in plain.parameters()))
    for _ in range(8):
        try:
            with streamed(case, ts.Budget(budget, host=host), **options(tmp_path)) as model:
                found = train(model, maker(optimizer, update)(model), case, gradients=update == "step")
                assert handle_of(model).pool.peak_nbytes(H) <= host
            break
        except ts.BudgetError:  # less than what passes through
            host = int(host * 1.3)
    assert_same(expected, found)


def tight(model: Any, folder: Path) -> Any:
    """A streamed model with RAM for all but a part of its state."""
    total = sum(p.nbytes for p in model.parameters())
    return ts.stream(model, budget=ts.Budget(total, host=11 * total // 4), **options(folder))


Pair = tuple[nn.Module, nn.Module, Any, Any]


def pair_within(device: float, host: float, folder: Path, calls: int = 1) -> Pair:
    """A plain and a streamed model, and their optimizers; budgets: of the bytes of all parameters."""
    plain, model = deep().to(DEVICE), deep()
    total = sum(p.nbytes for p in model.parameters())
    budget = ts.Budget(int(device * total), host=int(host * total), calls=calls)
    model = ts.stream(model, budget=budget, **options(folder))
    return plain, model, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)


def lives(model: Any) -> dict[Tier, set[Kind]]:
    """The kinds of values that lie in RAM and on the disk."""
    found: dict[Tier, set[Kind]] = {H: set(), K: set()}
    for value, tier in handle_of(model).store.copies.regions:
        found.setdefault(tier, set()).add(value.kind)
    return found


def stepped(model: Any, optimizer: Any, *sizes: int) -> list[torch.Tensor]:
    """A step for each batch of that size; the losses."""
    losses = []
    for size in sizes:
        torch.manual_seed(size)
        loss = model(torch.randn(size, WIDE, device=DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def deep() -> nn.Module:
    torch.manual_seed(0)
    return Chained([Dense(WIDE) for _ in range(8)], None, nn.Linear(WIDE, 2))


def test_what_finds_no_room_is_state_first(tmp_path: Path) -> None:
    model = tight(deep(), tmp_path)
    stepped(model, sgd(model), 3)
    where = lives(model)
    assert Kind.OPTIMIZER_STATE in where[H] & where[K]
    assert Kind.PARAMETERS not in where[K]
    ts.unstream(model)


def test_bytes_move_as_planned(tmp_path: Path) -> None:
    model = tight(deep(), tmp_path)
    optimizer, homes = sgd(model), handle_of(model).homes
    stepped(model, optimizer, 3, 3)  # the second brings the state that the first has made
    homes.statistics_since()
    handle_of(model).pool.reset_peak()
    stepped(model, optimizer, 3)
    moved, _ = homes.statistics_since()
    planned = handle_of(model).last.plan.simulation
    assert {lane: n for lane, n in moved.items() if n} == {lane: n for lane, n in planned.bytes_moved.items() if n}
    assert moved[H, K] > 0
    seen = handle_of(model).pool.peak_nbytes(H)  # places of gradients stay until users drop them
    gradients = sum(
        nbytes for value, nbytes in block_values(handle_of(model).last.plan.profile) if value.kind is Kind.GRADIENT
    )
    assert planned.peak_nbytes[H] <= seen <= planned.peak_nbytes[H] + gradients
    ts.unstream(model)


def test_homes_stay_as_they_are_when_batches_change(tmp_path: Path) -> None:
    model = tight(deep(), tmp_path)
    optimizer = sgd(model)
    homes = []
    for size in (3, 5, 2, 3):
        stepped(model, optimizer, size)
        homes.append(handle_of(model).store.copies.on_disk)
    assert homes[0]
    assert len(set(homes)) == 1
    ts.unstream(model)


def test_homes_change_with_the_plan(tmp_path: Path) -> None:
    plain, model = deep().to(DEVICE), tight(deep(), tmp_path)
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    sizes = (3, 5, 3)
    found = stepped(model, optimizer, *sizes)
    before = handle_of(model).store.copies.on_disk
    handle = handle_of(model)
    handle.store.settle()
    for homes in (frozenset(everywhere(model)), before):
        handle.store.place(handle.store.copies.resident, homes)
        assert handle.store.copies.on_disk == homes
        assert_same(all_of(model), all_of(model))
    found += stepped(model, optimizer, *sizes)
    expected = stepped(plain, theirs, *sizes, *sizes)
    assert all(map(torch.equal, found, expected))
    assert_same(all_of(plain), all_of(ts.unstream(model)))


def everywhere(model: Any) -> set[Any]:
    """All values that lie somewhere."""
    return {value for value, _ in handle_of(model).store.copies.regions}


def test_gradients_go_with_their_home(tmp_path: Path) -> None:
    plain, model = deep().to(DEVICE), tight(deep(), tmp_path)
    sgd(model)
    for one in (plain, model):
        torch.manual_seed(3)
        one(torch.randn(3, WIDE, device=DEVICE)).square().mean().backward()
    handle = handle_of(model)
    gradients = {v for v in everywhere(model) if v.kind is Kind.GRADIENT and (v, H) in handle.store.copies.regions}
    assert gradients
    kept = [p.grad for p in model.parameters()]
    handle.store.place(handle.store.copies.resident, handle.store.copies.on_disk | gradients)
    for p, other, before in zip(plain.parameters(), model.parameters(), kept, strict=True):
        assert torch.equal(p.grad.cpu(), other.grad.cpu())
        assert torch.equal(p.grad.cpu(), before.cpu())
    model.zero_grad()
    del kept, before
    ts.unstream(model)


def test_gradients_that_stay_on_the_device_now_leave_no_bytes_at_home(tmp_path: Path) -> None:
    """A plan that keeps a gradient on the device counts on the bytes that another plan has used for it in RAM."""
    plain, model = deep().to(DEVICE), tight(deep(), tmp_path)
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    found, handle = stepped(model, optimizer, 3), handle_of(model)
    copies = handle.store.copies
    value = next(v for v, tier in copies.regions if v.kind is Kind.GRADIENT and tier is H)
    handle.store.settle()
    handle.store.place(copies.resident | {value})
    assert (value, H) in copies.regions
    handle.store.gradients.leave()
    assert (value, H) not in copies.regions
    found += stepped(model, optimizer, 3, 4)
    assert all(map(torch.equal, found, stepped(plain, theirs, 3, 3, 4)))
    assert_same(all_of(plain), all_of(ts.unstream(model)))


def test_forward_only_saves_and_going_on_are_exact(tmp_path: Path) -> None:
    plain, model = deep().to(DEVICE), tight(deep(), tmp_path / "blocks")
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    assert all(map(torch.equal, stepped(model, optimizer, 3, 4), stepped(plain, theirs, 3, 4)))
    x = torch.randn(4, WIDE, device=DEVICE)
    for _ in range(3):
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
    assert all(map(torch.equal, stepped(model, optimizer, 3), stepped(plain, theirs, 3)))
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    ts.unstream(model)
    again = tight(deep(), tmp_path / "again")
    other = sgd(again)
    again.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert all(map(torch.equal, stepped(again, other, 3, 4), stepped(plain, theirs, 3, 4)))
    assert_same(all_of(plain), all_of(ts.unstream(again)))


@pytest.mark.parametrize(("device", "host"), [(4.0, 0.5), (3.0, 1.5), (2.2, 2.6)])
def test_sums_of_calls_are_added_to_earlier_gradients(device: float, host: float, tmp_path: Path) -> None:
    """The sum of two calls has to lie beside what earlier backwards have left, with RAM full of other things."""
    plain, model, theirs, optimizer = pair_within(device, host, tmp_path, calls=2)
    for one, steps in ((plain, theirs), (model, optimizer)):
        for number in range(6):
            torch.manual_seed(number)
            first, second = one(torch.randn(3, WIDE, device=DEVICE)), one(torch.randn(5, WIDE, device=DEVICE))
            (first.square().mean() + second.square().mean()).backward()
            if number % 3 == 2:
                steps.step()
                steps.zero_grad()
    assert handle_of(model).store.copies.on_disk
    assert handle_of(model).pool.peak_nbytes(H) <= handle_of(model).budget.host_nbytes
    assert_same(all_of(plain), all_of(ts.unstream(model)))


@pytest.mark.parametrize(("device", "host"), [(2.2, 2.6), (2.0, 2.5), (3.0, 1.5)])
def test_a_call_planned_before_a_sum_of_others_adds_to_it(device: float, host: float, tmp_path: Path) -> None:
    plain, model, theirs, optimizer = pair_within(device, host, tmp_path, calls=3)
    for one, steps in ((plain, theirs), (model, optimizer)):
        stepped(one, steps, 3, 3)
        torch.manual_seed(7)
        one(torch.randn(3, WIDE, device=DEVICE)).square().mean().backward()
        a, b, c = (one(torch.randn(3, WIDE, device=DEVICE)).square().mean() for _ in range(3))
        (a + b).backward()
        c.backward()
    for p, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad.cpu(), other.grad.cpu())
    ts.unstream(model)


@pytest.mark.parametrize(("device", "host"), [(3.0, 0.5), (3.0, 1.0), (2.0, 1.5)])
def test_what_lives_on_the_device_finds_a_home_when_ram_is_full(device: float, host: float, tmp_path: Path) -> None:
    """Another optimizer, and large batches without gradients."""
    plain, model = deep().to(DEVICE), deep()
    total = sum(p.nbytes for p in model.parameters())
    model = ts.stream(model, budget=ts.Budget(int(device * total), host=int(host * total)), **options(tmp_path))
    for _ in range(2):
        theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
        assert all(map(torch.equal, stepped(model, optimizer, 3, 3), stepped(plain, theirs, 3, 3)))
    x = torch.randn(int(device * 100), WIDE, device=DEVICE)
    with torch.no_grad():
        assert all(torch.equal(model(x[:rows]), plain(x[:rows])) for rows in (100, len(x) // 2, len(x) // 2))
    assert all(map(torch.equal, stepped(model, optimizer, 3), stepped(plain, theirs, 3)))
    assert handle_of(model).pool.peak_nbytes(H) <= int(host * total)
    ts.unstream(model)


def test_state_whose_home_a_plan_does_not_know_is_found(tmp_path: Path) -> None:
    plain, model = deep().to(DEVICE), tight(deep(), tmp_path)
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    assert all(map(torch.equal, stepped(model, optimizer, 3, 3), stepped(plain, theirs, 3, 3)))
    store, x = handle_of(model).store, torch.randn(3, WIDE, device=DEVICE)
    losses = [one(x).square().mean() for one in (model, plain)]
    state = [v for v, tier in store.copies.regions if v.kind is Kind.OPTIMIZER_STATE and tier is H]
    assert state
    for value in state:
        store._rehome(value, store.copies.on_disk | {value})
    for loss, steps in zip(losses, (optimizer, theirs), strict=True):
        loss.backward()
        steps.step()
        steps.zero_grad()
    assert all(map(torch.equal, stepped(model, optimizer, 3), stepped(plain, theirs, 3)))
    assert_same(all_of(plain), all_of(ts.unstream(model)))


def test_a_machine_without_a_disk_overflows_nothing(tmp_path: Path) -> None:
    model = deep()
    total = sum(p.nbytes for p in model.parameters())
    machine = ts.Machine({(ts.Tier.DEVICE, H): ts.Link(1e9), (H, ts.Tier.DEVICE): ts.Link(1e9)})
    how = options(tmp_path) | {"machine": machine}
    model = ts.stream(model, budget=ts.Budget(2 * total, host=10 * total), **how)
    stepped(model, sgd(model), 3)
    ts.unstream(model)


def test_calls_that_wait_for_their_backward(tmp_path: Path) -> None:
    plain, model = deep().to(DEVICE), deep()
    total = sum(p.nbytes for p in model.parameters())
    model = ts.stream(model, budget=ts.Budget(4 * total, host=total // 2, calls=2), **options(tmp_path))
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    for one, steps in ((plain, theirs), (model, optimizer)):
        stepped(one, steps, 3)
        torch.manual_seed(1)
        first, second = one(torch.randn(3, WIDE, device=DEVICE)), one(torch.randn(5, WIDE, device=DEVICE))
        (first.square().mean() + second.square().mean()).backward()
        steps.step()
    assert handle_of(model).store.copies.on_disk
    assert_same(all_of(plain), all_of(ts.unstream(model)))


def test_parameters_that_find_no_room_begin_on_the_disk(tmp_path: Path) -> None:
    model = deep()
    total = sum(p.nbytes for p in model.parameters())
    model = ts.stream(model, budget=ts.Budget(total, host=total * 2 // 3), **options(tmp_path))
    where = lives(model)
    assert Kind.PARAMETERS in where[H] & where[K]
    plain = deep().to(DEVICE)
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    assert all(map(torch.equal, stepped(model, optimizer, 3, 3), stepped(plain, theirs, 3, 3)))
    assert_same(all_of(plain), all_of(ts.unstream(model)))


def test_gradients_that_are_held_are_named_where_they_take_the_room(tmp_path: Path) -> None:
    model = tight(deep(), tmp_path)
    optimizer, held = sgd(model), []
    for _ in range(2):
        loss = model(torch.randn(3, WIDE, device=DEVICE)).square().mean()
        if held:
            with pytest.raises(ts.BudgetError, match="bytes of them are shown by tensors that are still held"):
                loss.backward()
        else:
            loss.backward()
            held += [p.grad for p in model.parameters()]
            optimizer.step()
        optimizer.zero_grad()
    held.clear()
    del loss
    stepped(model, optimizer, 3)
    ts.unstream(model)


def test_a_host_budget_of_one_block_works_and_one_below_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ts.BudgetError, match=r"pass RAM on their way to the disk, and the largest takes 68\.0 KiB"):
        ts.stream(deep(), budget=ts.Budget("640KiB", host=1024), **options(tmp_path))
    plain, model = deep().to(DEVICE), ts.stream(deep(), budget=ts.Budget("640KiB", host="70KiB"), **options(tmp_path))
    theirs, optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), sgd(model)
    assert all(map(torch.equal, stepped(model, optimizer, 3, 3), stepped(plain, theirs, 3, 3)))
    assert handle_of(model).pool.peak_nbytes(H) <= 70 << 10
    ts.unstream(model)


def test_an_explicit_home_does_not_overflow(tmp_path: Path) -> None:
    model = deep()
    total = sum(p.nbytes for p in model.parameters())
    how = options(tmp_path) | {"home": "host"}
    model = ts.stream(model, budget=ts.Budget(total, host=2 * total), **how)
    optimizer = sgd(model)
    with pytest.raises(ts.BudgetError, match="HOST"):
        stepped(model, optimizer, 3)
    ts.unstream(model)
