"""Modules that a front end's functions reach, and that are not given as modules."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from tapestream.runner.stage import Stage


class Reached(nn.ModuleList):
    """Registered like others: ``parameters()``, ``state_dict()``, ``train()`` and ``to()`` find them.

    But for those that have the front end itself among their own modules (``self.loop = ts.Loop(self.step)``): only
    ``parameters()``, ``buffers()`` and ``modules()`` find these. All else would go round for ever, and is for whoever
    owns the front end.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__(modules)
        object.__setattr__(self, "_modules", _WithoutOwners(self._modules))
        self._modules.reached = self  # type: ignore[attr-defined]

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """All, those that own this among them."""
        memo = set() if memo is None else memo
        if self in memo:
            return
        memo.add(self)
        yield prefix, self
        for name, module in self._modules.all_items():  # type: ignore[attr-defined]
            yield from module.named_modules(memo, f"{prefix}{'.' * bool(prefix)}{name}", remove_duplicate)


class _WithoutOwners(dict[str, Any]):
    """The modules of a `Reached` by name, as PyTorch goes through them."""

    reached: Reached

    def all_items(self) -> Iterable[tuple[str, nn.Module]]:
        return super().items()

    def items(self) -> Any:
        """Those that do not own the front end."""
        owners = [any(below is self.reached for below in module.modules()) for _, module in super().items()]
        return [item for item, owns in zip(super().items(), owners, strict=True) if not owns]

    def values(self) -> Any:
        """As `items`."""
        return [module for _, module in self.items()]


def also_reached(stages: Sequence[Stage], registered: nn.ModuleList) -> Reached:
    """Modules that stages reach and that are not among the ``registered``: those of them that hold the rest."""
    known = {id(m) for m in registered.modules()}
    found: list[nn.Module] = []
    for stage in stages:
        for module in stage.modules:
            if id(module) not in known:
                known.update(id(m) for m in module.modules())
                found.append(module)
    return Reached(found)
