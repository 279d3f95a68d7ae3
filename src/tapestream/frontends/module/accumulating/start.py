"""`Start`: what there was before micro-batches ran together, so that they can run once more, one after the other."""

from collections.abc import Iterable

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.accumulating.pieces import Unfit
from tapestream.runner.ambient import HostGenerators, TorchGenerators, host_mark
from tapestream.runner.stage import modules_below
from tapestream.runner.stills import Stills


class Start:
    """``generators``: PyTorch's, as they were. ``held``: tensors that nothing but the user's forward would write."""

    def __init__(
        self, model: nn.Module, blocks: Iterable[nn.Module], given: Iterable[torch.Tensor], device: torch.device
    ) -> None:
        """``given``: tensors of the micro-batches."""
        inside = {id(module) for block in blocks for module in modules_below(block)}
        outside = [module for module in modules_below(model) if id(module) not in inside]
        self.generators, self._host = TorchGenerators.capture(device), HostGenerators.capture()
        self._model, self._stills = model, Stills(outside)
        self._look = self._stills.look(model, (), ())
        buffers = [b for module in modules_below(model) for b in module._buffers.values() if b is not None]
        self._held = [(t, t._version) for t in (*buffers, *given) if not t.is_inference()]

    def check(self, *, outside: bool = True) -> None:
        """Raise Unfit where the forward of one micro-batch has changed what the next one would find. ``outside``: it
        may have run outside of the blocks."""
        if host_mark() != self._host.mark:
            raise Unfit("they draw from Python's or NumPy's generator")
        if outside and not self._stills.look(self._model, (), ()).same(self._look):
            raise Unfit("the model's forward writes into attributes or buffers outside of the blocks")

    def restore(self, why: str) -> None:
        """All as it was. Raises InputError where it is not known any more."""
        self.generators.restore()
        self._host.restore()
        changed = self._stills.counted(self._look, self._stills.look(self._model, (), ()), ())
        if changed is not None:
            changed.put_back()
        if any(t._version != version for t, version in self._held):
            raise InputError(
                f"accumulate: these micro-batches cannot go together ({why}), and cannot begin again: the forward has "
                "written into a buffer or into what it was given, unlike in the profiled call; call the model and "
                "backward() for each micro-batch"
            )
