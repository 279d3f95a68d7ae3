"""`OnePlan`: what ranks that divide a model's blocks agree on, so that all follow the same plan."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import torch

from tapestream.costs import Budget, Link, Machine, Profile
from tapestream.errors import InputError
from tapestream.frontends.available import free_nbytes, ranks_here
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.ir.actions import Tier
from tapestream.ir.text import dumps
from tapestream.peers.agreement import Agreement
from tapestream.peers.divided import DividedBlocks
from tapestream.planning.merging import leaves_of, merged, slowest

Shapes = tuple[torch.Size, ...]


class OnePlan:
    """Collective operations are part of a plan: ranks with different ones would wait for each other, or take bytes for
    what they are not. What each measures is therefore merged before it is planned with."""

    def __init__(self, agreement: Agreement, shards: DividedBlocks) -> None:
        self._agreement, self._shards = agreement, shards
        self._digests: dict[int, tuple[Prepared, str]] = {}
        self._known: tuple[Machine, Machine] | None = None

    def shapes(self, own: Shapes, state: bytes) -> Shapes:
        """Those that a plan for every rank's call must serve: the largest of each size. What is no such set of tensors
        on all ranks is left as it is: plans will differ, which `begin` says. ``state``: hashed, it must be the same on
        all: which parameters have gradients, which take some, which have other data. Raises InputError elsewhere."""
        mine = [hashlib.sha256(state).hexdigest()[:16], [list(one) for one in own]]
        told = self._agreement.told("began a call of a streamed model", mine)
        if len({one[0] for one in told}) > 1:
            raise InputError(
                "when this call began, ranks had gradients of different parameters, or different parameters that "
                "require some, or p.data was set on some; zero_grad(), requires_grad and what is written must be the "
                "same on every rank"
            )
        every = [one[1] for one in told]
        alike = {tuple(len(one) for one in shapes) for shapes in every}
        if len(alike) > 1:
            return own
        return tuple(torch.Size(map(max, zip(*sizes, strict=True))) for sizes in zip(*every, strict=True))

    def profiles(self, own: Sequence[Profile]) -> list[Profile]:
        """What holds for every rank. Raises InputError, on all, where they have run other blocks."""
        every = self._agreement.told("profiled a call", leaves_of(list(own)))
        return merged(list(own), every)

    def machine(self, own: Machine) -> Machine:
        """The slowest of every link, with those between ranks; measured once for each ``own``."""
        if self._known is None or self._known[0] is not own:
            links = {} if own.peers is not None else self._shards.measured()
            every = self._agreement.told("measured its links", _said(replace(own, links={**own.links, **links})))
            self._known = own, slowest([_heard(one, own) for one in every])
        return self._known[1]

    def begin(self, prepared: Prepared) -> None:
        """All begin a call with these plans. Raises InputError, on every rank, where others have others."""
        known = self._digests.get(id(prepared))
        if known is None or known[0] is not prepared:
            text = "\n".join([*(dumps(plan.schedule) for plan in prepared.plans), repr(prepared.order)])
            known = self._digests[id(prepared)] = prepared, hashlib.sha256(text.encode()).hexdigest()[:16]
        self._agreement.agree("followed a plan", known[1])


def found_budget(budget: Budget, device: torch.device, beside_nbytes: int, agreement: Agreement | None) -> Budget:
    """``budget`` with what is free on the device where it does not say, ``beside_nbytes`` more; the least of any rank,
    whose plans may be one."""
    if budget.device_nbytes is not None:
        return budget
    free = free_nbytes(device, 1 if agreement is None else ranks_here()) + beside_nbytes
    return budget.with_device(free if agreement is None else agreement.least("looked at its device", free))


def _said(machine: Machine) -> list[list[object]]:
    links = [("peers", "peers", machine.peers), *((a.name, b.name, link) for (a, b), link in machine.links.items())]
    return [
        [a, b, one.bytes_per_second, one.latency_seconds, one.mixed, one.busy_seconds]
        for a, b, one in links
        if one is not None
    ]


def _heard(said: list[list[object]], like: Machine) -> Machine:
    links = {(a, b): Link(*rest) for a, b, *rest in said}  # type: ignore[arg-type]
    peers = links.pop(("peers", "peers"), None)
    return replace(like, links={(Tier[a], Tier[b]): link for (a, b), link in links.items()}, peers=peers)  # type: ignore[misc]
