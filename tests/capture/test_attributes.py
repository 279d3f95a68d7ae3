"""Numbers that stages read from objects, classes and modules of Python: changed between a call and its backward."""

import functools
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from all_fronts import Around, assert_same, net_for, observed, run_of, start

import tapestream as ts
from tapestream.errors import GradientError

FRONTS = ["Chain", "Join", "Loop", "stream"]


class Plain:
    on, scale = False, 1.0

    def factor(self) -> float:
        return self.scale

    @property
    def twice(self) -> float:
        return 2 * self.scale


class Slotted:
    __slots__ = ("on", "scale")

    def __init__(self) -> None:
        self.on, self.scale = False, 1.0


class Nested:
    def __init__(self) -> None:
        self.inner = Plain()


class Meter:
    """Counts and is told things, none of which a stage's result depends on."""

    def __init__(self) -> None:
        self.runs, self.best = 0, 0.0

    def run(self) -> None:
        self.runs += 1


def branches(s: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(s.lin(x))
    return h.sin().exp() if s.held.on else h


def scales(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x) * s.held.scale)


def scales_by_method(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x) * s.held.factor())


def scales_by_property(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x) * s.held.twice)


def scales_deep(s: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(s.lin(x) * s.held.inner.scale)


def counts(s: Any, x: torch.Tensor) -> torch.Tensor:
    if not ts.recomputing():
        s.held.run()
    return torch.tanh(s.lin(x))


def python_module() -> Any:
    made = types.ModuleType("settings")
    made.__dict__.update(on=False, scale=1.0)
    return made


def own_class() -> Any:
    return type("Settings", (Plain,), {})


CASES: dict[str, tuple[Any, Callable[[], Any], Callable[[Any], object]]] = {
    "flag": (branches, Plain, lambda held: setattr(held, "on", True)),
    "of a slot": (branches, Slotted, lambda held: setattr(held, "on", True)),
    "number": (scales, Plain, lambda held: setattr(held, "scale", 2.0)),
    "of a module of Python": (scales, python_module, lambda held: setattr(held, "scale", 2.0)),
    "of a class": (scales, own_class, lambda held: setattr(held, "scale", 2.0)),
    "of its class": (scales, lambda: own_class()(), lambda held: setattr(type(held), "scale", 2.0)),
    "by a method": (scales_by_method, Plain, lambda held: setattr(held, "scale", 2.0)),
    "by a property": (scales_by_property, Plain, lambda held: setattr(held, "scale", 2.0)),
    "deep": (scales_deep, Nested, lambda held: setattr(held.inner, "scale", 2.0)),
    "another object": (scales_deep, Nested, lambda held: setattr(held, "inner", types.SimpleNamespace(scale=2.0))),
}


def both(front: str, body: Any, make: Callable[[], Any], change: Callable[[Any], object], folder: Path) -> None:
    seen = []
    for by in ("plain", front):
        net, held = net_for(front, body, times=6), make()
        for layer in net.layers:
            layer.held = held  # type: ignore[assignment]
        run = net if by == "plain" else run_of(front, list(net.layers), start(), folder)
        seen.append(dict(observed(run, net, Around(between=functools.partial(change, held)), times=1)))
    assert_same(*seen)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("front", FRONTS)
def test_what_a_stage_reads_is_changed_before_backward(front: str, case: str, tmp_path: Path) -> None:
    body, make, change = CASES[case]
    with pytest.raises(GradientError, match=r"was changed between the call and its backward"):
        both(front, body, make, change, tmp_path)


@pytest.mark.parametrize("front", FRONTS)
def test_what_no_stage_reads_may_change(front: str, tmp_path: Path) -> None:
    both(front, counts, Meter, lambda held: setattr(held, "best", 2.0), tmp_path)
    both(front, scales, Plain, lambda held: setattr(held, "on", True), tmp_path)


@pytest.mark.parametrize("front", FRONTS)
def test_what_holds_the_same_again_is_the_same(front: str, tmp_path: Path) -> None:
    def there_and_back(held: Any) -> None:
        held.scale = 2.0
        held.scale = float("1.0")

    both(front, scales, Plain, there_and_back, tmp_path)
