"""`Micro`: one of the micro-batches that pass the blocks together."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from tapestream.errors import GradientError
from tapestream.frontends.module.accumulating.threads import BlockRequest, Ended, ForwardThread
from tapestream.frontends.module.observing.arguments import Link
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.runner import Gradients
from tapestream.runner.stage import Stage


@dataclass(slots=True)
class Micro:
    """``begins``: PyTorch's generators as plain PyTorch would have them at the start; ``generators``: as they are for
    this one by now. ``answer``: of its thread; ``result``: what it is to be given; ``stages``: of the segment that is
    under way; ``roots``: by block call, what it was given that is no block's; ``edges``: of what a block call has
    returned; ``apart``: by id of a leaf, what some of its pieces have given that leaf."""

    number: int
    planned: Prepared
    thread: ForwardThread
    begins: TorchGenerators
    generators: TorchGenerators
    answer: BlockRequest | Ended | None = None
    result: Any = None
    begun: bool = False
    link: Link = field(default_factory=Link)
    stages: list[Stage] = field(default_factory=list)
    roots: dict[int, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    edges: dict[int, list[GradientEdge | None]] = field(default_factory=dict)
    apart: dict[int, torch.Tensor | None] = field(default_factory=dict)
    _caught: dict[int, Gradients] = field(default_factory=dict)  # by block call

    def advance(self) -> BlockRequest | Ended:
        """Let it go on to its next block, or its end."""
        result, self.result = self.result, None
        if self.begun:
            self.answer = self.thread.go_on(result)
        else:
            self.begun = True
            self.answer = self.thread.start()
        return self.answer

    def catch(self, call: int, cotangents: Sequence[torch.Tensor | None]) -> None:
        """What a backward behind a block call gives it, of all that the block has returned or of some."""
        before = self._caught.get(call, [None] * len(cotangents))
        if any(a is not None and b is not None for a, b in zip(before, cotangents, strict=True)):
            raise GradientError(
                "what a block returns is used by the next block and by code outside of the blocks, unlike in the "
                "profiled call, so that parts of its gradient would be added in another order: call backward() for "
                "each micro-batch"
            )
        self._caught[call] = [b if a is None else a for a, b in zip(before, cotangents, strict=True)]

    def gradients(self, call: int, given: Gradients | None, root: torch.Tensor) -> Gradients:
        """Of what a block call has returned. ``given``: by the next block, through what hooks the user's code has put
        there; ``root``: what the graph starts from."""
        edges = self.edges.pop(call)
        pairs = [
            (e, g) for e, g in zip(edges, given or [], strict=given is not None) if e is not None and g is not None
        ]
        if pairs:
            found, cotangents = [e for e, _ in pairs], [g for _, g in pairs]
            pairs.clear()
            if given is not None:
                given.clear()
            torch.autograd.grad(found, root, cotangents, allow_unused=True)
        return self._caught.pop(call, [None] * len(edges))
