"""What a recompute could not be given as it was is refused by name, and so is a stage whose runs are not alike."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.errors import InputError, TapestreamError

WIDTH = 16
Stage = Callable[[Any], Any]


def _linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(WIDTH, WIDTH)


def _runs(first: Stage, second: Stage) -> None:
    stages = [first, second, _linear(), _linear()]
    ts.Chain(stages, budget=2**20)(torch.ones(4, WIDTH, requires_grad=True))


class Named(Tensor):
    """Hands its class on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs)


def _with_attribute(x: Tensor) -> Tensor:
    out = x * 2
    out.scale = 3  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (lambda x: (x, torch.Generator()), lambda t: t[0], "random generator"),
        (lambda x: (x, numpy.random.default_rng(0)), lambda t: t[0], "random generator"),
        (lambda x: x.to_sparse(), lambda s: s.to_dense(), "layout torch.sparse_coo"),
        (lambda x: x.as_subclass(Named), lambda n: n.as_subclass(Tensor), "Named"),
        (_with_attribute, lambda x: x * getattr(x, "scale", 1), "'scale'"),
    ],
)
def test_a_state_that_would_not_be_what_it_was_is_refused(first: Stage, second: Stage, said: str) -> None:
    with pytest.raises(InputError, match=said):
        _runs(first, second)


def test_sparse_tensors_inside_a_stage_work() -> None:
    matrix = torch.eye(WIDTH).to_sparse()
    embedding = nn.Embedding(8, WIDTH, sparse=True)
    numbers = torch.arange(4)
    stages: list[Stage] = [
        lambda x: torch.sparse.mm(matrix, x.t()).t() + embedding(numbers), *(_linear() for _ in range(4))
    ]  # fmt: skip
    found: list[Tensor] = []
    for net in (ts.Chain(stages, budget=2**20), None):
        x = torch.ones(4, WIDTH, requires_grad=True)
        out: Any = x
        for stage in stages if net is None else [net]:
            out = stage(out)
        out.square().sum().backward()
        assert embedding.weight.grad is not None
        found += [x.grad, embedding.weight.grad.to_dense()]  # type: ignore[list-item]
        embedding.weight.grad = None
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[1], found[3])


def _counting_in_itself() -> Stage:
    def stage(x: Tensor) -> Tensor:
        stage.calls += 1  # type: ignore[attr-defined]
        return x * stage.calls  # type: ignore[attr-defined]

    stage.calls = 0  # type: ignore[attr-defined]
    return stage


class Counter:
    """An index that is another one each time."""

    def __init__(self) -> None:
        self.n = 0

    def __index__(self) -> int:
        self.n += 1
        return self.n


def _indexing() -> Stage:
    counter = Counter()
    return lambda x: x * torch.arange(1, 100)[torch.tensor(int(counter.__index__()))]


@pytest.mark.parametrize("stage", [_counting_in_itself(), _indexing()])
@pytest.mark.parametrize("front", ["chain", "loop"])
def test_a_stage_whose_runs_are_not_alike_is_refused(stage: Stage, front: str) -> None:
    with pytest.raises(TapestreamError, match=r"when it runs again|not deterministic|with each run|next run returns"):
        _used(front, stage)


def _used(front: str, module: Any) -> None:
    x = torch.ones(4, WIDTH, requires_grad=True)
    if front == "loop":
        ts.Loop(module, budget=2**20)(x, steps=8)
    elif front == "chain":
        ts.Chain([module, _linear()], budget=2**20)(x)
    else:
        ts.stream(nn.Sequential(module, _linear()), device="cpu", budget=2**20, home="device")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("front", ["chain", "loop", "stream"])
def test_modules_of_jit_and_lazy_ones_are_refused(front: str) -> None:
    for made, said in (
        (lambda: torch.jit.trace(_linear(), torch.ones(1, WIDTH)), r"torch\.jit"),
        (lambda: nn.LazyLinear(WIDTH), "lazy module"),
    ):
        with pytest.raises(InputError, match=said):
            _used(front, made())


@pytest.mark.parametrize("budget", [2**20, 1])
def test_a_parameter_that_was_frozen_after_the_call_gets_no_gradient(budget: int) -> None:
    stages = [_linear() for _ in range(6)]
    chain = ts.Chain(stages, budget=budget)
    x = torch.ones(64, WIDTH, requires_grad=True)
    try:
        out = chain(x)
    except ts.BudgetError as error:
        out = ts.Chain(stages, budget=error.least_nbytes or 0)(x)
    stages[0].weight.requires_grad_(False)
    if budget == 1:  # it is recomputed, and would give another graph
        with pytest.raises(ts.GradientError, match="frozen parameter"):
            out.sum().backward()
        return
    out.sum().backward()
    assert stages[0].weight.grad is None
    assert stages[0].bias.grad is not None
