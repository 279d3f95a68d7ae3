"""`Late`: gradients that come when all tapes are gone."""

from collections.abc import Container, Iterable
from dataclasses import dataclass

from torch import nn

from tapestream.accelerator.memory import tensor_nbytes
from tapestream.costs import Profile


@dataclass(frozen=True, slots=True)
class Late:
    """Gradients of ``parameters`` that only what runs before the first block uses (an embedding): they are made when
    all tapes are gone. ``nbytes`` of them find room in what the first block's backward had last."""

    parameters: tuple[nn.Parameter, ...] = ()
    nbytes: int = 0

    @property
    def there(self) -> bool:
        """Whether an earlier backward has left some."""
        return any(p.grad is not None for p in self.parameters)


def late_of(outside: Iterable[nn.Parameter], used_first: Container[int], first: Profile) -> Late:
    """What is late, of parameters ``outside`` the blocks (``used_first``: ids of those that only what runs before the
    blocks uses), where all lies on the device: the last backward of all is that of the ``first`` chain's stage 0, and
    what it holds beside what stays, more than an update takes, is free afterwards."""
    late = tuple(p for p in outside if p.requires_grad and id(p) in used_first)
    cost, updating = first.stages[0], max((block.update_extra_nbytes for block in first.blocks), default=0)
    room = cost.saved_nbytes + cost.cotangent_bytes + cost.backward_extra_nbytes - updating
    return Late(late, min(sum(tensor_nbytes(p) for p in late), max(0, room)))
