"""Shared weights under autocast: plain PyTorch casts such a weight once and sums its gradients in the cast's dtype."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tapestream.capture.buffers import Slot
from tapestream.runner.stage import Stage, Traits


@dataclass(frozen=True, slots=True)
class SharedCasts:
    """Weights that several stages use, and all of them through casts alone.

    ``slots``: per stage, where its modules hold them. ``first``: by id of the weight, the first stage that uses it,
    whose backward
    is the last one to add.
    """

    slots: dict[int, list[Slot]]
    first: dict[int, int]

    @classmethod
    def find(cls, stages: Sequence[Stage], traits: Sequence[Traits]) -> "SharedCasts":
        """Those of one call under autocast."""
        uses = Counter(key for trait in traits for key in trait.casts)
        shared = {key for key, count in uses.items() if count > 1}
        slots: dict[int, list[Slot]] = {}
        for k, (stage, trait) in enumerate(zip(stages, traits, strict=True)):
            shared -= trait.uncast
            wanted = trait.casts & shared
            found = [(m, n) for m in stage.modules if wanted for n, p in m._parameters.items() if id(p) in wanted]
            # A weight that a function holds otherwise than by a module cannot be replaced for one run.
            shared -= wanted - {id(m._parameters[n]) for m, n in found}
            slots[k] = found
        slots = {k: [s for s in found if id(s[0]._parameters[s[1]]) in shared] for k, found in slots.items()}
        first = {key: next(k for k, trait in enumerate(traits) if key in trait.casts) for key in shared}
        return cls({k: found for k, found in slots.items() if found}, first)

    def finished(self, k: int, weight: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """``total`` as it leaves stage ``k``: in the weight's own dtype once nothing more is to be added."""
        return total.to(weight.dtype) if self.first.get(id(weight)) == k else total

    @contextlib.contextmanager
    def standing_in(self, k: int, dtype: torch.dtype) -> Iterator[dict[int, torch.Tensor]]:
        """Inside, the modules of stage ``k`` hold casts that are leaves; yields the weights by id of their
        stand-ins."""
        weights: dict[int, torch.Tensor] = {}
        stands: dict[int, torch.Tensor] = {}
        held = [(module, name, module._parameters[name]) for module, name in self.slots.get(k, ())]
        try:
            for module, name, weight in held:
                assert weight is not None
                if id(weight) not in stands:
                    stands[id(weight)] = weight.detach().to(dtype).requires_grad_()
                    weights[id(stands[id(weight)])] = weight
                module._parameters[name] = stands[id(weight)]  # type: ignore[assignment]
            yield weights
        finally:
            for module, name, weight in held:
                module._parameters[name] = weight
