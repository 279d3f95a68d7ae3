"""What an optimizer is shown of its groups where blocks are updated in RAM below a GPU."""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch

from tapestream.capture.fused_steps import unseen
from tapestream.optim.state import OptimizerClass


class GroupsOnCpu:
    """``groups()`` gives the param_groups as users see them. Where they ask for neither a fused nor a foreach form,
    torch's fused kernel is taken where it has one for the CPU. After `hold`, they are as they were then: what a
    scheduler changes afterwards is of the next step."""

    def __init__(
        self, cls: OptimizerClass, options: Mapping[str, Any], groups: Callable[[], Sequence[MutableMapping[str, Any]]]
    ) -> None:
        self._cls, self._options, self._groups = cls, options, groups
        self._held: list[dict[str, Any]] | None = None
        self._fused: dict[int, bool] = {}

    def __call__(self) -> Sequence[MutableMapping[str, Any]]:
        """As an update is to see them."""
        return self._now() if self._held is None else self._held

    def hold(self) -> None:
        """A step begins."""
        self._held = [
            {key: _copied(value) for key, value in group.items()} for group in self._now()
        ]  # rates may be tensors

    def let_go(self) -> None:
        """It has ended."""
        self._held = None

    def shown(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """One of the groups, as an update is to see it."""
        number = next(n for n, one in enumerate(self._groups()) if one is group)
        return self._as_shown(number, group)

    def _now(self) -> list[dict[str, Any]]:
        return [self._as_shown(number, group) for number, group in enumerate(self._groups())]

    def _as_shown(self, number: int, group: Mapping[str, Any]) -> dict[str, Any]:
        return {**group, "fused": True} if self._is_fused(number, group) else dict(group)

    def _is_fused(self, number: int, group: Mapping[str, Any]) -> bool:
        if group.get("fused", False) is not None or group.get("foreach") is not None:
            return False
        if number not in self._fused:
            self._fused[number] = takes_fused(self._cls, self._options, group)
        return self._fused[number]


def takes_fused(cls: OptimizerClass, options: Mapping[str, Any], group: Mapping[str, Any]) -> bool:
    """Whether there is a fused kernel for the CPU, tried on a small tensor."""
    small = torch.nn.Parameter(torch.ones(2, device="cpu"))
    small.grad = torch.ones_like(small)
    try:
        with torch.enable_grad():
            unseen(cls([{**group, "fused": True, "params": [small]}], **options)).step()
    except Exception:  # whatever it says
        return False
    return True


def _copied(value: Any) -> Any:  # a rate may be a tensor
    return value.clone() if isinstance(value, torch.Tensor) else value
