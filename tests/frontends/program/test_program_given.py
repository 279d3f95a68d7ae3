"""What programs are given, in dataclasses too."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tapestream.frontends.program.given import device_of, kind_of


@dataclass
class Pair:
    left: Any
    right: Any


def wrapped(tensor: torch.Tensor, how: str) -> Any:
    return {"bare": tensor, "dataclass": Pair(2, tensor), "nested": {"a": [Pair(Pair(tensor, None), "x")]}}[how]


@pytest.mark.parametrize("how", ["bare", "dataclass", "nested"])
def test_tensors_are_found(how: str) -> None:
    meta = torch.empty(3, device="meta")
    assert device_of(((wrapped(meta, how),), {})) == meta.device
    kinds = {kind_of(wrapped(torch.empty(shape), how)) for shape in ((3,), (4,), (3,))}
    assert len(kinds) == 2
    assert kind_of(wrapped(torch.empty(3), how)) != kind_of(wrapped(torch.empty(3, requires_grad=True), how))


def test_nothing_is_on_the_cpu() -> None:
    assert device_of(((1, Pair(2, "x")), {})) == torch.device("cpu")
    assert kind_of(Pair(1, 2)) != kind_of(Pair(1, 3))  # numbers are parts of shapes
    assert kind_of(Pair) == (type,)
