"""`Placed`: what an optimizer says of where it updates each block, and how fast."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tapestream.errors import InputError
from tapestream.optim.handle import Handle
from tapestream.optim.steps import Steps
from tapestream.planning.where import Where

_ON_DEVICE = "updated_on_device"


class Placed:
    """With ``where="mixed"`` the first plan says so, and all that follow, in this run and after a save, go on so."""

    where: Where
    _steps: Steps
    _handle: Handle
    _mine: set[int]  # ids of its parameters
    _listed: Callable[[], list[torch.Tensor]]

    @property
    def on_device(self) -> frozenset[int] | None:
        """Numbers of the blocks that are updated on the device though ``where="mixed"``; None before the first plan."""
        return self._steps.on_device

    def bytes_per_second(self, *, hosted: bool) -> float | None:
        """Bytes that updates of blocks, or those in RAM, read and write per second, tried on a tensor like their
        largest parameters; None where that is not known."""
        trained = [p for block in self._handle.store.blocks for p in block.parameters if p.requires_grad]
        mine = [p for p in trained if id(p) in self._mine]
        tried = self._steps.on_host if hosted else self._steps.tried
        return tried.bytes_per_second(max(mine, key=lambda p: p.nbytes)) if mine else None

    def take_places(self, on_device: frozenset[int], on_host: frozenset[int]) -> None:
        """A plan updates these blocks there. Raises InputError where the optimizer was made to update them elsewhere,
        or has."""
        if self.where == "mixed" and self._steps.on_device is None:
            self._steps.on_device = on_device
        other = [block for block in on_device if self._steps.is_hosted(block)]
        other += [block for block in on_host if not self._steps.is_hosted(block)]
        if other:
            there, here = ("on the device", "in RAM") if min(other) in on_device else ("in RAM", "on the device")
            raise InputError(
                f"plan= updates block {min(other)} {there}, this optimizer (where={self.where!r}) updates it {here}: "
                "its bits would be others than those asked for; use plan=None"
            )

    def _saved_places(self) -> dict[str, Any]:
        """By numbers of parameters, as a state dict has them."""
        if self._steps.on_device is None:
            return {}
        there = self._on_device_now(self._steps.on_device)
        return {_ON_DEVICE: [number for number, p in enumerate(self._listed()) if id(p) in there]}

    def _load_places(self, state_dict: Mapping[str, Any]) -> None:
        """Go on as the saved run did. Warns where that cannot be, as blocks are others."""
        numbers = state_dict.get(_ON_DEVICE)
        if self.where != "mixed" or numbers is None:
            return
        listed = self._listed()
        there = {id(listed[number]) for number in numbers}
        blocks = self._handle.store.blocks
        found = frozenset(block.index for block in blocks if any(id(p) in there for p in block.parameters))
        if found != self._steps.on_device:
            self._handle.check_idle("load_state_dict() of a run that updated other blocks on the device")
            self._steps.on_device = found
            self._handle.replan()
        if self._on_device_now(found) != there:
            warnings.warn(
                "this optimizer's state was made with other blocks, some of which were updated on the device: updates "
                "may have other bits from here on; for the same run, stream the model with the same blocks",
                stacklevel=3,
            )

    def _on_device_now(self, numbers: frozenset[int]) -> set[int]:
        """Ids of the parameters of these blocks that the optimizer has."""
        mine = set(map(id, self._listed()))
        blocks = self._handle.store.blocks
        return {id(p) for block in blocks if block.index in numbers for p in block.parameters} & mine
