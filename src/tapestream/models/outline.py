"""`Outline`: what one training step of a model takes, whatever optimizer and machine, as profiles for planners."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tapestream.costs import BlockCost, Carried, Profile, StageCost
from tapestream.errors import InputError
from tapestream.models.estimate import block_costs, kept_nbytes


@dataclass(slots=True)
class Segment:
    """Blocks called one after the other. ``stages``: their costs, operations in place of seconds; ``uses``: the
    parameter block of each; ``spans``: first and last state of each storage that several share, and its bytes."""

    initial_nbytes: int
    stages: list[StageCost] = field(default_factory=list)
    uses: list[int | None] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    travelling: dict[int, int] = field(default_factory=dict)  # storages of the last state: where in ``spans``

    def follow(self, before: dict[int, int], after: dict[int, int]) -> None:
        """After a stage was added: which storages of its input its output holds too. Both: storage to bytes."""
        k = len(self.stages)
        was, self.travelling = self.travelling, {}
        for key, nbytes in after.items():
            if key not in before:
                self.travelling[key] = len(self.spans)
                self.spans.append((k, k, nbytes))
            elif key in was:  # what was there before the first block costs nothing: it is in ``initial_nbytes``
                first, _, nbytes = self.spans[was[key]]
                self.spans[was[key]] = (first, k, nbytes)
                self.travelling[key] = was[key]

    @property
    def carried(self) -> tuple[Carried, ...]:
        """Storages that several states share."""
        return tuple(Carried(first, last, nbytes) for first, last, nbytes in self.spans if last > first)


@dataclass(frozen=True, slots=True)
class Outline:
    """What a model takes for one kind of batch, whatever the optimizer and the machine.

    ``groups``: parameters that move together; ``outside``: parameters beside the blocks. ``before_nbytes``: tape and
    constants of what runs before and between blocks; ``turn_nbytes`` and ``turn_flops``: of head and loss.
    """

    segments: tuple[Segment, ...]
    groups: tuple[tuple[nn.Parameter, ...], ...]
    outside: tuple[nn.Parameter, ...]
    buffers_nbytes: int
    before_nbytes: int
    turn_nbytes: int
    turn_flops: int

    @property
    def parameters(self) -> int:
        """Numbers that the model holds, shared ones once."""
        return sum(p.numel() for p in (*(p for group in self.groups for p in group), *self.outside))

    @property
    def flops(self) -> int:
        """Floating-point operations of one step with everything stored."""
        found = sum(c.forward_seconds + c.backward_seconds for s in self.segments for c in s.stages)
        return int(found) + self.turn_flops

    def profiles(
        self,
        *,
        flops_per_second: float,
        optimizer: str = "adamw",
        update: str = "step",
        update_bytes_per_second: float = 5e9,
        budget_nbytes: int | None = None,
        finer: bool = False,
    ) -> tuple[Profile, ...]:
        """One Profile for each chain of blocks, as `tapestream.stream` would find them, with all that lies outside.

        Blocks of other chains cost nothing in a Profile; the seconds of what runs outside blocks are in the last one.
        ``budget_nbytes``, ``finer``: see `tapestream.models.estimate.estimate`.
        Raises InputError for an unknown optimizer and for rates that are not positive.
        """
        if not flops_per_second > 0 or not update_bytes_per_second > 0:
            raise InputError("profiles: flops_per_second and update_bytes_per_second must be positive")
        costs = block_costs(self.groups, optimizer, update_bytes_per_second, budget_nbytes=budget_nbytes, finer=finer)
        outside = self.buffers_nbytes + self.before_nbytes
        outside += sum(p.nbytes * (2 if p.requires_grad else 1) + kept_nbytes(p, optimizer) for p in self.outside)
        last = self.segments[-1]
        return tuple(
            Profile(
                tuple(_timed(segment, costs, flops_per_second, update)),
                segment.initial_nbytes,
                tuple(cost if number in segment.uses else BlockCost(0) for number, cost in enumerate(costs)),
                segment.carried,
                outside_nbytes=outside,
                turn_nbytes=self.turn_nbytes,
                turn_seconds=self.turn_flops / flops_per_second if segment is last else 0.0,
            )
            for segment in self.segments
        )


def _timed(segment: Segment, costs: Sequence[BlockCost], flops_per_second: float, update: str) -> Iterator[StageCost]:
    shared = {first: 0 for first, _, _ in segment.spans}
    for carried in segment.carried:
        shared[carried.first] += carried.nbytes
    for k, (cost, use) in enumerate(zip(segment.stages, segment.uses, strict=True)):
        extra = cost.backward_extra_nbytes
        if use is not None and update != "backward":  # gradients come one by one and are laid out in a run of bytes
            extra = max(extra, costs[use].gradient_nbytes)
        yield replace(
            cost,
            forward_seconds=cost.forward_seconds / flops_per_second,
            backward_seconds=cost.backward_seconds / flops_per_second,
            output_nbytes=cost.output_nbytes - shared.get(k + 1, 0),
            backward_extra_nbytes=extra,
            block=use,
        )
