"""Bytes of tensors that a run has left, in attributes, containers, objects and functions: until the next run replaces
them."""

import types
from collections.abc import Sequence

import numpy
import torch
from torch import nn

from tapestream.capture.python_state import GENERATORS, walk
from tapestream.runner.belongings import Change
from tapestream.runner.private import tensors_in
from tapestream.runner.state import storages


def left_by(changes: Sequence[Change]) -> tuple[tuple[tuple[int, str], int], ...]:
    """By where they are. Of one in another object that each run makes anew (a list), or in a variable of a function,
    there are three: a `tapestream.runner.stills.Look` at the first run has its own, and the look before the last
    recompute has the one that this recompute replaces."""
    found = dict[tuple[int, str], int]()
    for change in changes:
        if change.key is not None or not isinstance(change.holder, (torch.Tensor, numpy.ndarray, *GENERATORS)):
            now = change.now()
            one = isinstance(now, torch.Tensor) and not isinstance(change.holder, (types.FunctionType, types.CellType))
            once = change.key is None or isinstance(change.holder, dict) or one
            found[id(change.holder), str(change.key)] = _nbytes_of(change) * (1 if once else 3)
    return tuple((place, nbytes) for place, nbytes in found.items() if nbytes)


def _nbytes_of(change: Change) -> int:
    known, now = change.were_there(), change.now()
    things = [thing for thing in walk([now, *tensors_in([now])]) if id(thing) not in known]
    tensors = [t for t in things if isinstance(t, torch.Tensor) and not isinstance(t, nn.Parameter)]
    return sum(a.nbytes for a in things if isinstance(a, numpy.ndarray)) + sum(storages(tensors).values())
