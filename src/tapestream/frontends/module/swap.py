"""The dynamic subclass that a streamed model and its blocks get, and what it refuses by name."""

import functools
import types
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tapestream.errors import InputError

Call = Callable[..., Any]
"""Takes the module, its own ``__call__`` or ``forward`` and the arguments."""

_RUNNING: set[int] = set()
"""Ids of modules whose own ``__call__`` or ``forward`` runs: a ``forward`` that is called then is that one's."""


class Swaps:
    """Gives modules a subclass of their class: code that looks for classes still finds them.

    A ``forward`` that is called directly is a call as well, of that and without hooks. Modules of one class share the
    subclass, so that what is compiled for one block serves all. ``ignored``: of a module, names of the parameters that
    DistributedDataParallel must leave alone; nobody else asks for them. ``together``: ranks train the model together
    without it, which accelerate is told.
    """

    def __init__(
        self, device: torch.device, ignored: Callable[[nn.Module], list[str]], *, together: bool = False
    ) -> None:
        self._device, self._ignored, self._together = device, ignored, together
        self._made: dict[tuple[type[nn.Module], Call], type[nn.Module]] = {}

    def swap(self, module: nn.Module, call: Call) -> None:
        """From now on ``call`` is what calling ``module`` does."""
        key = type(module), call
        if key not in self._made:
            self._made[key] = self._subclass(*key)
        module.__class__ = self._made[key]

    def _subclass(self, base: type[nn.Module], call: Call) -> type[nn.Module]:
        device = self._device

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                _refuse_compilation(self)
            return call(self, lambda *a, **k: _run(self, base.__call__, a, k), *args, **kwargs)

        @functools.wraps(base.forward)
        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or id(self) in _RUNNING:
                return base.forward(self, *args, **kwargs)
            return call(self, lambda *a, **k: _run(self, base.forward, a, k), *args, **kwargs)

        def _apply(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
            _refuse_change(self, fn, device)
            return self

        def state_dict(self: nn.Module, *args: Any, **kwargs: Any) -> dict[str, Any]:
            before = len(kwargs.get("destination") or ())
            found: dict[str, Any] = base.state_dict(self, *args, **kwargs)
            # Its own are the last ones; a scan of all, at each of many blocks, would take longer than saving.
            new = islice(reversed(found), len(found) - before) if len(found) > before else found
            _part({name: found[name] for name in new}, kwargs.get("prefix", ""))
            return found

        members: dict[str, Any] = {
            "__call__": __call__,
            "forward": _Forward(base.forward, forward),
            "__module__": base.__module__,
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_copy,
            "_replicate_for_data_parallel": _refuse_copies,
            "_apply": _apply,
            "state_dict": state_dict,
            "_ddp_params_and_buffers_to_ignore": property(self._ignored),
            **({"_is_accelerate_prepared": True} if self._together else {}),
        }
        return type(base.__name__, (base,), members)


def own_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calling a swapped module did before."""
    return _run(module, class_of(module).__call__, args, kwargs)


def _run(module: nn.Module, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Its own ``__call__`` or ``forward``."""
    if id(module) in _RUNNING:
        return function(module, *args, **kwargs)
    _RUNNING.add(id(module))
    try:
        return function(module, *args, **kwargs)
    finally:
        _RUNNING.discard(id(module))


class _Forward:
    """The ``forward`` of a swapped module. Its class shows what the user wrote: who reads code reads that."""

    def __init__(self, own: Callable[..., Any], called: Callable[..., Any]) -> None:
        self._own, self._called = own, called

    def __get__(self, module: nn.Module | None, _: type | None = None) -> Callable[..., Any]:
        return self._own if module is None else types.MethodType(self._called, module)


def swap_back(module: nn.Module) -> None:
    """Undo `Swaps.swap`."""
    module.__class__ = class_of(module)


def class_of(module: nn.Module) -> type[nn.Module]:
    """The class that a swapped module had before."""
    base: type[nn.Module] = type(module).__mro__[1]
    return base


def _part(tensors: dict[str, Any], prefix: str) -> None:
    """Give every view of a block's bytes a storage that ends where it does.

    Who saves tensors that share a storage writes or copies the whole of it, be it for one of them (`torch.save`,
    safetensors, Hugging Face's ``save_pretrained``). Those of tied parameters get one, which is saved once. Version
    counters stay those of the parameters.
    """
    parts: dict[tuple[int, int], torch.UntypedStorage] = {}
    for name, tensor in tensors.items():
        own = type(tensor) is torch.Tensor and tensor.layout is torch.strided and name.startswith(prefix)
        if not own or not tensor.numel():
            continue
        storage, first = tensor.untyped_storage(), tensor.storage_offset() * tensor.itemsize
        reach = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        nbytes = reach * tensor.itemsize
        key = tensor.data_ptr(), nbytes
        if key not in parts:
            parts[key] = storage[first : first + nbytes] if nbytes < storage.nbytes() else storage
        if parts[key] is not storage:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = empty.set_(parts[key], 0, tensor.shape, tensor.stride())


def _refuse_copy(self: nn.Module, *_: Any) -> Any:
    raise InputError(
        f"a streamed model or block of one cannot be copied or pickled (this {type(self).__name__}): the copy would "
        "share its bytes. Copy or save state_dict(), make the copy before stream() (an averaged model made then can "
        "be updated from the streamed one), or call tapestream.unstream(model) first"
    )


def _refuse_copies(self: nn.Module) -> Any:
    raise InputError(
        f"DataParallel was asked to copy a streamed {type(self).__name__} to several devices, but one process streams "
        "to one device: leave DataParallel out"
    )


def _refuse_change(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Moving to where the model computes anyway, in the dtypes that it has, changes nothing; all else is refused."""
    for dtype, dim in {(t.dtype, t.dim()): None for t in (*module.parameters(), *module.buffers())}:
        probe = torch.full((2,) * dim, 5 / 3, device=device).to(dtype)
        with torch.no_grad():
            found = fn(probe)
        if not _is_same(found, probe) or (found.is_cpu and found.untyped_storage().is_shared()):
            raise InputError(
                f"to(), half(), cpu() or the like was asked to turn tensors of {dtype} on {device} of a streamed "
                f"{type(module).__name__} into {found.dtype} on {found.device}, but streaming fixes both: convert the "
                "model before stream(), or call tapestream.unstream(model) first"
            )


@_disable_dynamo  # imports the compiler when it is called, not before
def _refuse_compilation(module: nn.Module) -> None:
    raise InputError(
        f"torch.compile was asked to compile code that calls a streamed {type(module).__name__}, where weights come "
        "and go; compile each block instead: `for block in blocks: block.compile()`, before or after stream()"
    )


def _is_same(found: torch.Tensor, probe: torch.Tensor) -> bool:
    """Whether nothing has changed: "cpu:0" is the CPU, though PyTorch copies what is moved there."""
    if found is probe or not (found.is_cpu and probe.is_cpu):
        return found is probe
    alike = found.dtype == probe.dtype and found.stride() == probe.stride() and found.layout == probe.layout
    return alike and found.requires_grad == probe.requires_grad and torch.equal(found, probe)
