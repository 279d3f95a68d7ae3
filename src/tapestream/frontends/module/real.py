"""Making modules that lie on the meta device real, piece by piece, with their saved or with fresh weights."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.weights import Weights


class Maker:
    """Gives the modules of ``model`` their bytes: what is on meta is made, then filled from ``weights``.

    Without ``weights``, and for buffers that these do not hold, the model's own code initialises: the ``initialize()``
    of a block or model, the ``_init_weights(module)`` of the nearest Hugging Face model around a module, or the
    module's ``reset_parameters()``.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], weights: Weights | None) -> None:
        self._model, self._weights = model, weights
        inside = {id(m) for block in blocks for m in block.modules()}
        self._outside = [m for m in model.modules() if id(m) not in inside]
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of what was on meta, which is kept too
        self._owner: dict[int, nn.Module] = {}  # by id of a module, the nearest around it that initialises others
        for module in model.modules():  # parents come before their children
            if callable(getattr(module, "_init_weights", None)):
                self._owner |= {id(below): module for below in module.modules()}

    def outside(self, device: torch.device) -> None:
        """Everything outside the blocks, on ``device``."""
        made = self._real(self._outside, device)
        for module in self._outside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
        self._fill(self._model, self._outside, made)

    def block(self, block: nn.Module, device: torch.device) -> None:
        """One block: parameters where they are, or in RAM if they were on meta, buffers on ``device``."""
        modules = list(block.modules())
        made = self._real(modules, torch.device("cpu"))
        self._fill(block, modules, made)
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def _real(self, modules: Iterable[nn.Module], device: torch.device) -> list[nn.Module]:
        """Give every tensor on meta bytes of undefined content; returns the modules that had any."""
        found = []
        for module in modules:
            on_meta = [one for one in _own(module) if one[2].is_meta]
            for tensors, name, tensor in on_meta:
                if id(tensor) not in self._made:
                    real: torch.Tensor = torch.empty_like(tensor.detach(), device=device)
                    if isinstance(tensor, nn.Parameter):
                        real = nn.Parameter(real, tensor.requires_grad)
                    self._made[id(tensor)] = tensor, real
                tensors[name] = self._made[id(tensor)][1]
            if on_meta:
                found.append(module)
        return found

    def _fill(self, owner: nn.Module, modules: Sequence[nn.Module], made: Sequence[nn.Module]) -> None:
        if self._weights is None:
            self._initialize(owner, made)
            return
        lacking = [(m, name) for m in made for name in m._buffers if not self._weights.holds(m, name)]
        before = {(id(m), name): m._buffers[name] for m, name in lacking}
        versions = {key: buffer._version for key, buffer in before.items() if buffer is not None}
        self._initialize(owner, list({id(m): m for m, _ in lacking}.values()))
        for m, name in lacking:
            key, buffer = (id(m), name), m._buffers[name]
            if buffer is not None and buffer is before[key] and buffer._version == versions[key]:
                raise InputError(
                    f"buffer {name!r} of a {type(m).__name__} is not in the weights and the model's own code does not "
                    f"fill it; give {type(m).__name__} a reset_parameters() that does, or make it on a real device"
                )
        self._weights.fill(modules)

    def _initialize(self, owner: nn.Module, modules: Sequence[nn.Module]) -> None:
        initialize = getattr(owner, "initialize", None)
        if modules and callable(initialize):
            initialize()
            return
        for module in modules:
            around = self._owner.get(id(module))
            reset = getattr(module, "reset_parameters", None)
            if around is not None:
                around._init_weights(module)  # type: ignore[operator]
            elif callable(reset):
                reset()
            else:
                raise InputError(
                    f"{type(module).__name__} was made on the meta device and cannot be initialised: give "
                    f"{type(owner).__name__} an initialize() method, or make the model on a real device"
                )


def _own(module: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """A module's own parameters and buffers, and where it keeps them."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name, tensor) for name, tensor in list(tensors.items()) if tensor is not None)  # type: ignore[misc]
