"""Making modules that lie on the meta device real, piece by piece, with their saved or with fresh weights."""

import contextlib
import warnings
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.homes.weights import Weights

Place: TypeAlias = tuple[nn.Module, dict[str, torch.Tensor | None], str]
"""A module, its parameters or buffers, and a name there."""


class Maker:
    """Gives the modules of ``model`` their bytes: what is on meta is made, then filled from ``weights``.

    Without ``weights``, and for what these do not hold, the model's own code initialises: the ``initialize()``
    of a block or model, the ``_init_weights(module)`` of the nearest Hugging Face model around a module, or the
    module's ``reset_parameters()``; children come before their parents, as in transformers. What has values keeps
    them.

    Raises InputError where nothing says that the weights are to be drawn: a part of the model alone is on meta, or
    hooks of accelerate have them elsewhere.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module], weights: Weights | None) -> None:
        self._model, self._weights = model, weights
        self._drawn: list[str] = []  # classes whose weights were drawn by code that other uses have, too
        _check_hollow(model, weights is not None)
        inside = {id(m) for block in blocks for m in block.modules()}
        self._outside = [m for m in _children_first(model) if id(m) not in inside]
        self._made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by id of what was on meta, which is kept too
        self._owner: dict[int, nn.Module] = {}  # by id of a module, the nearest around it that initialises others
        for module in model.modules():  # parents come before their children
            if callable(getattr(module, "_init_weights", None)):
                self._owner |= {id(below): module for below in module.modules()}

    def outside(self, device: torch.device, *, reads: bool = True) -> None:
        """Everything outside the blocks, on ``device``. ``reads``: or leave what the weights hold as it is, for others
        to fill."""
        made = self._real(self._outside, device)
        for module in self._outside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)  # type: ignore[no-untyped-call]
        self._fill(self._model, self._outside, made, reads=reads)

    def block(self, block: nn.Module, device: torch.device, *, reads: bool = True) -> None:
        """One block: parameters where they are, or in RAM if they were on meta, buffers on ``device``. ``reads``: as
        for `outside`."""
        modules = _children_first(block)
        made = self._real(modules, torch.device("cpu"))
        self._fill(block, modules, made, reads=reads)
        for module in modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)

    def tell(self) -> None:
        """Warn where weights were drawn that a file might have been meant for."""
        if self._drawn and self._weights is None:
            classes = dict.fromkeys(self._drawn)
            warnings.warn(
                f"this {type(self._model).__name__} lay on the meta device and no weights= were given, so "
                f"reset_parameters() or _init_weights() drew them anew, for {len(self._drawn)} modules "
                f"({', '.join(classes)}); for saved weights, give stream(..., weights=) their files",
                stacklevel=5,
            )

    def _real(self, modules: Iterable[nn.Module], device: torch.device) -> list[Place]:
        """Give every tensor on meta bytes of undefined content; returns where these are."""
        found = []
        for module in modules:
            for tensors, name, tensor in _own(module):
                if tensor.is_meta:
                    if id(tensor) not in self._made:
                        real: torch.Tensor = torch.empty_like(tensor.detach(), device=device)
                        if isinstance(tensor, nn.Parameter):
                            real = nn.Parameter(real, tensor.requires_grad)
                        self._made[id(tensor)] = tensor, real
                    tensors[name] = self._made[id(tensor)][1]
                    found.append((module, tensors, name))
        return found

    def holds(self, module: nn.Module, name: str) -> bool:
        """Whether the weights have this tensor of this module."""
        return self._weights is not None and self._weights.holds(module, name)

    def _fill(self, owner: nn.Module, modules: Sequence[nn.Module], made: Sequence[Place], *, reads: bool) -> None:
        weights = self._weights
        lacking = [
            (module, name, tensor, tensor._version)
            for module, tensors, name in made
            if (tensor := tensors[name]) is not None and not self.holds(module, name)
        ]
        self._initialize(owner, modules, {id(tensor): module for module, _, tensor, _ in lacking})
        if weights is None:
            return
        for module, name, tensor, version in lacking:
            if tensor._version == version and any(tensor is one for _, _, one in _own(module)):
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                raise InputError(
                    f"{kind} {name!r} of a {type(module).__name__} is not in the weights and the model's own code does "
                    f"not fill it; give {type(module).__name__} a reset_parameters() that does, or make it on a real "
                    "device"
                )
        if reads:
            weights.fill(modules)

    def _initialize(self, owner: nn.Module, modules: Sequence[nn.Module], lacking: Mapping[int, nn.Module]) -> None:
        """``lacking``: the modules of tensors to be initialised, by these tensors' ids."""
        made = {id(real) for _, real in self._made.values()}
        initialize = getattr(owner, "initialize", None)
        if lacking and callable(initialize):
            with _kept(owner.modules(), made):
                initialize()
            return
        ids = {id(module) for module in lacking.values()}
        with _initialized(one for m in owner.modules() for _, _, one in _own(m) if id(one) not in lacking):
            for module in modules:
                around = self._owner.get(id(module))
                if around is not None and any(id(below) in ids for below in module.modules()):
                    around._init_weights(module)  # type: ignore[operator]  # it may be about what is below
                elif around is None and id(module) in ids:
                    with _kept([module], made):
                        self._reset(owner, module)
                if id(module) in ids and _draws(module, lacking):
                    self._drawn.append(type(module).__name__)

    def _reset(self, owner: nn.Module, module: nn.Module) -> None:
        reset = getattr(module, "reset_parameters", None)
        if not callable(reset):
            raise InputError(
                f"{type(module).__name__} was made on the meta device and cannot be initialised: give "
                f"{type(owner).__name__} an initialize() method, or make the model on a real device"
            )
        reset()


def _check_hollow(model: nn.Module, weights: bool) -> None:
    """Raise InputError where what is on meta is not to be drawn."""
    hollow, real = list[str](), list[str]()
    for prefix, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or name in module._non_persistent_buffers_set or not tensor.numel():
                continue
            if tensor.is_meta:
                hollow.append(f"{prefix}.{name}" if prefix else name)
            elif name in module._parameters:
                real.append(f"{prefix}.{name}" if prefix else name)
    if not hollow:
        return
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise InputError(
            f"{len(hollow)} tensors of this {type(model).__name__} ({hollow[0]!r} first) are away, in the care of "
            "accelerate's hooks (device_map=, cpu_offload, disk_offload), which bring them while their module runs; "
            "load the model without these, or make it on the meta device and give stream(..., weights=) its files: "
            "streaming keeps weights in RAM or on disk by itself"
        )
    if real and not weights:
        raise InputError(
            f"{len(hollow)} tensors of this {type(model).__name__} ({hollow[0]!r} first) are on the meta device, while "
            f"{len(real)} parameters ({real[0]!r} first) have values: a loader has left them out, or hooks bring them "
            "in a call. Load all of them; or give stream(..., weights=) the files of all; or, to draw all anew, make "
            "the whole model on meta"
        )


@contextlib.contextmanager
def _kept(modules: Iterable[nn.Module], made: Container[int]) -> Iterator[None]:
    """Inside, code that fills whole modules may overwrite what had values; these come back."""
    had = {id(t): t for module in modules for _, _, t in _own(module) if id(t) not in made}
    copies = {key: t.detach().clone() for key, t in had.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for key, tensor in had.items():
                tensor.copy_(copies[key])


def _draws(module: nn.Module, lacking: Container[int]) -> bool:
    """Whether any of its own tensors that ``state_dict()`` has is one of those ``lacking`` (ids)."""
    unsaved = module._non_persistent_buffers_set
    return any(id(t) in lacking for held, n, t in _own(module) if held is module._parameters or n not in unsaved)


@contextlib.contextmanager
def _initialized(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, transformers leaves ``tensors`` as they are, and draws no random numbers for them."""
    marked = [t for t in {id(t): t for t in tensors}.values() if not hasattr(t, "_is_hf_initialized")]
    for tensor in marked:
        tensor._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for tensor in marked:
            del tensor._is_hf_initialized  # type: ignore[attr-defined]


def _children_first(module: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    nn.Module.apply(module, found.append)
    return list(dict.fromkeys(found))


def _own(module: nn.Module) -> Iterator[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]]:
    """A module's own parameters and buffers, and where it keeps them."""
    for tensors in (module._parameters, module._buffers):
        yield from ((tensors, name, tensor) for name, tensor in list(tensors.items()) if tensor is not None)  # type: ignore[misc]
