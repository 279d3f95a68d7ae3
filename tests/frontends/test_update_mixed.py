"""Some blocks updated on the device, others in RAM: each has the bits of torch's optimizer there, and stays there."""

import contextlib
import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from on_cpu import OnCpu, names_inside
from place import DEVICE
from streamable import MODELS
from streaming import budget_at, everything, streamed, train
from test_update_on_host import ADAMW, OPTIMIZERS, OPTIONS, Tower, batch, steps, under_way
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of
from tapestream.ir.actions import Tier, Update

SETTINGS = [
    (*which, (1, 2, 3)[number % 3])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]


def every(model: nn.Module, one_in: int) -> frozenset[int]:
    """The numbers of one block in so many."""
    return frozenset(block.index for block in handle_of(model).store.blocks if block.index % one_in == 0)


def names_hosted(model: nn.Module, on_device: frozenset[int]) -> set[str]:
    """Names of parameters in blocks that are updated in RAM."""
    blocks = (block for block in handle_of(model).store.blocks if block.index in on_device)
    there = {id(p) for block in blocks for p in block.parameters}
    return {name for name in names_inside(model) if id(dict(model.named_parameters())[name]) not in there}


def mixed(name: str, update: str, one_in: int) -> Any:
    make, knobs, _ = OPTIMIZERS[name]

    def made(model: nn.Module) -> Any:
        optimizer = ts.optimizer(model, make, update=update, where="mixed", **knobs)
        optimizer.take_places(every(model, one_in), frozenset())
        return optimizer

    return made


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "one_in"), SETTINGS)
def test_each_block_has_the_bits_of_where_it_is_updated(name: str, optimizer: str, update: str, one_in: int) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS[optimizer]
    budget = budget_at("least", case, mixed(optimizer, update, one_in), **OPTIONS) * 5 // 4
    torch.manual_seed(0)
    with streamed(case, budget, **OPTIONS) as model:
        found = train(model, mixed(optimizer, update, one_in)(model), case, gradients=update == "step")
        inside = names_hosted(model, every(model, one_in))
    torch.manual_seed(0)
    plain = case.model().to(DEVICE)
    expected = train(plain, OnCpu(plain, inside, make, fused, **knobs), case, gradients=update == "step")  # type: ignore[arg-type]
    assert_same(expected, {key: value for key, value in found.items() if not key.startswith("state ")})


LEAST = "150 KiB"


@contextlib.contextmanager
def a_run(on_device: frozenset[int] | None, update: str = "step", budget: Any = LEAST) -> Iterator[Any]:
    model = ts.stream(Tower(), budget=budget, **OPTIONS)
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="mixed", update=update, **ADAMW)
    if on_device is not None:
        optimizer.take_places(on_device, frozenset())
    yield model, optimizer
    with contextlib.suppress(ts.InputError):  # the test has done so
        ts.unstream(model)


def updated(model: nn.Module, tier: Tier) -> set[int]:
    """Blocks that the plans of the last call update there."""
    plans = handle_of(model).last.plans  # type: ignore[union-attr]
    return {one.block for plan in plans for one in plan.schedule if isinstance(one, Update) and one.tier is tier}


@pytest.mark.parametrize("update", ["step", "backward"])
def test_plans_of_other_calls_update_each_block_where_the_first_did(update: str) -> None:
    with a_run(None, update) as (model, optimizer):
        assert optimizer.on_device is None
        steps((model, optimizer), 2)
        first = optimizer.on_device
        assert first is not None
        for rows in (3, 9):
            model(torch.randn(rows, 8, device=DEVICE)).square().mean().backward()
            assert updated(model, Tier.DEVICE) - handle_of(model).pinned.blocks == first
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.on_device == first


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_resumed_run_goes_on_as_it_began(update: str, tmp_path: Path) -> None:
    there = frozenset({1, 4})
    with a_run(there, update) as pair:
        steps(pair, 3)
        ts.save(tmp_path / "save", model=pair[0], optimizer=pair[1])
        expected = steps(pair, 3, 3)
        last = everything(pair[0])
    with a_run(None, update, "400 KiB") as pair:
        model, optimizer = pair
        steps(pair, 1, 50)  # which decides otherwise
        optimizer.zero_grad()
        ts.load(tmp_path / "save", model=model, optimizer=optimizer)
        assert optimizer.on_device == there
        assert steps(pair, 3, 3) == expected
        assert_same(last, everything(model))
        assert updated(model, Tier.DEVICE) - handle_of(model).pinned.blocks == there


def test_a_run_that_was_updated_elsewhere_is_told() -> None:
    with a_run(frozenset({1, 4})) as (model, optimizer):
        steps((model, optimizer), 1)
        state = optimizer.state_dict()
        assert state["where"] == "mixed"
        listed = [p for group in optimizer.param_groups for p in group["params"]]
        there = {id(p) for block in handle_of(model).store.blocks if block.index in (1, 4) for p in block.parameters}
        assert [number for number, p in enumerate(listed) if id(p) in there] == state["updated_on_device"]
        ts.unstream(model)
    for where in ("host", "device"):
        other = ts.stream(Tower(), budget=LEAST, **OPTIONS)
        optimizer = ts.optimizer(other, torch.optim.AdamW, where=where, **ADAMW)
        with pytest.warns(UserWarning, match="made with where='mixed' and goes on with"):
            optimizer.load_state_dict(state)
        ts.unstream(other)


def test_the_same_run_is_told_nothing() -> None:
    with a_run(frozenset({2})) as (model, optimizer), warnings.catch_warnings():
        warnings.simplefilter("error")
        steps((model, optimizer), 2)
        optimizer.load_state_dict(optimizer.state_dict())
        steps((model, optimizer), 1, 2)
        assert optimizer.on_device == {2}


def test_blocks_stepped_before_any_plan_are_updated_in_ram_ever_after() -> None:
    with a_run(None) as (model, optimizer):
        for p in model.layers[2].parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        optimizer.zero_grad()
        assert optimizer.on_device == frozenset()
        steps((model, optimizer), 2)
        assert optimizer.on_device == frozenset()


def test_updates_in_ram_go_on_beside_those_on_the_device() -> None:
    with a_run(frozenset({0, 3})) as (model, optimizer):
        plain = Tower().to(DEVICE)
        inside = names_hosted(model, frozenset({0, 3}))
        reference = OnCpu(plain, inside, torch.optim.AdamW, True, **ADAMW)
        assert steps((model, optimizer), 4) == steps((plain, reference), 4)
        assert under_way(model) <= 4
        model(batch(9))
        assert_same(everything(plain), everything(model))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_plan_that_updates_elsewhere_is_refused(update: str) -> None:
    with a_run(frozenset({0, 3}), update) as (model, optimizer):
        steps((model, optimizer), 1)
        with pytest.raises(
            ts.InputError, match=r"plan= updates block 1 on the device, this optimizer \(where='mixed'\)"
        ):
            optimizer.take_places(frozenset({0, 1, 3}), frozenset())
        with pytest.raises(ts.InputError, match="plan= updates block 3 in RAM"):
            optimizer.take_places(frozenset({0}), frozenset({3}))


def test_what_cannot_be_mixed_is_refused() -> None:
    model = ts.stream(Tower(), budget=LEAST, **OPTIONS)

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            return super().step(closure)

    with pytest.raises(ts.InputError, match="where='mixed' was asked for, but Counting keeps something that is common"):
        ts.optimizer(model, Counting, lr=0.1, where="mixed")
    with pytest.raises(ts.InputError, match="it is 'auto', 'device', 'host' or 'mixed'"):
        ts.optimizer(model, torch.optim.SGD, lr=0.1, where="both")
    ts.unstream(model)
