"""What code reaches without being given it."""

from collections.abc import Callable
from typing import Any

import torch

from tapestream.capture.python_state import things_behind

SCALE = torch.ones(3, requires_grad=True)
OFFSET = torch.zeros(3, requires_grad=True)


def helper(state: torch.Tensor) -> torch.Tensor:
    return state * SCALE


def step(state: torch.Tensor) -> torch.Tensor:
    return helper(state) + OFFSET


def tensors_behind(function: Callable[..., Any]) -> list[torch.Tensor]:
    return things_behind(function, (torch.Tensor,))


def test_tensors_of_helpers_beside_the_step_are_found() -> None:
    assert {id(found) for found in tensors_behind(step)} == {id(SCALE), id(OFFSET)}


def test_a_closure_that_is_not_filled_yet_is_passed_over() -> None:
    def early(state: torch.Tensor) -> torch.Tensor:
        return state * late + OFFSET

    assert [id(found) for found in tensors_behind(early)] == [id(OFFSET)]
    late = SCALE
    assert {id(found) for found in tensors_behind(early)} == {id(late), id(OFFSET)}
