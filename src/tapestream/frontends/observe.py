"""`Observation`: the model's first call with new shapes, block by block, each profiled where it stands."""

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.costs import StageCost
from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.frontends.check import check_deterministic
from tapestream.planning.profile import Alike, Travellers, profile_stage, unchanged_generators
from tapestream.runner.buffers import BufferSnapshot, buffer_slots
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import storages, take_apart
from tapestream.storage.meter import MemoryMeter, track_memory


@dataclass(slots=True)
class Segment:
    """Blocks called one after the other, each on exactly what the one before returned."""

    positions: list[int] = field(default_factory=list)
    costs: list[StageCost] = field(default_factory=list)
    traits: list[Traits] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    initial_nbytes: int = 0
    travellers: Travellers | None = None


@dataclass(slots=True)
class Observed:
    """What one observed call gave.

    ``before_nbytes``: tape of what runs before blocks (embeddings); ``turn_nbytes`` and ``turn_seconds``: what runs
    after the last block's
    forward and before its backward (head, loss).
    """

    segments: list[Segment]
    before_nbytes: int
    turn_nbytes: int
    turn_seconds: float


def split_arguments(
    position: int, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Callable[[Callable[..., Any]], Callable[[Any], Any]]]:
    """A block's state (its first argument) and a way to bind the others. Raises InputError where a gradient would be
    lost."""
    if not args:
        raise InputError(
            f"block {position} was called with keyword arguments only; pass the state as its first positional argument"
        )
    rest = args[1:]  # not args: the call's stages live until backward and must not keep the state
    if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((rest, kwargs))):
        raise InputError(
            f"block {position} takes a second tensor that requires a gradient; this is not supported yet: make it "
            f"part of "
            "the state (a tuple as first argument and as result), or detach() it"
        )

    def bind(original: Callable[..., Any]) -> Callable[[Any], Any]:
        return lambda state: original(state, *rest, **kwargs)

    return args[0], bind


class Observation:
    """Profiles one call of the model without side effects: generators, buffers and gradients are afterwards as
    before."""

    def __init__(
        self,
        model: nn.Module,
        store: BlockStore,
        blocks: Sequence[nn.Module],
        device: torch.device,
        progress: Callable[[str, int, int], None],
        *,
        verify: bool,
    ) -> None:
        self.model, self.store, self.blocks, self.device = model, store, blocks, device
        self.progress, self.verify = progress, verify
        self._alike: Alike = {}
        self.segments: list[Segment] = []
        self._last: tuple[torch.Tensor, ...] = ()
        self._outside: contextlib.ExitStack | None = None  # the meter of what runs between blocks
        self._meter: MemoryMeter | None = None
        self._before_nbytes = 0

    def run(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """Call the model once; `observe` sees its blocks."""
        inside = {id(m) for block in self.blocks for m in block.modules()}
        outside = [m for m in self.model.modules() if id(m) not in inside]
        snapshot = BufferSnapshot.take(buffer_slots(outside))
        try:
            with unchanged_generators(self.device):
                self._measure_outside()
                result = original(*args, **kwargs)
                if not self.segments:
                    raise InputError(
                        "the model's forward called none of its blocks; name the right ones with blocks=[...]"
                    )
                turn_nbytes, turn_seconds = self._turn(result)
        finally:
            self._stop_measuring()
            snapshot.put_back()
        return Observed(self.segments, self._before_nbytes, turn_nbytes, turn_seconds)

    def _turn(self, result: Any) -> tuple[int, float]:
        """Differentiate what the model returned down to the last block's output, as the user's backward will."""
        roots = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        leaves = [t for t in self._last if t.requires_grad]
        start = time.perf_counter()
        if roots and leaves:
            torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
        seconds = time.perf_counter() - start
        meter = self._stop_measuring()
        # A loss that the user computes from the result needs about its size twice, forward and backward.
        loss = sum(2 * t.nbytes for t in roots if t.numel() > 1)
        return (0 if meter is None else meter.peak_nbytes) + loss, seconds

    def _measure_outside(self) -> None:
        self._outside = contextlib.ExitStack()
        self._meter = self._outside.enter_context(track_memory(self.device))

    def _stop_measuring(self) -> MemoryMeter | None:
        meter, outside = self._meter, self._outside
        self._meter = self._outside = None
        if outside is not None:
            outside.close()
        return meter

    def observe(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Profile one block and return its output, cut off from the graph."""
        meter = self._stop_measuring()
        tree, bind = split_arguments(position, args, kwargs)
        state, tensors = take_apart(tree)
        linked = bool(self._last) and [id(t) for t in tensors] == [id(t) for t in self._last]
        if not linked:
            if meter is not None:
                self._before_nbytes += max(0, meter.end_nbytes - sum(storages(tensors).values()))
            self.segments.append(Segment(initial_nbytes=sum(storages(tensors).values()), travellers=Travellers(state)))
        segment = self.segments[-1]
        bare = Stage(position, self.blocks[position])
        stage = bare.calling(bind(original))
        block = self.store.uses[position]
        brought = block is not None and self.store.lend(block)
        try:
            if self.verify:
                check_deterministic([stage], state, self.device)
            cost, traits, out = profile_stage(stage, state, self.device, self._alike)
        finally:
            if block is not None and brought:
                self.store.give_back(block)
        _check_own(position, self.blocks[position], traits)
        segment.positions.append(position)
        segment.costs.append(cost)
        segment.traits.append(traits)
        segment.stages.append(bare)
        assert segment.travellers is not None
        segment.travellers.follow(state, out)
        self._last = tuple(
            t.detach().requires_grad_(requires) for t, requires in zip(out.tensors, out.requires, strict=True)
        )
        self.progress("profiling", sum(len(s.positions) for s in self.segments), len(self.blocks))
        self._measure_outside()
        return out.tree(self._last)


def _check_own(position: int, block: nn.Module, traits: Traits) -> None:
    """A gradient has to belong to a parameter of the block."""
    own = {id(p) for p in block.parameters()}
    strangers = [leaf for leaf in traits.leaves if id(leaf) not in own]
    if strangers:
        raise InputError(
            f"block {position} ({type(block).__name__}) uses a tensor of shape {tuple(strangers[0].shape)} that "
            f"requires a gradient and is not one of "
            "its parameters; this is not supported yet: make it a parameter of the block, or detach() it"
        )
