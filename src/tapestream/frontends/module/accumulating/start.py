"""`Start`: what there was before micro-batches ran together, so that they can run once more, one after the other."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.accumulating.pieces import Unfit
from tapestream.runner.ambient import HostGenerators, TorchGenerators, host_mark
from tapestream.runner.belongings import Belongings, Change, undo
from tapestream.runner.stage import modules_below


class Start:
    """``generators``: PyTorch's, as they were."""

    def __init__(
        self,
        model: nn.Module,
        blocks: Iterable[nn.Module],
        loss: Callable[..., Any],
        given: Iterable[torch.Tensor],
        device: torch.device,
    ) -> None:
        """``given``: tensors of the micro-batches."""
        inside = {id(module) for block in blocks for module in modules_below(block)}
        modules = modules_below(model)
        self._outside, self._loss = [module for module in modules if id(module) not in inside], loss
        self.generators, self._host = TorchGenerators.capture(device), HostGenerators.capture()
        self._belongings, self._of_loss = Belongings(self._outside), self._of_loss_now()
        tables = [m._buffers for m in modules] + [m._parameters for m in self._outside]
        self._tables: list[tuple[dict[str, Any], dict[str, Any]]] = [(table, dict(table)) for table in tables]
        held = (t for _, table in self._tables for t in table.values() if t is not None)
        self._held = [(t, t._version) for t in (*held, *given) if not t.is_inference()]

    def check(self) -> None:
        """Raise Unfit where the forward of one micro-batch has changed what the next one would find."""
        if host_mark() != self._host.mark:
            raise Unfit("they draw from Python's or NumPy's generator")
        changes = self._changes()
        if changes:
            raise Unfit(f"the model's forward changes {changes[0].name} outside of the blocks")
        if self._written or not all(_same(table, before) for table, before in self._tables):
            raise Unfit("the model's forward changes a buffer outside of the blocks, or what it is given")

    def restore(self, why: str) -> None:
        """All as it was. Raises InputError where it is not known any more."""
        self.generators.restore()
        self._host.restore()
        undo([*self._changes(), *self._of_loss.changes(self._of_loss_now())])
        for table, before in self._tables:
            if not _same(table, before):
                table.clear()
                table.update(before)
        if self._written or self._changes():
            raise InputError(
                f"accumulate: these micro-batches cannot go together ({why}), and cannot begin again: the forward has "
                "written into a buffer or an argument, unlike in the profiled call; call the model and backward() for "
                "each micro-batch"
            )

    @property
    def _written(self) -> bool:
        return any(t._version != version for t, version in self._held)

    def _changes(self) -> Sequence[Change]:
        return self._belongings.changes(Belongings(self._outside))

    def _of_loss_now(self) -> Belongings:
        if isinstance(self._loss, nn.Module):
            return Belongings(modules_below(self._loss))
        return Belongings((), self._loss)


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether both hold the very same."""
    return one.keys() == other.keys() and all(value is other[name] for name, value in one.items())
