"""Blocks that are updated in RAM below a GPU: the bits of torch's optimizer on the CPU, and nobody sees half a step."""

import contextlib
import copy
import io
import itertools
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import Trace, assert_same, copy_of, seed
from on_cpu import OnCpu, names_inside
from place import DEVICE
from streamable import MODELS, Model
from streaming import TWO_HOPS, D, H, budget_at, everything, loss_at, streamed, train
from torch import nn

import tapestream as ts
from tapestream.frontends.module.stream import handle_of

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], bool]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}, True),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, True),
    "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}, True),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01}, False),
}
SETTINGS = [
    (*which, ("least", "ample")[number % 2])
    for number, which in enumerate(itertools.product(MODELS, OPTIMIZERS, ["step", "backward"]))
]
OPTIONS: dict[str, Any] = {
    "device": DEVICE, "engine": "fake_streams" if DEVICE == "cpu" else "auto", "home": "host", "machine": TWO_HOPS,
}  # fmt: skip


def maker(name: str, update: str, **more: Any) -> Callable[[Any], Any]:
    make, knobs, _ = OPTIMIZERS[name]
    return lambda model: ts.optimizer(model, make, update=update, where="host", **knobs, **more)


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("name", "optimizer", "update", "level"), SETTINGS)
def test_training_has_the_bits_of_the_optimizer_on_the_cpu(name: str, optimizer: str, update: str, level: str) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS[optimizer]
    budget = budget_at("least", case, maker(optimizer, update), **OPTIONS) * (2 + (level == "ample")) // 2
    if name == "dropping":
        torch.manual_seed(0)
    with streamed(case, budget, **OPTIONS) as model:
        found = train(model, maker(optimizer, update)(model), case, gradients=update == "step")
        inside = names_inside(model)
    if name == "dropping":
        torch.manual_seed(0)
    plain = case.model().to(DEVICE)
    expected = train(plain, OnCpu(plain, inside, make, fused, **knobs), case, gradients=update == "step")  # type: ignore[arg-type]
    assert_same(expected, {key: value for key, value in found.items() if not key.startswith("state ")})


WIDTH = 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return found


class Tower(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 2)
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


Pair = tuple[nn.Module, Any]
ADAMW: dict[str, Any] = {"lr": 0.01}


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates in RAM take a while, in which weights and state are not numbers."""
    from tapestream.optim.rule import Rule

    run = Rule.run

    def late(self: Any, work: Any) -> None:
        if threading.current_thread() is threading.main_thread() or "tapestream" not in threading.current_thread().name:
            return run(self, work)
        memories = [part.weights for part in work if part.weights is not None]
        before = [memory.clone() for memory in memories]
        for memory in memories:
            memory.fill_(255)
        time.sleep(0.004)
        for memory, was in zip(memories, before, strict=True):
            memory.copy_(was)
        return run(self, work)

    monkeypatch.setattr(Rule, "run", late)


@pytest.fixture
def pair() -> Iterator[tuple[Pair, Pair]]:
    model = ts.stream(Tower(), budget="130 KiB", **OPTIONS)
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="host", **ADAMW)
    plain = Tower().to(DEVICE)
    yield (plain, OnCpu(plain, names_inside(model), torch.optim.AdamW, True, **ADAMW)), (model, optimizer)
    with contextlib.suppress(ts.InputError):  # the test has done so
        ts.unstream(model)


def batch(seed: int) -> torch.Tensor:
    return torch.randn(5, 8, generator=torch.Generator("cpu").manual_seed(seed), device="cpu").to(DEVICE)


def steps(pair: Pair, count: int, first: int = 0) -> list[float]:
    """As people train: nothing is looked at but the loss."""
    model, optimizer = pair
    losses = []
    for number in range(first, first + count):
        loss = model(batch(number)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def under_way(model: nn.Module) -> int:
    return len(handle_of(model).store.copies.on_host.under_way)


@pytest.mark.usefixtures("slowly")
def test_updates_go_on_under_the_next_forward(pair: tuple[Pair, Pair]) -> None:
    plain, (model, optimizer) = pair
    expected = steps(plain, 6)
    found, left = [], []
    waited = handle_of(model).store.updates.on_host.end
    for number in range(6):
        found += steps((model, optimizer), 1, number)
        left.append(under_way(model))
    assert expected == found
    assert left == [6] * 6
    seen: list[int] = []
    handle_of(model).store.copies.on_host.end = lambda b: (seen.append(under_way(model)), waited(b))[1]  # type: ignore[method-assign]
    model(batch(9)).sum().backward()
    assert [count for block, count in zip(range(6), sorted(set(seen) - {0}, reverse=True), strict=False)] == [
        6,
        5,
        4,
        3,
        2,
        1,
    ]
    assert_same(everything(plain[0]), everything(model))


def held_state(model: nn.Module, optimizer: Any) -> Any:
    return optimizer.state


LOOKS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "data": lambda m, o: [p.data.clone() for p in m.parameters()],
    "sum": lambda m, o: [p.sum().item() for p in m.parameters()],
    "norm of all": lambda m, o: torch.stack([p.detach().norm().cpu() for p in m.parameters()]).norm(),
    "detach in a list": lambda m, o: [p.detach().cpu().clone() for p in m.parameters()],
    "numpy": lambda m, o: [p.detach().cpu().numpy().copy() for p in m.parameters()],
    "gradients": lambda m, o: [p.grad.clone() for p in m.parameters()],
    "state_dict": lambda m, o: {n: t.clone() for n, t in m.state_dict().items()},
    "deep copy": lambda m, o: copy.deepcopy(m.layers[2].linear.weight).data,
    "evaluation": lambda m, o: evaluated(m),
    "a product": lambda m, o: m.layers[3].linear.weight @ m.layers[3].linear.bias,
    "a function of it": lambda m, o: torch.nn.functional.softmax(m.layers[1].linear.weight.cpu(), 0),
    "pickled": lambda m, o: [p.tolist() for p in m.layers[1].parameters()],
    "indexed": lambda m, o: m.layers[0].linear.weight[0, :3].clone(),
    "compared": lambda m, o: bool((m.layers[0].linear.weight == 0).any()),
    "printed": lambda m, o: repr(m.layers[0].linear.bias).split("]")[0],
    "averaged": lambda m, o: averaged(m),
    "in a file": lambda m, o: in_a_file(m),
}  # fmt: skip


def evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(batch(77))
    return found.cpu()


def averaged(model: nn.Module) -> list[torch.Tensor]:
    average = torch.optim.swa_utils.AveragedModel(Tower().to(DEVICE))
    average.module.load_state_dict(model.state_dict())
    average.update_parameters(model)
    return [p.detach().cpu() for p in average.parameters()]


def in_a_file(model: nn.Module) -> dict[str, torch.Tensor]:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    found: dict[str, torch.Tensor] = torch.load(file, map_location="cpu")
    return found


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("name", LOOKS)
def test_who_looks_sees_what_the_step_has_made(name: str, pair: tuple[Pair, Pair]) -> None:
    seen = []
    for model, optimizer in pair:
        steps((model, optimizer), 2)
        model(batch(5)).square().mean().backward()
        optimizer.step()
        seen.append(LOOKS[name](model, optimizer))
        optimizer.zero_grad()
        steps((model, optimizer), 2, 6)
    assert_equal(*seen)
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert torch.equal(one.cpu(), other.cpu())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_equal(a, b)
    elif hasattr(one, "tobytes"):
        assert one.tobytes() == other.tobytes()
    else:
        assert one == other


@torch.no_grad()
def doubled(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.mul_(2.0)


def data_doubled(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.data.mul_(2.0)


def data_replaced(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        p.data = p.data * 0.5


def gradients_zeroed(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.zero_()


def another_rate(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.5


def clipped(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


def kept_gradients(model: nn.Module, optimizer: Any) -> None:
    for p in KEPT:
        p.fill_(7.0)


KEPT: list[torch.Tensor] = []
WRITES = {
    "in place": doubled, "by data": data_doubled, "data replaced": data_replaced, "gradients": gradients_zeroed,
    "learning rate": another_rate, "clipped afterwards": clipped, "gradients held before": kept_gradients,
    "zeroed": lambda m, o: o.zero_grad(set_to_none=False), "by the model": lambda m, o: m.zero_grad(),
}  # fmt: skip


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("name", WRITES)
def test_who_writes_comes_after_the_step(name: str, pair: tuple[Pair, Pair]) -> None:
    for model, optimizer in pair:
        steps((model, optimizer), 2)
        model(batch(5)).square().mean().backward()
        KEPT[:] = [p.grad.view(-1) for p in model.parameters() if p.grad is not None]
        optimizer.step()
        WRITES[name](model, optimizer)
        if isinstance(optimizer, OnCpu):
            optimizer.take_back()
        KEPT.clear()
        model.zero_grad()
        steps((model, optimizer), 2, 6)
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


class Several(list[torch.Tensor]):
    """A list of somebody's own."""


@pytest.mark.usefixtures("slowly")
def test_a_list_of_another_class_is_looked_into(pair: tuple[Pair, Pair]) -> None:
    seen = []
    for model, optimizer in pair:
        steps((model, optimizer), 1)
        model(batch(5)).square().mean().backward()
        optimizer.step()
        seen.append(torch.stack(Several(layer.linear.weight for layer in model.layers)).detach().cpu())  # type: ignore[union-attr]
    assert torch.equal(*seen)


@pytest.mark.usefixtures("slowly")
def test_autograd_waits_before_it_adds_to_a_gradient_that_an_update_reads(pair: tuple[Pair, Pair]) -> None:
    for model, optimizer in pair:
        steps((model, optimizer), 2)
        penalty = sum((p * 2).sum() for p in model.parameters())
        model(batch(5)).square().mean().backward()
        optimizer.step()
        penalty.backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.usefixtures("slowly")
def test_a_gradient_that_is_shared_is_added_to_or_refused(pair: tuple[Pair, Pair]) -> None:
    _, (model, optimizer) = pair
    steps((model, optimizer), 2)
    other = nn.Parameter(torch.ones(WIDTH, WIDTH))
    model(batch(5)).square().mean().backward()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    other.grad = model.layers[3].linear.weight.grad.to(other.device)  # type: ignore[index, union-attr]
    with contextlib.suppress(RuntimeError):
        (other * 3).sum().backward()
    assert not any(torch.isnan(p).any() for p in model.parameters())
    assert not all(map(torch.equal, before.values(), model.state_dict().values()))


@pytest.mark.usefixtures("slowly")
def test_what_looks_past_pythons_functions_finds_no_plausible_number(pair: tuple[Pair, Pair]) -> None:
    _, (model, optimizer) = pair
    steps((model, optimizer), 2)
    weight = model.layers[3].linear.weight  # type: ignore[index, union-attr]
    model(batch(5)).square().mean().backward()
    optimizer.step()
    assert under_way(model) == 6
    assert torch.func.grad(lambda w: w.square().sum())(weight).isnan().all()
    with torch._C.DisableTorchFunctionSubclass():
        assert weight.sum().isnan()
    optimizer.settle()
    assert not weight.isnan().any()
    assert not torch.func.grad(lambda w: w.square().sum())(weight).isnan().any()


@pytest.mark.usefixtures("slowly")
def test_several_threads_look_at_once(pair: tuple[Pair, Pair]) -> None:
    (plain, reference), (model, optimizer) = pair
    seen: list[list[torch.Tensor]] = []
    for number in range(3):
        steps((plain, reference), 1, number)
        steps((model, optimizer), 1, number)
        look = lambda: seen.append([p.detach().cpu().clone() for p in model.parameters()])  # noqa: E731
        readers = [threading.Thread(target=look) for _ in range(3)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        expected = [p.detach().cpu() for p in plain.parameters()]
        assert len(seen) == 3 * (number + 1)
        for found in seen[-3:]:
            assert_equal(expected, found)


def data_of_gradients(model: nn.Module, optimizer: Any) -> None:
    KEPT[:] = [torch.ones_like(p) for p in model.parameters()]
    for p, gradient in zip(model.parameters(), KEPT, strict=True):
        assert p.grad is not None
        p.grad.data = gradient


def own_gradients(model: nn.Module, optimizer: Any) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 2


def clip(model: nn.Module, optimizer: Any) -> None:
    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)


def frozen(model: nn.Module, optimizer: Any) -> None:
    for p in model.layers[2].parameters():  # type: ignore[index]
        p.requires_grad_(False)


def scheduled(model: nn.Module, optimizer: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] *= 0.5


BEFORE = {
    "own gradients": own_gradients,
    "data of gradients": data_of_gradients,
    "clipped": clip,
    "scheduled": scheduled,
}


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("name", BEFORE)
def test_what_is_done_between_backward_and_step(name: str, pair: tuple[Pair, Pair]) -> None:
    for model, optimizer in pair:
        for number in range(4):
            model(batch(number)).square().mean().backward()
            BEFORE[name](model, optimizer)
            optimizer.step()
            for held in KEPT:
                held.fill_(9.0)
            KEPT.clear()
            scheduled(model, optimizer)
            optimizer.zero_grad()
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.usefixtures("slowly")
def test_micro_batches_between_steps(pair: tuple[Pair, Pair]) -> None:
    for model, optimizer in pair:
        for number in range(9):
            model(batch(number)).square().mean().backward()
            if number % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.usefixtures("slowly")
def test_parameters_that_are_frozen_after_a_step(pair: tuple[Pair, Pair]) -> None:
    for model, optimizer in pair:
        steps((model, optimizer), 2)
        frozen(model, optimizer)
        steps((model, optimizer), 2, 5)
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.usefixtures("slowly")
def test_state_that_somebody_holds_is_complete_when_the_step_returns(pair: tuple[Pair, Pair]) -> None:
    _, (model, optimizer) = pair
    steps((model, optimizer), 2)
    weight = model.layers[3].linear.weight  # type: ignore[index, union-attr]
    held, count = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["step"]
    before = held.clone()
    model(batch(5)).square().mean().backward()
    gradient = weight.grad.cpu().clone()
    optimizer.step()
    assert torch.equal(held, before.lerp(gradient, 0.1)) or torch.allclose(held, before.lerp(gradient, 0.1), rtol=1e-6)
    assert count.item() == 3
    assert under_way(model) == 5


@pytest.mark.usefixtures("slowly")
def test_a_state_dict_goes_on_where_it_was(pair: tuple[Pair, Pair]) -> None:
    plain, (model, optimizer) = pair
    steps(plain, 3)
    steps((model, optimizer), 3)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    steps((model, optimizer), 2, 20)
    model.load_state_dict(weights)
    optimizer.load_state_dict(saved)
    steps(plain, 2, 30)
    steps((model, optimizer), 2, 30)
    assert_same(everything(plain[0]), everything(model))


def test_state_that_goes_on_elsewhere_is_said(pair: tuple[Pair, Pair]) -> None:
    _, (model, optimizer) = pair
    steps((model, optimizer), 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    other = ts.optimizer(model, torch.optim.AdamW, **ADAMW)
    with pytest.warns(UserWarning, match="made with where='host' and goes on with where='device'"):
        other.load_state_dict(saved)


@pytest.mark.usefixtures("slowly")
def test_a_save_is_of_whole_steps(pair: tuple[Pair, Pair], tmp_path: Path) -> None:
    plain, (model, optimizer) = pair
    steps(plain, 5)
    steps((model, optimizer), 3)
    ts.save(tmp_path / "saved", model=model, optimizer=optimizer)
    other = ts.stream(Tower(), budget="130 KiB", **OPTIONS)
    another = ts.optimizer(other, torch.optim.AdamW, where="host", **ADAMW)
    ts.load(tmp_path / "saved", model=other, optimizer=another)
    steps((other, another), 2, 3)
    assert_same(everything(plain[0]), everything(other))
    ts.unstream(other)


@pytest.mark.usefixtures("slowly")
def test_unstream_leaves_whole_steps(pair: tuple[Pair, Pair]) -> None:
    for one in pair:
        steps(one, 3)
    ts.unstream(pair[1][0])
    assert all(type(p) is nn.Parameter for p in pair[1][0].parameters())
    assert_same(everything(pair[0][0]), everything(pair[1][0]))


@pytest.mark.usefixtures("slowly")
def test_another_optimizer_begins_where_the_first_ended(pair: tuple[Pair, Pair]) -> None:
    plain, (model, optimizer) = pair
    steps(plain, 2)
    steps((model, optimizer), 2)
    other = ts.optimizer(model, torch.optim.SGD, lr=0.1)
    steps((model, other), 2, 5)
    steps((plain[0], torch.optim.SGD(plain[0].parameters(), lr=0.1)), 2, 5)
    assert_same(everything(plain[0]), everything(model))


@pytest.mark.usefixtures("slowly")
def test_a_failure_names_its_block_at_the_next_look(pair: tuple[Pair, Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    _, (model, optimizer) = pair
    steps((model, optimizer), 2)
    before = [p.detach().clone() for p in model.layers[3].parameters()]  # type: ignore[index]
    rule = handle_of(model).store.updates.updater.run.__self__  # type: ignore[union-attr]
    step = rule._step

    def failing(entries: Any) -> None:
        if any(entry.parameter is model.layers[3].linear.weight for entry in entries):  # type: ignore[index, union-attr]
            raise MemoryError("no room")
        step(entries)

    monkeypatch.setattr(rule, "_step", failing)
    model(batch(5)).square().mean().backward()
    optimizer.step()
    with pytest.raises(ts.GradientError, match="update of block 3 in RAM failed: MemoryError: no room"):
        model(batch(6))
    assert all(map(torch.equal, before, (p.detach() for p in model.layers[3].parameters())))  # type: ignore[index]
    assert under_way(model) <= 2


@pytest.mark.usefixtures("slowly")
@pytest.mark.parametrize("update", ["step", "backward"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, RuntimeError])
def test_an_exception_in_a_forward_leaves_whole_steps(update: str, interrupt: type[BaseException]) -> None:
    model = ts.stream(Tower(), budget="130 KiB", **OPTIONS)
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="host", update=update, **ADAMW)
    plain = Tower().to(DEVICE)
    reference = OnCpu(plain, names_inside(model), torch.optim.AdamW, True, **ADAMW)
    steps((plain, reference), 4)
    steps((model, optimizer), 2)

    def fail(*_: Any) -> None:
        raise interrupt("now")

    hook = model.layers[2].register_forward_hook(fail)  # type: ignore[index]
    with pytest.raises(interrupt):
        model(batch(5))
    hook.remove()
    steps((model, optimizer), 2, 2)
    assert_same(everything(plain), everything(model))
    ts.unstream(model)


@pytest.mark.usefixtures("slowly")
@pytest.mark.thinned(4)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "dropping"])
@pytest.mark.parametrize("update", ["step", "backward"])
def test_models_that_nobody_looks_at(name: str, update: str) -> None:
    case, (make, knobs, fused) = MODELS[name], OPTIMIZERS["adamw"]
    budget = budget_at("least", case, maker("adamw", update), **OPTIONS)
    with streamed(case, budget, **OPTIONS) as model:
        inside = names_inside(model)
        found = blind(model, maker("adamw", update)(model), case)
    plain = case.model().to(DEVICE)
    assert_same(blind(plain, OnCpu(plain, inside, make, fused, **knobs), case), found)


def blind(model: nn.Module, optimizer: Any, case: Model) -> Trace:
    """All that four steps leave, between which nobody looks at anything."""
    seed(3)
    losses = []
    for _ in range(4):
        losses.append(loss_at(model, case))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"loss {n}": copy_of(loss) for n, loss in enumerate(losses)} | everything(model)


def test_only_weights_and_gradients_pass_the_link() -> None:
    found = {}
    for where in ("device", "host"):
        model = ts.stream(Tower(), budget="130 KiB", **OPTIONS)
        optimizer = ts.optimizer(model, torch.optim.AdamW, where=where, **ADAMW)
        moved = handle_of(model).engine.statistics
        for number in range(2):
            before = moved().bytes_moved
            steps((model, optimizer), 1, number)
        found[where] = {ends: nbytes - before.get(ends, 0) for ends, nbytes in moved().bytes_moved.items()}
        gradients = sum(block.layout.nbytes for block in handle_of(model).store.blocks[:6])
        ts.unstream(model)
    assert found["host"][D, H] == gradients
    assert found["host"][H, D] <= 2 * gradients
    assert found["device"][D, H] > 3 * gradients


@pytest.mark.on_cpu("a simulated GPU is not for forked processes")
@pytest.mark.filterwarnings("ignore:This process")  # newer Pythons warn of forks beside threads
@pytest.mark.usefixtures("slowly")
def test_a_forked_child_is_told(pair: tuple[Pair, Pair]) -> None:
    """It has no thread that would end the update."""
    _, (model, optimizer) = pair
    steps((model, optimizer), 2)
    ours, theirs = multiprocessing.Pipe()

    def child() -> None:
        try:
            theirs.send(model.layers[5].linear.weight.sum().item())  # type: ignore[index, union-attr]
        except ts.InputError as error:
            theirs.send(str(error))

    process = multiprocessing.get_context("fork").Process(target=child, daemon=True)
    process.start()
    assert ours.poll(20)
    assert "that its parent was updating when it was forked" in ours.recv()
    process.join()


@pytest.mark.on_cpu("the program is one of its own")
def test_a_program_that_ends_at_once_ends_well(tmp_path: Path) -> None:
    program = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}
from test_update_on_host import *
from torch import nn
model = ts.stream(nn.Sequential(*(nn.Linear(1000, 1000) for _ in range(6))), budget="24 MiB", **OPTIONS)
optimizer = ts.optimizer(model, torch.optim.RMSprop, where="host")
model(torch.ones(2, 1000)).sum().backward()
optimizer.step()
print(under_way(model))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "6", "")


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "on the device": (
        {"home": "device"},
        {"where": "host"},
        "parameters of blocks live in DEVICE: where='host' is for",
    ),
    "no such place": ({}, {"where": "ram"}, "where='ram' was asked for; it is 'auto', 'device', 'host' or 'mixed'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    how, options, text = BAD[name]
    model = ts.stream(Tower(), budget="10 MiB", **{**OPTIONS, **how})
    with pytest.raises(ts.InputError, match=re.escape(text)):
        ts.optimizer(model, torch.optim.AdamW, **options, **ADAMW)
    ts.unstream(model)


def test_too_little_ram_is_told() -> None:
    model = ts.stream(Tower(), budget=ts.Budget("130 KiB", host="150 KiB"), **OPTIONS)
    optimizer = ts.optimizer(model, torch.optim.AdamW, where="host", **ADAMW)
    with pytest.raises(ts.BudgetError, match="of HOST"):
        steps((model, optimizer), 1)
    ts.unstream(model)


def test_where_auto_is_the_device_until_both_were_measured_to_be_equal() -> None:
    model = ts.stream(Tower(), budget="130 KiB", **OPTIONS)
    assert ts.optimizer(model, torch.optim.AdamW, **ADAMW).where == "device"
    assert ts.optimizer(model, torch.optim.AdamW, where="host", **ADAMW).where == "host"
    ts.unstream(model)
