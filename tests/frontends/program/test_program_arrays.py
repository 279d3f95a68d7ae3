"""Arrays and buffers that a program gives to torch and writes into later: exact, or refused where it runs again."""

import array
import ctypes
import mmap
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from side_by_side import compare, least
from torch import nn

from tapestream.errors import GradientError
from tapestream.frontends.program.program import Program

torch.manual_seed(0)
W, X = nn.Parameter(torch.randn(16, 16) / 4), torch.randn(8, 16).requires_grad_()
REAL, TURNED, ODD = numpy.full(16, 1.5, dtype=numpy.float32), numpy.arange(16)[::-1], numpy.arange(16) % 2 == 1
Body = Callable[[torch.Tensor], torch.Tensor]


def given() -> tuple[torch.Tensor]:
    return (X * 1.0,)


def often(body: Body) -> Body:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(body(x @ W))
        return x

    return program


def index(x: torch.Tensor) -> torch.Tensor:
    at = TURNED.copy()
    x = x[:, at]
    at[:] = 0
    return x


def index_in_a_list(x: torch.Tensor) -> torch.Tensor:
    at = [numpy.arange(8), numpy.arange(8)]
    x = x * x[tuple(at)].unsqueeze(1)  # type: ignore[index]
    at[0][:] = 0
    return x


def index_written_to(x: torch.Tensor) -> torch.Tensor:
    at, y = numpy.array([1, 2]), x.clone()
    y[at] = x[at] * 2
    at[:] = 0
    return y


def mask(x: torch.Tensor) -> torch.Tensor:
    odd, y = ODD.copy(), x.clone()
    y[:, odd] = 0.0
    odd[:] = True
    return y


def index_made_of_an_array(x: torch.Tensor) -> torch.Tensor:
    at = TURNED.copy()
    x = x[:, torch.from_numpy(at)]
    at[:] = 0
    return x


def factor(x: torch.Tensor) -> torch.Tensor:
    scale = REAL.copy()
    x = x * torch.as_tensor(scale)
    scale *= 0.5
    return x


def used_twice(x: torch.Tensor) -> torch.Tensor:
    term = REAL.copy()
    shown = torch.asarray(term)
    x = x + shown
    term *= 0.5
    return x + shown


def used_after_the_write(x: torch.Tensor) -> torch.Tensor:
    term = bytearray(REAL.tobytes())
    shown = torch.frombuffer(term, dtype=torch.float32)
    term[:32] = bytes(32)
    return x + shown


def a_view_after_the_write(x: torch.Tensor) -> torch.Tensor:
    term = numpy.stack([REAL, REAL])
    shown = torch.from_dlpack(term)[0]
    term *= 0.5
    return x + shown


def a_tensor_shown_by_dlpack(x: torch.Tensor) -> torch.Tensor:
    term = torch.full((16,), 1.5)
    shown = torch.utils.dlpack.from_dlpack(term)
    x = x + shown
    term.mul_(0.5)
    return x + shown


@pytest.mark.parametrize(
    "body",
    [index, index_in_a_list, index_written_to, mask, index_made_of_an_array, factor, used_twice, used_after_the_write,
     a_view_after_the_write, a_tensor_shown_by_dlpack],
)  # fmt: skip
def test_what_backward_would_see_changed_is_refused_where_it_runs_again(body: Body) -> None:
    program = often(body)
    tight = Program(program, budget=least(program, [W, X], given, 0), planner="revolve")

    def twice() -> None:
        for _ in range(2):  # the second call follows a plan, by which all runs again
            tight(*given()).sum().backward()

    with pytest.raises(GradientError, match=r"was written into (afterwards|inside the program through NumPy)"):
        twice()
    compare(program, [W, X], given, "1MiB", planner="auto", reruns=False)


def _mapped() -> mmap.mmap:
    memory = mmap.mmap(-1, REAL.nbytes)
    memory[:] = REAL.tobytes()
    return memory


BUFFERS: list[tuple[Callable[[], Any], Callable[[Any], torch.Tensor]]] = [
    (REAL.copy, lambda one: torch.from_numpy(one)),
    (REAL.copy, lambda one: torch.from_dlpack(one)),
    (REAL.copy, torch.tensor),
    (lambda: array.array("f", REAL.tolist()), lambda one: torch.tensor(memoryview(one))),
    (lambda: bytearray(REAL.tobytes()), lambda one: torch.frombuffer(one, dtype=torch.float32)),
    (lambda: bytearray(REAL.tobytes()), lambda one: torch.frombuffer(memoryview(one), dtype=torch.float32)),
    (lambda: (ctypes.c_float * 16)(*REAL.tolist()), lambda one: torch.frombuffer(one, dtype=torch.float32)),
    (_mapped, lambda one: torch.frombuffer(one, dtype=torch.float32)),
    (REAL.tolist, torch.tensor),
]


def test_a_function_with_a_name_of_its_own_is_not_heard_and_a_write_into_its_array_refused() -> None:
    show = torch.from_numpy  # taken out of torch before the program runs

    def body(x: torch.Tensor) -> torch.Tensor:
        term = REAL.copy()
        x = x + show(term)
        term[0] = 7
        return x

    with pytest.raises(GradientError, match="written into afterwards"):
        compare(often(body), [W, X], given)


@pytest.mark.parametrize(("make", "show"), BUFFERS)
def test_what_backward_does_not_need_may_be_written_into(
    make: Callable[[], Any], show: Callable[[Any], torch.Tensor]
) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        term = make()
        x = x + show(term)  # a sum saves none of its terms
        term[0] = type(term[0])(7)
        return x

    found = compare(often(body), [W, X], given)
    assert found.report is not None
    assert found.report.reruns > 0


def test_numbers_of_numpy_and_lists_as_index() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        at = [0, 1, 2, 3, 4, 5, 6, 7]
        x = x[at[::-1]] * x[numpy.int64(2)] * numpy.float64(0.9)  # type: ignore[index]
        at[0] = 5
        return x

    found = compare(often(body), [W, X], given)
    assert found.report is not None
    assert found.report.reruns > 0
