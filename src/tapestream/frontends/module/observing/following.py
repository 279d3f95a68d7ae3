"""What blocks are given and something else uses later: its gradient is where the gradient of the block's use begins.

Plain autograd adds what reaches a tensor latest use first. The uses inside of a block are one node of the user's graph;
for their sum to go on from that of later uses, these are given what the block hands on in place of the tensor itself.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.frontends.around import uncompiled
from tapestream.frontends.module.homes.between import BetweenBlocks

_DERIVED = frozenset(("T", "mT", "H", "mH", "real", "imag"))  # attributes that are functions of the tensor
# What asks about the graph of the tensor itself, or changes it.
_ITS_OWN = frozenset(
    ("backward", "grad", "register_hook", "register_post_accumulate_grad_hook", "retain_grad", "__setitem__", "__set__",
     "__delete__", "__deepcopy__", "__reduce_ex__")
)  # fmt: skip


@dataclass(slots=True)
class _Noted:
    tensor: weakref.ref[torch.Tensor]
    version: int
    now: torch.Tensor | None
    met: bool

    def stands_for(self, tensor: torch.Tensor) -> bool:
        return self.tensor() is tensor and self.version == tensor._version


class Following(BetweenBlocks):
    """Gives functions between blocks what was noted for their arguments, at any depth of lists and tuples.

    What was changed in place since, what is asked about itself (``retain_grad``, ``register_hook``) or written into
    stays. ``met``: bytes of what was used again, each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met: list[int] = []
        self._noted: dict[int, _Noted] = {}

    def note(self, tensor: torch.Tensor, now: torch.Tensor | None) -> None:
        """A block was given ``tensor``; later uses are of ``now`` (None: as they are). Held as long as ``tensor``."""
        key, noted = id(tensor), self._noted
        before = noted.get(key)
        met = before is not None and before.met and before.stands_for(tensor)
        noted[key] = _Noted(weakref.ref(tensor, lambda _: noted.pop(key, None)), tensor._version, now, met)

    @property
    def held_nbytes(self) -> int:
        """Bytes of all that was used again, which is held until then, and its gradients from there on; once more of the
        largest: that of a block's uses is not added in place."""
        return sum(self.met) + max(self.met, default=0)

    def clear(self) -> None:
        """Nothing is noted."""
        self._noted.clear()

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a use of ``tensor`` is to be given."""
        found = self._noted.get(id(tensor))
        if found is None or not found.stands_for(tensor):
            return tensor
        if not found.met:
            found.met = True
            self.met.append(tensor.nbytes)
        return tensor if found.now is None else found.now

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
