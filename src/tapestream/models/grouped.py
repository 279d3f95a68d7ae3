"""Very deep networks without modules and Parameters for every layer: equal layers share one template and one tensor.

A ``Conv2d`` takes 5.8 KB of Python objects, and each Parameter 0.6 KB of autograd's memory in every call: for a million
layers more than their tape. A `Group` has one flat Parameter instead, on whose parts one template module runs, layer
after layer. Names in ``state_dict()``, initial values, results and gradients are those of the modules one by one, bit
for bit; what differs is that ``parameters()`` gives the flat tensors, one per group.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from tapestream.frontends.saving.state import AsKept, Few
from tapestream.models._random import keyed_generator
from tapestream.models.shapes import GROUP_NBYTES

_ALIGNMENT = 64  # bytes; PyTorch's allocator starts every tensor there, and the bits of some kernels depend on it

Key = tuple[int | str, ...]


class Layer(nn.Module, ABC):
    """One layer. ``key``: what its initial values are drawn from, see `keyed_generator`. It uses statistics of
    BatchNorm through that alone."""

    key: Key = ()

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """The layer's own work."""

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Initial values in place, all that are random drawn from ``generator``."""

    def initialize(self) -> None:
        """Initial values in place, those of ``key``; nothing while the layer is on meta."""
        if not next(self.parameters()).is_meta:
            self.reset(keyed_generator(*self.key))

    def forward(self, x: Tensor, *carried: Tensor) -> Any:
        """``run(x)``, and after it whatever else was given, untouched."""
        x = self.run(x)
        return (x, *carried) if carried else x


@dataclass(frozen=True, slots=True)
class _Slot:
    """One tensor of a template: the dict that holds it there, by which key, and its name. In a flat tensor
    ``padding`` elements follow it, up to the next aligned one."""

    held_in: dict[str, Tensor | None]
    key: str
    name: str
    tensor: Tensor
    padding: int


class Kind:
    """A template made on meta, and where its tensors lie in flat ones: ``flat`` has parameters, ``flat_<dtype>``
    buffers; in each a row is a layer. Groups of equal layers share it."""

    def __init__(self, template: Layer) -> None:
        self.template = template
        self.places: dict[str, list[_Slot]] = {}
        names = []
        for prefix, module in template.named_modules(prefix="", remove_duplicate=True):
            for held_in in (module._parameters, module._buffers):
                for key, tensor in held_in.items():
                    if tensor is not None:
                        names.append(f"{prefix}.{key}".lstrip("."))
                        self._add(held_in, key, names[-1], tensor)
        self.slots = list(chain.from_iterable(self.places.values()))
        order = {slot.name: number for number, slot in enumerate(self.slots)}
        self.names = [(name, order[name]) for name in names]  # in the order of ``state_dict()``

    def _add(self, held_in: dict[str, Tensor | None], key: str, name: str, tensor: Tensor) -> None:
        buffer = not isinstance(tensor, nn.Parameter)
        place = f"flat_{str(tensor.dtype).removeprefix('torch.')}" if buffer else "flat"
        # Kernels read numbers in whole registers, but counters one by one.
        unit = _ALIGNMENT // tensor.itemsize if tensor.is_floating_point() else 1
        slot = _Slot(held_in, key, name, tensor, -tensor.numel() % unit)
        self.places.setdefault(place, []).append(slot)

    def width(self, place: str) -> int:
        """Elements of one layer in a flat tensor."""
        return sum(slot.tensor.numel() + slot.padding for slot in self.places[place])

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's parameters."""
        return self.width("flat") * self.places["flat"][0].tensor.itemsize

    def layers(self, flats: Mapping[str, Tensor], count: int) -> Iterator[tuple[Tensor, ...]]:
        """By layer, views of the flat tensors, one per slot.

        Cut by slot first and by layer then, so that gradients come back in two copies however many layers there are.
        """
        columns: list[tuple[Tensor, ...]] = []
        for place, slots in self.places.items():
            sizes = [slot.tensor.numel() + slot.padding for slot in slots]
            for slot, cut in zip(slots, torch.split(flats[place].view(count, -1), sizes, dim=1), strict=True):
                used = cut[:, : slot.tensor.numel()] if slot.padding else cut
                columns.append(used.view(count, *slot.tensor.shape).unbind())
        return zip(*columns, strict=True)

    def put(self, tensors: Iterable[Tensor]) -> Layer:
        """The template holding ``tensors``, one per slot."""
        for slot, tensor in zip(self.slots, tensors, strict=True):
            slot.held_in[slot.key] = tensor
        return self.template

    def empty(self) -> None:
        """Let the template hold what it was made with: views of a flat tensor would keep that and its graph alive."""
        self.put(slot.tensor for slot in self.slots)


class Group(Few):
    """``count`` layers of one kind in a row, of which the first is number ``first`` of its `Stack`.

    The template is no part of the module tree, so hooks on layers are not to be had. Flat tensors are made on the
    default device; the values come from ``initialize()``: those of layer i depend on ``key`` and i alone.
    """

    def __init__(self, kind: Kind, count: int, first: int, key: Key) -> None:
        super().__init__()
        self.count, self.first, self.key = count, first, key
        self._kind = kind
        for place, slots in kind.places.items():
            tensor = torch.zeros(count * kind.width(place), dtype=slots[0].tensor.dtype)
            if place == "flat":
                self.register_parameter(place, nn.Parameter(tensor))
            else:
                self.register_buffer(place, tensor)

    def reads_buffers(self) -> bool:
        """Whether anything but BatchNorm in training, which writes its statistics and reads those of the batch, uses
        the buffers."""
        owners = [m for m in self._kind.template.modules() if m._buffers]
        return not (self.training and all(type(m) is nn.BatchNorm2d for m in owners))

    def extra_repr(self) -> str:
        """What ``print(model)`` says."""
        return f"layers {self.first} to {self.first + self.count - 1}: {type(self._kind.template).__name__}"

    def layers(self) -> Iterator[tuple[Tensor, ...]]:
        """By layer, views of its tensors."""
        flats = {place: getattr(self, place) for place in self._kind.places}
        return self._kind.layers(flats, self.count)

    @torch.no_grad()
    def initialize(self) -> None:
        """Initial values of every layer, in place; nothing while the group is on meta."""
        flats = [getattr(self, place) for place in self._kind.places]
        if any(flat.is_meta for flat in flats):
            return
        for flat in flats:
            flat.zero_()  # what lies between tensors is never used, but saved and updated
        try:
            for number, tensors in enumerate(self.layers(), self.first):
                self._kind.put(tensors).reset(keyed_generator(*self.key, number))
        finally:
            self._kind.empty()

    def forward(self, x: Tensor, *carried: Tensor) -> Any:
        """All layers in turn, as `Layer.forward`."""
        if self._kind.template.training is not self.training:
            self._kind.template.train(self.training)
        try:
            for tensors in self.layers():
                x = self._kind.put(tensors).run(x)
        finally:
            self._kind.empty()
        return (x, *carried) if carried else x

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of every layer as a view, named as in the `Stack`: ``"57.conv1.weight"``."""
        for number, tensors in enumerate(self.layers(), self.first):
            for name, at in self._kind.names:
                yield f"{number}.{name}", tensors[at]

    def shown(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The same, named as in the model where the group is called ``name``."""
        above = name.removesuffix(str(self.first))
        return ((above + inside, tensor) for inside, tensor in self.named_tensors())

    def _save_to_state_dict(self, destination: MutableMapping[str, Any], prefix: str, keep_vars: bool) -> None:
        if isinstance(destination, AsKept):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self.shown(prefix.removesuffix(".")):
            destination[name] = tensor if keep_vars else tensor.detach()

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        if prefix:
            return  # the Stack has done it: here PyTorch gives only what begins with the number of the first layer
        own = set(self.load(state_dict, prefix, prefix, missing_keys, error_msgs))
        unexpected_keys.extend(name for name in state_dict if strict and name not in own)

    @torch.no_grad()
    def load(
        self, found: Mapping[str, Any], prefix: str, own_prefix: str, missing_keys: list[str], error_msgs: list[str]
    ) -> list[str]:
        """Copy in what ``found`` has for this group, its flat tensors after ``own_prefix`` or every layer's after
        ``prefix``; returns these names."""
        kept = {own_prefix + place: getattr(self, place) for place in self._kind.places}
        shown = ((prefix + name, tensor) for name, tensor in self.named_tensors())
        names = []
        for name, tensor in kept.items() if kept.keys() & found.keys() else shown:
            names.append(name)
            given = found.get(name)
            if given is None:
                missing_keys.append(name)
            elif given.shape != tensor.shape:
                error_msgs.append(
                    f"size mismatch for {name}: a tensor of shape {tuple(given.shape)} was given, that of the model "
                    f"has {tuple(tensor.shape)}"
                )
            else:
                tensor.copy_(given)
        return names


class Stack(nn.Sequential):
    """Layers in a row, in `Group`s where several that follow each other are equal; children are named by the number
    of their first layer, tensors in ``state_dict()`` by that of their own."""

    def __init__(self, children: Iterable[Layer | Group]) -> None:
        super().__init__()
        number = 0
        for child in children:
            self.add_module(str(number), child)
            number += child.count if isinstance(child, Group) else 1
        self.count = number

    def forward(self, x: Tensor, *carried: Tensor) -> Any:
        """All layers in turn, as `Layer.forward`."""
        state: Any = (x, *carried) if carried else x
        for child in self:
            state = child(*state) if carried else child(state)
        return state

    def _load_from_state_dict(
        self, state_dict: MutableMapping[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        for number, child in self.named_children():
            if isinstance(child, Group):
                for name in child.load(state_dict, prefix, f"{prefix}{number}.", missing_keys, error_msgs):
                    state_dict.pop(name, None)  # a copy, which PyTorch would search once for every child
        alone = tuple(prefix + name + "." for name, child in self.named_children() if not isinstance(child, Group))
        if strict:
            strangers = (name for name in state_dict if name.startswith(prefix) and not name.startswith(alone))
            unexpected_keys.extend(strangers)


def grouped(template: Layer, count: int, first: int, key: Key, least_nbytes: int = GROUP_NBYTES) -> Iterator[Group]:
    """``count`` layers equal to ``template`` (made on meta), from number ``first`` on, in groups of at least
    ``least_nbytes`` of parameters, as equal as can be."""
    kind = Kind(template)
    groups = max(1, count // max(1, -(-least_nbytes // kind.nbytes)))
    for group in range(groups):
        size = count // groups + (group < count % groups)
        yield Group(kind, size, first, key)
        first += size
