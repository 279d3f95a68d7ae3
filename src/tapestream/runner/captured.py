"""What a function reads besides its arguments: what it closes over, its defaults, the globals that its code names; and
functions one after the other, which read what each of them does."""

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch


def cell_contents(function: Any) -> Iterator[Any]:
    """What a function closes over, and its default arguments."""
    for cell in (*(function.__closure__ or ()),):
        try:
            yield cell.cell_contents
        except ValueError:  # a closure cell that is not filled yet
            continue
    yield from function.__defaults__ or ()


@functools.lru_cache(1024)
def globals_named(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function's code reads, each once."""
    return tuple({one.argval: None for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")})


def leaves_captured(function: Any) -> list[torch.Tensor]:
    """Tensors that a function closes over and that may get a ``.grad``, parameters of modules aside."""
    found = cell_contents(function) if inspect.isfunction(function) else ()
    return [one for one in found if isinstance(one, torch.Tensor) and one.is_leaf and one.requires_grad]


class InTurn:
    """Functions from state to state, one after the other."""

    def __init__(self, functions: Sequence[Callable[[Any], Any]]) -> None:
        self.functions = tuple(functions)

    def __call__(self, state: Any) -> Any:
        """The last one's result."""
        for function in self.functions:
            state = function(state)
        return state
