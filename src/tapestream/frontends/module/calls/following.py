"""What blocks are given and something else uses later: its gradient is where the gradient of the block's use begins.

Plain autograd adds what reaches a tensor latest use first. The uses inside of a block are one node of the user's graph;
for their sum to go on from that of later uses, these are given what the block hands on in place of the tensor itself.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.frontends.module.homes.between import BetweenBlocks, is_about_itself
from tapestream.frontends.module.work.tracing import Tracing

WRITTEN = "changed in place; its views would not see that: write into a clone() of it"
_NUMBERS = frozenset(("__index__", "__int__", "__invert__"))  # that change nothing, unlike __iadd__


@dataclass(slots=True)
class _Noted:
    """``version``: of the tensor, then; ``given``: there are views of ``now``."""

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

    What was changed before that, what is asked about itself (``retain_grad``, ``register_hook``) or written into stays,
    and so does what compiled code uses. It begins behind the first block.
    """

    def __init__(self, trace: Tracing | None) -> None:
        """``trace``: what traces the functions (None: nobody)."""
        super().__init__()
        self._trace = trace
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
        if found is None or found.version != tensor._version or not tensor.requires_grad:
            return tensor
        return found.now if tensor.data_ptr() == found.now.data_ptr() else tensor

    def check(self) -> None:
        """Raise InputError where something was changed in place after it, or a view of it, was used again."""
        if self._changed or any(found.changed for found in self._noted.values()):
            raise InputError(f"a tensor given to a block, and used by other code after the block, was then {WRITTEN}")

    def end(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        """Nothing is noted any more. Returns what is to stay as it is until its gradient has been made, and its
        version."""
        held = ((found.tensor(), found.version) for found in self._noted.values() if found.given)
        given = [(weakref.ref(tensor), version) for tensor, version in held if tensor is not None]
        self._noted.clear()
        return given

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

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling() or self.asleep or not self._noted or is_about_itself(func):
            return self._run(func, args, kwargs)
        given: dict[int, torch.Tensor] = {}
        written = _writes(func) or kwargs.get("inplace") is True
        own = {"out", "input", "self"} if written else {"out"}
        first = args[: int(written)]
        named = {name: value if name in own else self._in(value, given) for name, value in kwargs.items()}
        result = self._run(func, (*first, *(self._in(value, given) for value in args[len(first) :])), named)
        return self._out(result, given) if given else result

    def _run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs) if self._trace is None or self.asleep else self._trace.run(func, args, kwargs)

    def _in(self, value: Any, given: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, torch.Tensor):
            now = self.current(value)
            if now is not value:
                given[id(now)] = value
            return now
        if type(value) in (list, tuple):
            return type(value)(self._in(one, given) for one in value)
        return value

    def _out(self, result: Any, given: dict[int, torch.Tensor]) -> Any:
        """What has done nothing gives back what it was given; views are kept in mind."""
        if type(result) in (list, tuple):
            return type(result)(self._out(one, given) for one in result)
        if not isinstance(result, torch.Tensor):
            return result
        base = given.get(id(result._base)) if result._is_view() else None
        if base is not None:
            self._noted[id(base)].given = True
        return given.get(id(result), result)


def _writes(func: Any) -> bool:
    """Whether it changes its first argument."""
    name = getattr(func, "__name__", "").partition(".")[0]
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NUMBERS)
    return bool(name.endswith("_"))
