"""How large the batch is that plans were made for, and how fast it is by them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import torch

from tapestream.planning.pace import Pace, Unit
from tapestream.planning.plan import Plan

if TYPE_CHECKING:
    from tapestream.frontends.module.plans.prepare import Prepared

Sized: TypeAlias = tuple[tuple[int, ...], Unit]
"""(4, 512) tokens, or (8,) samples."""


def batch_of(tensors: Sequence[torch.Tensor]) -> Sized | None:
    """Of a call that is given ``tensors``: tokens are whole numbers in two dimensions, samples are what the first
    tensor has along dimension 0. None where it is given no batch."""
    for tensor in tensors:
        if tensor.dim() == 2 and tensor.dtype in (torch.int32, torch.int64):
            return tuple(tensor.shape), "tokens"
    return next((((tensor.shape[0],), "samples") for tensor in tensors if tensor.dim()), None)


def paces_of(*planned: "Prepared | None") -> tuple[Pace, ...]:
    """How fast these calls are, each size once."""
    paces = (
        Pace(*one.batch, sum(plan.seconds for plan in one.plans))
        for one in planned
        if one is not None and one.batch is not None
    )
    return tuple(dict.fromkeys(paces))


def with_paces(prepared: "Prepared", longest: "Prepared | None") -> Plan:
    """The plan of ``prepared``, with how fast it is beside the longest call, if one was announced."""
    return prepared.plan if longest is None else replace(prepared.plan, paces=paces_of(prepared, longest))
