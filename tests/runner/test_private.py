"""Objects that blocks may change: what is copied, what is shared, what is put back."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tapestream.capture.python_state import containers_behind
from tapestream.errors import GradientError
from tapestream.runner.private import Before, copies_of, may_change, take_over, tensors_in


@dataclass
class Cache:
    layers: list[dict[str, torch.Tensor]] = field(default_factory=list)
    length: int = 0


class Slotted:
    __slots__ = ("inner", "missing")

    def __init__(self, inner: Any) -> None:
        self.inner = inner


def cache() -> Cache:
    return Cache([{"key": torch.ones(2)}, {"key": torch.zeros(3)}], 2)


@pytest.mark.parametrize("thing", [None, 3, 2.0, "word", torch.float32, torch.nn.Linear(2, 2), len, torch.ones(1), int])
def test_what_cannot_change(thing: Any) -> None:
    assert not may_change(thing)


@pytest.mark.parametrize("thing", [Cache(), [], {}, set(), Slotted(1)])
def test_what_may_change(thing: Any) -> None:
    assert may_change(thing)


def test_every_copy_is_as_before_and_shares_its_tensors() -> None:
    thing = cache()
    before = Before.take([thing, thing], clone=False)
    thing.layers.append({"key": torch.ones(1)})
    thing.layers[0]["key"], thing.length = torch.full((4,), 7.0), 9
    for _ in range(2):
        one, same = before.copies("block 0", clone=False)
        assert one is same
        assert one.length == 2
        assert [layer["key"].shape[0] for layer in one.layers] == [2, 3]
        one.layers.clear()
    assert len(thing.layers) == 3


def test_a_tensor_written_into_is_refused_unless_it_was_cloned() -> None:
    thing = cache()
    shared, cloned = Before.take([thing], clone=False), Before.take([thing], clone=True)
    thing.layers[0]["key"].add_(1)
    with pytest.raises(GradientError, match=r"inside an argument of block 3 was modified.*use_cache=False"):
        shared.copies("block 3", clone=False)
    (copy,) = cloned.copies("block 3", clone=True)
    assert torch.equal(copy.layers[0]["key"], torch.ones(2))
    copy.layers[0]["key"].add_(5)
    (again,) = cloned.copies("block 3", clone=True)
    assert torch.equal(again.layers[0]["key"], torch.ones(2))


def test_a_graph_behind_a_cached_tensor_is_no_obstacle() -> None:
    thing = Cache([{"key": torch.ones(2, requires_grad=True) * 2}])
    (copy,) = Before.take([thing], clone=False).copies("block 0", clone=False)
    assert copy.layers[0]["key"] is thing.layers[0]["key"]


def test_tensors_are_found_everywhere() -> None:
    one, two, three = torch.ones(1), torch.ones(2), torch.ones(3)
    found = tensors_in([Slotted({"a": [one, (two,)]}), Cache([{"key": three}])])
    assert {id(t) for t in found} == {id(one), id(two), id(three)}


def test_an_object_takes_over_what_was_done_to_its_copy() -> None:
    thing, work = cache(), cache()
    work.length, work.layers = 5, []
    take_over(thing, work)
    assert (thing.length, thing.layers) == (5, [])
    container: dict[str, int] = {"a": 1}
    take_over(container, {"b": 2})
    assert container == {"b": 2}


def test_copies_replace_only_what_may_change() -> None:
    tensor, thing = torch.ones(2), cache()
    (other,), options = copies_of(((tensor,), {"cache": thing, "flag": True}))
    assert other is tensor
    assert options["flag"] is True
    assert options["cache"] is not thing
    assert options["cache"].layers[0]["key"] is not thing.layers[0]["key"]


def test_containers_behind_hooks() -> None:
    closed, bound, partial, default = [1], {"a": 1}, {2}, [3]

    class Hook:
        def __init__(self) -> None:
            self.kept = bound

        def look(self, *_: Any) -> None:
            pass

    def plain(*_: Any, more: list[int] = default) -> None:
        closed.append(1)

    def with_default(x: Any, kept: list[int] = default) -> None:
        pass

    found = containers_behind([plain, Hook().look, functools.partial(len, partial), with_default])
    assert {id(c) for c in (closed, bound, partial, default)} <= {id(c) for c in found}
