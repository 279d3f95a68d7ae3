"""Blocks that live on disk below a GPU and are updated in RAM: what an update needs comes for it and goes back."""

import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same
from on_cpu import OnCpu, names_inside
from streamable import MODELS
from streaming import TWO_HOPS, D, H, K, budget_at, everything, streamed, train
from test_update_on_host import ADAMW, DEVICE, OPTIMIZERS, Pair, Tower, batch, maker, steps, under_way
from torch import nn

import tapestream as ts
from tapestream.errors import StorageError
from tapestream.frontends.module.stream import handle_of

HOMES: dict[str, Any] = {
    "all": "disk",
    "state": ts.Home(parameters="host", gradients="host", optimizer_state="disk"),
    "weights": ts.Home(parameters="disk", gradients="host", optimizer_state="host"),
    "gradients": ts.Home(parameters="host", gradients="disk", optimizer_state="disk"),
}
SETTINGS = [
    (*which, tuple(HOMES)[number % 4], ("least", "ample")[number % 3 % 2])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]


def options(home: str, folder: Path) -> dict[str, Any]:
    engine = "fake_streams" if DEVICE == "cpu" else "auto"
    return {"device": DEVICE, "engine": engine, "home": HOMES[home], "machine": TWO_HOPS, "folder": folder}


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "home", "level"), SETTINGS)
def test_training_has_the_bits_of_the_optimizer_on_the_cpu(
    name: str, optimizer: str, update: str, home: str, level: str, tmp_path: Path
) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS[optimizer]
    how = options(home, tmp_path)
    budget = budget_at("least", case, maker(optimizer, update), **how) * (2 + (level == "ample")) // 2
    torch.manual_seed(0)
    with streamed(case, budget, **how) as model:
        found = train(model, maker(optimizer, update)(model), case, gradients=update == "step")
        inside = names_inside(model)
    torch.manual_seed(0)
    plain = case.model().to(DEVICE)
    expected = train(plain, OnCpu(plain, inside, make, fused, **knobs), case, gradients=update == "step")  # type: ignore[arg-type]
    assert_same(expected, {key: value for key, value in found.items() if not key.startswith("state ")})


LEAST = "130 KiB"
RAM = {"all": "150 KiB", "state": "190 KiB", "weights": "250 KiB", "gradients": "150 KiB"}


@pytest.fixture(params=HOMES)
def home(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def a_pair(home: str, update: str, folder: Path, budget: Any = LEAST) -> Iterator[tuple[Pair, Pair]]:
    model = ts.stream(Tower(), budget=budget, **options(home, folder))
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="host", update=update, **ADAMW)
    plain = Tower().to(DEVICE)
    yield (plain, OnCpu(plain, names_inside(model), torch.optim.AdamW, True, **ADAMW)), (model, optimizer)
    with contextlib.suppress(ts.InputError):  # the test has done so
        ts.unstream(model)


@pytest.mark.parametrize("update", ["step", "backward"])
def test_state_is_read_and_written_once_a_step_in_little_ram(home: str, update: str, tmp_path: Path) -> None:
    with a_pair(home, update, tmp_path, ts.Budget(LEAST, host=RAM[home])) as (plain, (model, optimizer)):
        expected = steps(plain, 5)
        found = steps((model, optimizer), 4)
        engine, store = handle_of(model).engine, handle_of(model).store
        before = dict(engine.statistics().bytes_moved)
        found += steps((model, optimizer), 1, 4)
        assert expected == found
        assert under_way(model) == 0  # none goes on after its step
        states = {v: r.nbytes for (v, tier), r in store.copies.regions.items() if v.kind is ts.ir.Kind.OPTIMIZER_STATE}
        moved = {ends: nbytes - before.get(ends, 0) for ends, nbytes in engine.statistics().bytes_moved.items()}
        on_disk = {value for value in states if store.copies.home_of(value) is K}
        written = sum(nbytes for value, nbytes in states.items() if value in on_disk)
        weights = sum(block.layout.nbytes for block in store.blocks)
        assert written <= moved[H, K] <= written + 2 * weights
        assert moved[D, H] <= weights  # gradients alone
        assert not any(tier is H and store.copies.home_of(value) is K for value, tier in store.copies.regions)
        assert_same(everything(plain[0]), everything(model))


def clipped(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)  # norms are added by device


def weights_replaced(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5
    if isinstance(optimizer, OnCpu):
        optimizer.take_back()


def own_gradients(model: nn.Module, optimizer: Any) -> None:
    for p in list(model.parameters())[::2]:
        assert p.grad is not None
        p.grad = p.grad * 2


def one_left_out(model: nn.Module, optimizer: Any) -> None:
    for p in model.layers[2].parameters():  # type: ignore[union-attr, index]
        p.grad = None


@pytest.mark.parametrize("change", [clipped, weights_replaced, own_gradients, one_left_out])
def test_what_is_changed_before_the_step_counts(home: str, change: Any, tmp_path: Path) -> None:
    with a_pair(home, "step", tmp_path) as pair:
        for model, optimizer in pair:
            for number in range(3):
                for micro in range(2):
                    model(batch(2 * number + micro)).square().mean().backward()
                change(model, optimizer)
                optimizer.step()
                optimizer.zero_grad()
        assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_a_resumed_run_is_the_run_that_never_stopped(home: str, update: str, tmp_path: Path) -> None:
    with a_pair(home, update, tmp_path / "one") as (plain, (model, optimizer)):
        steps(plain, 5)
        steps((model, optimizer), 3)
        ts.save(tmp_path / "saved", model=model, optimizer=optimizer)
        steps((model, optimizer), 1, 9)
        with a_pair(home, update, tmp_path / "another") as (_, (other, another)):
            ts.load(tmp_path / "saved", model=other, optimizer=another)
            steps((other, another), 2, 3)
            assert_same(everything(plain[0]), everything(other))
        with a_pair("all", update, tmp_path / "third") as (_, (other, another)):
            ts.load(tmp_path / "saved", model=other, optimizer=another)
            steps((other, another), 2, 3)
            assert_same(everything(plain[0]), everything(other))


@pytest.mark.parametrize("update", ["step", "backward"])
def test_an_update_that_fails_names_its_block_and_leaves_what_was_before(
    home: str, update: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with a_pair(home, update, tmp_path) as (_, (model, optimizer)):
        steps((model, optimizer), 2)
        weight = model.layers[3].linear.weight  # type: ignore[index, union-attr]
        before = [p.detach().clone() for p in model.layers[3].parameters()]  # type: ignore[index]
        rule = handle_of(model).store.updates.updater.run.__self__  # type: ignore[union-attr]
        step = rule._step

        def failing(entries: Any) -> None:
            if any(entry.parameter is weight for entry in entries):
                raise MemoryError("no room")
            step(entries)

        monkeypatch.setattr(rule, "_step", failing)
        with pytest.raises(ts.GradientError, match="update of block 3 in RAM failed: MemoryError: no room"):
            steps((model, optimizer), 1, 5)
        monkeypatch.undo()
        assert all(map(torch.equal, before, (p.detach() for p in model.layers[3].parameters())))  # type: ignore[index]
        assert under_way(model) == 0


@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("error", [StorageError, KeyboardInterrupt])
def test_a_write_that_fails_loses_nothing(
    home: str, update: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an update has made is in RAM until it is on disk: the step is whole once the disk takes it again."""
    if home == "weights" and error is StorageError:
        pytest.skip("its first write is of weights that a call brings back")
    with a_pair(home, update, tmp_path) as (plain, (model, optimizer)):
        steps(plain, 3)
        steps((model, optimizer), 2)
        copies, failed = handle_of(model).store.copies, list[bool]()
        wait = copies._arrive

        def failing(ticket: Any) -> None:
            wait(ticket)
            if ticket.lane == (H, K) and not failed and copies._newer:
                failed.append(True)
                raise error("the disk is full")

        monkeypatch.setattr(copies, "_arrive", failing)
        try:
            model(batch(2)).square().mean().backward()
            optimizer.step()
        except error:
            pass
        assert failed
        monkeypatch.undo()
        handle_of(model).store.settle()
        expected, found = everything(plain[0]), everything(model)
        block = [name for name in expected if "layers" in name and torch.equal(expected[name], found[name])]
        assert block  # what was updated is what a step makes of it
        assert not copies._newer


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "on the CPU": ({"device": "cpu", "engine": "auto"}, "parameters of blocks live in DISK and RAM is the device"),
    "another engine": (
        {"device": "cpu", "engine": "adversarial"},
        "live in DISK and RAM is the device: where='host' is",
    ),
}


@pytest.mark.on_cpu("of a model on the CPU")
@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, tmp_path: Path) -> None:
    how, text = BAD[name]
    machine = ts.Machine(links={(D, K): ts.Link(1e9), (K, D): ts.Link(1e9)})
    model = ts.stream(Tower(), budget="10 MiB", home="disk", folder=tmp_path, machine=machine, **how)
    with pytest.raises(ts.InputError, match=text):
        ts.optimizer(model, torch.optim.AdamW, where="host", **ADAMW)
    ts.unstream(model)


def test_too_little_ram_for_one_update_is_told(tmp_path: Path) -> None:
    with (
        a_pair("all", "backward", tmp_path, ts.Budget(LEAST, host="30 KiB")) as (_, (model, optimizer)),
        pytest.raises(ts.BudgetError, match="of HOST"),
    ):
        steps((model, optimizer), 1)
