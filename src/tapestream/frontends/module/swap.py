"""The dynamic subclass that a streamed model and its blocks get, and what it refuses by name."""

from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch._compile import _disable_dynamo

from tapestream.errors import InputError

Call = Callable[..., Any]
"""Takes the module, its own ``__call__`` and the arguments."""


class Swaps:
    """Gives modules a subclass of their class: code that looks for classes still finds them.

    Modules of one class share the subclass, so that what is compiled for one block serves all. ``ignored``: names of
    the model's parameters that DistributedDataParallel must leave alone.
    """

    def __init__(self, device: torch.device, ignored: Callable[[], list[str]]) -> None:
        self._device, self._ignored = device, ignored
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
            return call(self, lambda *a, **k: base.__call__(self, *a, **k), *args, **kwargs)

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
            "__module__": base.__module__,
            "__deepcopy__": _refuse_copy,
            "__reduce_ex__": _refuse_copy,
            "_apply": _apply,
            "state_dict": state_dict,
            "_ddp_params_and_buffers_to_ignore": property(self._beside_other_processes),
        }
        return type(base.__name__, (base,), members)

    def _beside_other_processes(self, module: nn.Module) -> list[str]:
        """What DistributedDataParallel, and nobody else, asks a module for.

        Streamed gradients never pass its hooks: fine in one process, wrong in several.
        """
        distributed = torch.distributed
        processes = distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1
        if processes > 1:
            raise InputError(
                f"DistributedDataParallel was asked to average the gradients of a streamed {type(module).__name__} "
                f"over {processes} processes, which it cannot see; use the model without it and average each p.grad "
                "with torch.distributed.all_reduce between backward() and step()"
            )
        return self._ignored()


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
        if type(tensor) is not torch.Tensor or not name.startswith(prefix) or not tensor.numel():
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


def _refuse_change(module: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
    """Moving to where the model computes anyway, in the dtypes that it has, changes nothing; all else is refused."""
    for dtype, dim in {(t.dtype, t.dim()): None for t in (*module.parameters(), *module.buffers())}:
        probe = torch.empty((2,) * dim, dtype=dtype, device=device)
        with torch.no_grad():
            found = fn(probe)
        if found is not probe or (found.is_cpu and found.untyped_storage().is_shared()):
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
