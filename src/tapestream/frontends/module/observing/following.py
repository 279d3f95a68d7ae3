"""What blocks are given and something else uses later: its gradient is where the gradient of the block's use begins.

Plain autograd adds what reaches a tensor latest use first. The uses inside of a block are one node of the user's graph;
for their sum to go on from that of later uses, these are given what the block hands on in place of the tensor itself.
"""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import Node, get_gradient_edge

from tapestream.errors import InputError
from tapestream.frontends.around import uncompiled
from tapestream.frontends.module.homes.between import BetweenBlocks
from tapestream.runner.graph import edges_behind

Edge: TypeAlias = tuple[Node, int]

_DERIVED = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # attributes that are functions of the tensor
WRITTEN = "changed in place; views of it would not know: write into a clone() of it"
# What asks about the graph of the tensor itself, or changes it.
_ITS_OWN = frozenset(
    ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__setitem__", "__set__",
     "__delete__", "__deepcopy__", "__reduce_ex__")
)  # fmt: skip


class Reused:
    """Tells of an observed call, by its graph, which tensors something else uses than the blocks that were given them.

    That graph ends at each block. ``met``: by edge, the bytes of what is used so.
    """

    def __init__(self) -> None:
        self.met: dict[Edge, int] = {}
        self._noted: dict[Edge, int] = {}

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """A block was given these."""
        self._noted.update((_edge_of(t), t.nbytes) for t in tensors if t.requires_grad)

    def look(self, tensors: Sequence[torch.Tensor]) -> None:
        """All that was made since the last block is behind these."""
        for edge in edges_behind(tensors):
            self._meet(edge)

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor``, which the first block of a chain is given."""
        if tensor.requires_grad:
            self._meet(_edge_of(tensor))
        return tensor

    @property
    def held_nbytes(self) -> int:
        """Bytes of all that is used again, which is held until then, and its gradients from there on; once more of the
        largest: that of a block's uses is not added in place."""
        return sum(self.met.values()) + max(self.met.values(), default=0)

    def _meet(self, edge: Edge) -> None:
        if edge in self._noted:
            self.met[edge] = self._noted[edge]


@dataclass(slots=True)
class _Noted:
    """``version``: of the tensor, then; ``given``: later uses were given ``now``, of which there may be views."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    now: torch.Tensor
    given: bool

    @property
    def changed(self) -> bool:
        """Whether something was written into both, of which one alone knows."""
        return self.given and self.now._version != self.version


class Following(BetweenBlocks):
    """Gives functions between blocks what was noted for their arguments, at any depth of lists and tuples.

    What was changed in place before that, what is asked about itself (``retain_grad``, ``register_hook``) or written
    into stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changed = False
        self._noted: dict[int, _Noted] = {}

    def note(self, tensor: torch.Tensor, now: torch.Tensor) -> None:
        """A block was given ``tensor``; later uses are of ``now``. Held as long as ``tensor``."""
        key, before = id(tensor), self._known(tensor)
        reference = weakref.ref(tensor, lambda _: self._drop(key))
        self._noted[key] = _Noted(reference, tensor._version, now, before is not None and before.given)

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a use of ``tensor`` is to be given. Raises InputError as `check`."""
        found = self._known(tensor)
        if found is None or found.version != tensor._version:
            return tensor
        found.given = True
        return found.now

    def check(self) -> None:
        """Raise InputError where something was changed in place after it, or a view of it, was used again."""
        if self._changed or any(found.changed for found in self._noted.values()):
            raise InputError(
                f"a tensor that a block was given, and other code used after the block, was then {WRITTEN}"
            )

    @property
    def given(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        """What is to stay as it is until its gradient has been made, and its version."""
        held = ((found.tensor(), found.version) for found in self._noted.values() if found.given)
        return [(weakref.ref(tensor), version) for tensor, version in held if tensor is not None]  # free of this object

    def _known(self, tensor: torch.Tensor) -> _Noted | None:
        found = self._noted.get(id(tensor))
        if found is None or found.tensor() is not tensor:
            return None
        if found.changed:
            self.check()
        return found

    def _drop(self, key: int) -> None:
        found = self._noted.pop(key)
        self._changed = self._changed or found.changed

    @uncompiled
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.asleep or not self._noted or _is_about_itself(func):
            return func(*args, **kwargs)
        named = {name: value if name == "out" else self._in(value) for name, value in kwargs.items()}
        return func(*map(self._in, args), **named)

    def _in(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.current(value)
        if type(value) in (list, tuple):
            return type(value)(map(self._in, value))
        return value


def _is_about_itself(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return getattr(func.__self__, "__name__", "") not in _DERIVED
    if name.startswith("__i"):
        return name not in ("__index__", "__int__", "__invert__")
    return name in _ITS_OWN or (name.endswith("_") and not name.endswith("__"))


def _edge_of(tensor: torch.Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
