"""What a training step takes on the virtual clock of a card, and what its plan says that it takes."""

import gc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from simulated_gpu.clock import Card, Clock
from torch import Tensor, nn

import tapestream as ts
from tapestream.accelerator.memory import workspaces_nbytes
from tapestream.frontends.module.stream import handle_of
from tapestream.planning.plan import Plan

ROWS, WIDE, BLOCKS = 1024, 1024, 4
SECONDS = 0.05
"""How far a step is from its plan, at most, of what it takes. What makes plans inexact: stages are timed on a device
that waits for the host's first kernel, 5 us each, updates are taken to be as fast on every card, and small kernels come
with a step."""
HIDDEN = 0.05
"""How far the hidden part of the copies is from that of the plan, at most, of all copies."""

Spans = list[tuple[float, float]]


class Block(nn.Module):
    """A product and two passes over its result; the weights come over the card's link in about twice that time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to the same."""
        return x + nn.functional.gelu(self.linear(x))


class Net(nn.Module):
    """Blocks, and the loss: so that no kernel of a step is unknown to the plan."""

    def __init__(self, width: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to a number."""
        for block in self.blocks:
            x = block(x)
        return (x @ x.T).square().mean()


@dataclass
class Timeline:
    """What a step takes, the part of its copies during which something was computed, and the bytes of all copies."""

    seconds: float
    hidden: float
    nbytes: int


def machine_of(card: Card) -> ts.Machine:
    host, device = ts.Tier.HOST, ts.Tier.DEVICE
    links = {(host, device): ts.Link(card.into, card.copy), (device, host): ts.Link(card.out, card.copy)}
    return ts.Machine(links=links)


def streamed(card: Card, share: float, **options: Any) -> nn.Module:
    """A model with ``share`` of what its weights, their gradients and the state of AdamW take on the device, and room
    for what is computed."""
    model = Net(WIDE)
    budget = int(share * 4 * sum(p.nbytes for p in model.parameters())) + 6 * ROWS * WIDE * 4
    budget += workspaces_nbytes(torch.device("cuda"))
    given = {"machine": machine_of(card)} | options
    return ts.stream(model, device="cuda", home="host", budget=budget, **given)


def plan_of(model: nn.Module) -> Plan:
    last = handle_of(model).last
    assert last is not None
    (plan,) = last.plans
    return plan


def hidden(copies: Spans, computed: Iterable[tuple[float, float]]) -> float:
    """The part of the copies' seconds that lies within what is computed, which does not overlap itself."""
    within = sum(max(0.0, min(a, b) - max(start, begin)) for begin, b in computed for start, a in copies)
    return within / sum(end - start for start, end in copies)


def planned(plan: Plan) -> Timeline:
    found = plan.simulation
    spans = [(one.lane, (one.start_seconds, one.start_seconds + one.duration_seconds)) for one in found.timeline.spans]
    copies = [span for lane, span in spans if " to " in lane]
    computed = [span for lane, span in spans if lane == "compute"]
    return Timeline(plan.seconds, hidden(copies, computed), sum(found.bytes_moved.values()))


def trained(clock: Clock, card: Card, model: nn.Module, update: Any) -> tuple[Timeline, Timeline]:
    """What a step of training takes, and what its plan says."""
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=update, master=None, fused=True)
    x = torch.ones(ROWS, WIDE, device="cuda")

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    took = run(clock, card, step)
    return took, planned(plan_of(model))


def run(clock: Clock, card: Card, step: Callable[[], None]) -> Timeline:
    """The second step: the first one makes the plan, and begins with all blocks at home."""
    step()
    torch.cuda.synchronize()
    gc.collect()  # what other tests have left would go, and be waited for, at some moment of the step
    clock.set(card)
    step()
    torch.cuda.synchronize()
    copied = [one for one in clock.record() if one.name.startswith("copy")]
    kernels = [(one.start, one.end) for one in clock.record() if not one.name.startswith("copy")]
    part = hidden([(one.start, one.end) for one in copied], kernels)
    return Timeline(clock.host(), part, sum(one.nbytes for one in copied))
