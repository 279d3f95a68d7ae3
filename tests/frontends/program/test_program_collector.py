"""Python's cycle collector while a program is noted: patient, never off, and afterwards as it was."""

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

import tapestream as ts

USUAL = (700, 10, 10)


@pytest.fixture(autouse=True)
def _threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*USUAL)
    yield
    gc.set_threshold(*before)


def test_it_waits_for_more_inside_and_is_as_before_afterwards() -> None:
    inside = []

    def function(x: torch.Tensor) -> torch.Tensor:
        inside.append(gc.get_threshold())
        return x.sin().cos().sin()

    for planner, usual in (("revolve", []), ("auto", [(700, 10, 10)] * 2)):  # from the second call on nothing is noted
        inside.clear()
        run = ts.Program(function, budget="1MiB", planner=planner)
        for _ in range(3):
            run(torch.ones(3, requires_grad=True)).sum().backward()
        assert inside == [(7000, 10, 10)] * (3 - len(usual)) + usual
    assert gc.get_threshold() == USUAL


def test_as_before_after_an_exception_and_inside_another_program() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        ts.Program(fails)(torch.ones(3, requires_grad=True))
    assert gc.get_threshold() == USUAL
    inner = ts.Program(lambda x: x.sin())
    ts.Program(lambda x: inner(x).cos())(torch.ones(3, requires_grad=True)).sum().backward()
    assert gc.get_threshold() == USUAL


def test_what_the_program_sets_itself_stays() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        gc.set_threshold(900, 5, 5)
        return x.sin()

    ts.Program(function)(torch.ones(3, requires_grad=True))
    assert gc.get_threshold() == (900, 5, 5)


def test_programs_in_several_threads_leave_it_as_it_was() -> None:
    both = threading.Barrier(2, timeout=60)
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        both.wait()
        seen.append(gc.get_threshold())
        both.wait()
        return x.sin()

    def run() -> None:
        ts.Program(function, budget="1MiB")(torch.ones(3, requires_grad=True)).sum().backward()

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [(7000, 10, 10)] * 2
    assert gc.get_threshold() == USUAL


class Cycle:
    def __init__(self) -> None:
        self.own = self


def test_cycles_that_the_program_leaves_are_still_found_while_it_runs() -> None:
    alive: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        left = [weakref.ref(Cycle()) for _ in range(8000)]
        alive.append(sum(one() is not None for one in left))
        return x.sin()

    ts.Program(function)(torch.ones(3, requires_grad=True))
    assert alive[0] < 8000
