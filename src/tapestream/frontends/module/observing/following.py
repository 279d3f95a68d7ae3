"""What blocks are given and something else uses later: its gradient is where the gradient of the block's use begins.

Plain autograd adds what reaches a tensor latest use first. The uses inside of a block are one node of the user's graph;
for their sum to go on from that of later uses, these are given what the block hands on in place of the tensor itself.
"""

import weakref
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


class Following(BetweenBlocks):
    """Gives functions between blocks what was noted for their arguments, at any depth of lists and tuples.

    What was changed in place since, what is asked about itself (``retain_grad``, ``register_hook``) or written into
    stays. ``met``: something noted was used.
    """

    def __init__(self) -> None:
        super().__init__()
        self.met = False
        self._noted: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor | None]] = {}

    def note(self, tensor: torch.Tensor, now: torch.Tensor | None) -> None:
        """A block was given ``tensor``; later uses are of ``now`` (None: as they are). Held as long as ``tensor``."""
        key, noted = id(tensor), self._noted
        noted[key] = weakref.ref(tensor, lambda _: noted.pop(key, None)), tensor._version, now

    def clear(self) -> None:
        """Nothing is noted."""
        self._noted.clear()

    def current(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a use of ``tensor`` is to be given."""
        reference, version, now = self._noted.get(id(tensor), (None, 0, None))
        if reference is None or reference() is not tensor or tensor._version != version:
            return tensor
        self.met = True
        return tensor if now is None else now

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
