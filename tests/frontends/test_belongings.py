"""What blocks, stages and steps keep besides parameters and buffers: recomputes find it as it was, or it is refused by
name. All of it is equal to plain PyTorch, what is left behind included."""

import copy
import logging
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.runner.belongings import Belongings, undo


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.prepare()

    def prepare(self) -> None: ...

    def factor(self, x: torch.Tensor) -> Any:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x))) * self.factor(x)
        return out


class Appends(Block):
    def prepare(self) -> None:
        self.kept: list[int] = []

    def factor(self, x: torch.Tensor) -> Any:
        self.kept.append(1)
        return len(self.kept)


class SetsItem(Block):
    def prepare(self) -> None:
        self.kept = {"calls": [0]}

    def factor(self, x: torch.Tensor) -> Any:
        self.kept["calls"][0] += 1
        return self.kept["calls"][0]


class MakesTuple(Block):
    def prepare(self) -> None:
        self.kept = (0,)

    def factor(self, x: torch.Tensor) -> Any:
        self.kept = (self.kept[0] + 1,)
        return self.kept[0]


class Slotted:
    __slots__ = ("calls",)

    def __init__(self) -> None:
        self.calls = 0


class ChangesObject(Block):
    def prepare(self) -> None:
        self.kept = Slotted()

    def factor(self, x: torch.Tensor) -> Any:
        self.kept.calls += 1
        return self.kept.calls


class Averages(Block):
    def prepare(self) -> None:
        self.kept = torch.zeros(())

    def factor(self, x: torch.Tensor) -> Any:
        self.kept = 0.9 * self.kept + x.detach().mean()
        return self.kept


class AveragesInPlace(Averages):
    def factor(self, x: torch.Tensor) -> Any:
        self.kept.lerp_(x.detach().mean(), 0.1)
        return self.kept.clone()


class Unused(Averages):
    """What it returns does not depend on it, as a batch norm's statistics in training."""

    def factor(self, x: torch.Tensor) -> Any:
        super().factor(x)
        return 1.0


class UnusedTuple(Unused):
    def factor(self, x: torch.Tensor) -> Any:
        self.kept = (self.kept[0] + 1,) if isinstance(self.kept, tuple) else (0,)  # type: ignore[assignment, unreachable]
        return 1.0


class RegistersLate(Block):
    def factor(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "kept"):
            self.register_buffer("kept", torch.zeros(()))
        self.kept += 1
        return self.kept.clone()


class Previous(Block):
    kept: Any = None

    def factor(self, x: torch.Tensor) -> Any:
        before, self.kept = self.kept, x.detach().mean()
        return 1.0 if before is None else before


class PythonsOwn(Block):
    def prepare(self) -> None:
        self.kept = random.Random(3)

    def factor(self, x: torch.Tensor) -> Any:
        return self.kept.random()


class TorchsOwn(Block):
    def prepare(self) -> None:
        self.kept = {"generator": torch.Generator().manual_seed(3)}

    def factor(self, x: torch.Tensor) -> Any:
        return torch.rand((), generator=self.kept["generator"])


class NumpysOwn(Block):
    def prepare(self) -> None:
        self.kept = numpy.random.default_rng(3)

    def factor(self, x: torch.Tensor) -> Any:
        return float(self.kept.random())


class MadeLate(Block):
    def factor(self, x: torch.Tensor) -> Any:
        if not hasattr(self, "kept"):
            self.kept = torch.full((), 2.0)
        return self.kept


class Drawn(Block):
    """A table by shape, made at first use: in the profile its making draws as in the user's own run."""

    def prepare(self) -> None:
        self.kept: dict[Any, torch.Tensor] = {}

    def factor(self, x: torch.Tensor) -> Any:
        if x.shape not in self.kept:
            self.kept[x.shape] = torch.rand(())
        return self.kept[x.shape]


class Last(Block):
    kept: Any = None

    def factor(self, x: torch.Tensor) -> Any:
        self.kept = x.detach() * 2
        return 1.0


class Timed(Block):
    """A number that is another one in every run, and a sparse tensor made in each."""

    def prepare(self) -> None:
        self.began, self.table = 0.0, None

    def factor(self, x: torch.Tensor) -> Any:
        self.began, self.table = time.perf_counter(), torch.eye(16).to_sparse()  # type: ignore[assignment]
        return self.table.to_dense().diagonal()  # type: ignore[attr-defined]


class Keeping(logging.Handler):
    """Collects what is logged, in a list that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


class Logs(Block):
    def prepare(self) -> None:
        self.logger = logging.Logger("block")
        self.logger.addHandler(Keeping())

    def factor(self, x: torch.Tensor) -> Any:
        self.logger.warning("called")
        return 1.0


class Guarded(Appends):
    def factor(self, x: torch.Tensor) -> Any:
        if not ts.recomputing():
            self.kept.append(1)
        return 1.0


class Moves(Block):
    """At the first run what a parameter has as an attribute goes to an object of the block's own, as scales of
    quantised weights do."""

    def prepare(self) -> None:
        self.state = SimpleNamespace(scale=None)
        self.up.weight.scale = torch.full((), 2.0)  # type: ignore[attr-defined]

    def factor(self, x: torch.Tensor) -> Any:
        weight: Any = self.up.weight
        if weight.scale is not None:
            self.state.scale, weight.scale = weight.scale, None
        return float("nan") if self.state.scale is None else self.state.scale


REFUSED = [
    Appends,
    SetsItem,
    MakesTuple,
    ChangesObject,
    Averages,
    Unused,
    UnusedTuple,
    RegistersLate,
    Previous,
]
EXACT = [PythonsOwn, TorchsOwn, NumpysOwn, MadeLate, Drawn, Last, Timed, Logs, Guarded, Moves, AveragesInPlace]


class Net(nn.Module):
    """Keeps a list of its own, outside of blocks."""

    def __init__(self, kind: type[Block]) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.blocks = nn.ModuleList(kind() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        for block in self.blocks:
            x = block(x)
        return x.square().mean() * len(self.calls)


def made(kind: type[Block]) -> Net:
    torch.manual_seed(0)
    return Net(kind)


def trained(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    torch.manual_seed(1)
    found = []
    for x in [torch.randn(32, 16) for _ in range(3)]:
        net.zero_grad()
        loss = call(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters())]
    return found


def shown(kept: Any) -> Any:
    if isinstance(kept, torch.Generator):
        return kept.get_state().tolist()
    if isinstance(kept, random.Random):
        return kept.getstate()
    if isinstance(kept, numpy.random.Generator):
        return str(kept.bit_generator.state)
    if isinstance(kept, dict):
        return {key: shown(value) for key, value in kept.items()}
    return kept.tolist() if isinstance(kept, torch.Tensor) else kept


def equal(found: list[Any], wanted: list[Any], ours: Net, plain: Net) -> None:
    assert all(map(torch.equal, found, wanted))
    for mine, theirs in zip(ours.blocks, plain.blocks, strict=True):
        assert shown(getattr(mine, "kept", None)) == shown(getattr(theirs, "kept", None))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("ample", [True, False])
@pytest.mark.parametrize("kind", EXACT)
def test_streamed(kind: type[Block], ample: bool) -> None:
    plain, ours = made(kind), made(kind)
    wanted = trained(plain, plain)
    with pytest.raises(ts.BudgetError) as refused:
        ts.stream(ours, device="cpu", budget=1000)(torch.randn(32, 16))
    ts.unstream(ours)
    assert refused.value.least_nbytes is not None
    ours = made(kind)
    ts.stream(ours, device="cpu", budget=2**30 if ample else refused.value.least_nbytes)
    found = trained(ours, ours)
    assert ts.report(ours).plan.simulation.forwards >= 6
    ts.unstream(ours)
    equal(found, wanted, ours, plain)
    assert ours.calls == plain.calls == [1] * 3


@pytest.mark.parametrize("kind", EXACT)
def test_in_a_chain(kind: type[Block]) -> None:
    plain, ours = made(kind), made(kind)
    chain = ts.Chain(list(ours.blocks), budget=37_000, planner="revolve", verify=True)
    found = trained(ours, lambda x: chain(x).square().mean())
    assert chain.plan.simulation.forwards > 6
    wanted = trained(plain, lambda x: nn.Sequential(*plain.blocks)(x).square().mean())
    equal(found, wanted, ours, plain)


def looped_as_by_hand(kind: type[Block]) -> tuple[Any, Any]:
    """A model of which a loop has run the first block, and one that plain PyTorch has trained like that."""
    plain, ours = made(kind), made(kind)

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        for _ in range(20):
            x = plain.blocks[0](x)
        return x.square().mean()

    run = ts.Loop(ours.blocks[0], budget=60_000)
    found = trained(ours.blocks[0], lambda x: run(x, steps=20).square().mean())
    equal(found, trained(plain.blocks[0], by_hand), ours, plain)
    return plain, ours


@pytest.mark.parametrize("kind", EXACT)
def test_in_a_loop(kind: type[Block]) -> None:
    looped_as_by_hand(kind)


THREADED = (Averages, Unused, Previous)
"""A loop makes these tensors a part of its state."""


@pytest.mark.parametrize("kind", THREADED)
def test_tensors_that_a_loop_threads(kind: type[Block]) -> None:
    plain, ours = looped_as_by_hand(kind)
    assert torch.equal(ours.blocks[0].kept, plain.blocks[0].kept)


WAYS = [(kind, how) for kind in REFUSED for how in ("stream", "chain", "loop") if how != "loop" or kind not in THREADED]


@pytest.mark.parametrize(("kind", "how"), WAYS)
def test_refused(kind: type[Block], how: str) -> None:
    net, x = made(kind), torch.randn(32, 16)
    before = [copy.copy(getattr(block, "kept", None)) for block in net.blocks]
    call: dict[str, Callable[..., Any]] = {
        "stream": lambda: ts.stream(net, device="cpu", budget=2**30)(x),
        "chain": lambda: ts.Chain(list(net.blocks), budget=2**30)(x),
        "loop": lambda: ts.Loop(net.blocks[0], budget=2**30)(x, steps=20),
    }
    with pytest.raises(InputError, match=rf"{kind.__name__}\) changes '{kind.__name__}\.kept.*recomputing\(\) is"):
        call[how]()
    if how == "stream":
        ts.unstream(net)
    if kind in (Appends, Averages, MakesTuple, Unused, Previous):
        assert [getattr(block, "kept", None) for block in net.blocks] == before
    assert not net.calls


CALLS: list[int] = []
NUMBER = 0


def appends_to_a_global(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(1)
    return x * len(CALLS)


def counts_in_a_global(x: torch.Tensor) -> torch.Tensor:
    global NUMBER
    NUMBER += 1
    return x * NUMBER


def closing() -> Callable[..., Any]:
    number = 0

    def counts_in_a_closure(x: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return x * number

    return counts_in_a_closure


class Called:
    def __init__(self) -> None:
        self.number = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.number += 1
        return x * self.number


@pytest.mark.parametrize("chain", [True, False])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: appends_to_a_global, "appends_to_a_global.CALLS"),
        (lambda: counts_in_a_global, "counts_in_a_global.NUMBER"),
        (closing, "counts_in_a_closure.number"),
        (Called, "Called.number"),
    ],
)
def test_functions(make: Callable[[], Any], name: str, chain: bool) -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(InputError, match=rf"changes '{name}', which goes further with each run"):
        ts.Chain([torch.sin, make()], budget=2**20)(x) if chain else ts.Loop(make(), budget=2**20)(x, steps=5)
    assert (CALLS, NUMBER) == ([], 0)


def test_arrays() -> None:
    calls: list[int] = []

    def step(u: numpy.ndarray) -> numpy.ndarray:
        calls.append(1)
        return u * len(calls)

    run = ts.Loop(step, budget=2**20, adjoint=lambda u, w: w)
    with pytest.raises(InputError, match=r"changes 'step\.calls'"):
        run(torch.ones(3, requires_grad=True), steps=5)
    assert not calls


def test_what_was_changed_is_put_back() -> None:
    module = nn.Module()
    module.list, module.set, module.array = [[1], 2], {1}, numpy.zeros(2)  # type: ignore[assignment]
    module.deep, module.none = {"a": {"b": [Slotted()]}}, None  # type: ignore[assignment]
    generator = module.generator = torch.Generator().manual_seed(0)  # type: ignore[assignment]
    before = Belongings([module])
    assert before.changes(Belongings([module])) == []
    module.list[0].append(3)  # type: ignore[operator, union-attr, index]
    module.list.append(4)  # type: ignore[operator]
    module.set |= {5}  # type: ignore[operator]
    module.array += 1  # type: ignore[operator]
    module.deep["a"]["b"][0].calls = 7  # type: ignore[index]
    module.deep["a"]["c"] = 8  # type: ignore[index]
    module.none, module.new = torch.ones(1), []  # type: ignore[assignment]
    state = generator.get_state()
    torch.rand(1, generator=generator)
    module.register_buffer("late", torch.ones(1))
    found = before.changes(Belongings([module], since=before))
    names = {change.name for change in found}
    assert names >= {f"Module.{name}" for name in ("list", "set", "array", "none", "new", "generator", "late")}
    assert names >= {"Module.deep.a.b.calls", "Module.deep.a.c"}
    undo(found)
    assert (module.list[1:], module.set, module.none, hasattr(module, "new")) == ([2], {1}, None, False)  # type: ignore[index]
    assert module.deep["a"].keys() == {"b"}  # type: ignore[index]
    assert module.deep["a"]["b"][0].calls == 0  # type: ignore[index]
    assert not module.array.any()  # type: ignore[operator, union-attr]
    assert torch.equal(generator.get_state(), state)
    assert not list(module.buffers())
