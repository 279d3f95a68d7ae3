"""`outline`: what one training step of any model takes, found on fake tensors: nothing is allocated or computed."""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from tapestream.costs import StageCost
from tapestream.costs.rates import Work
from tapestream.errors import InputError, TapestreamError
from tapestream.frontends.loss import Chunks
from tapestream.frontends.module.blocks import BlockNames, find_blocks
from tapestream.frontends.module.homes.adopt import parameter_groups, parameters_of
from tapestream.frontends.module.homes.tables import find_tables, may_be_table
from tapestream.frontends.module.homes.wide import DirectUse, reads_parameters, wide_modules
from tapestream.frontends.module.lazy_logits import compute_lazily, find_head, is_lazy
from tapestream.frontends.module.observing.arguments import BlockRun, Link
from tapestream.frontends.outlines.alike import Alike
from tapestream.frontends.outlines.fake import FakeMeter, fake_tensors, faked, storages
from tapestream.frontends.outlines.outline import Outline, Outlined, Segment
from tapestream.runner.ambient import as_recompute
from tapestream.runner.guards import Guard
from tapestream.runner.private import may_change, tensors_in
from tapestream.runner.stage import Stage
from tapestream.runner.state import State, take_apart
from tapestream.storage.meter import MemoryMeter
from tapestream.system.collector import collector_off


def outline(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    device: str = "cpu",
    blocks: BlockNames | None = None,
    moves: bool = True,
    loss_chunks: Chunks | None = None,
    tables: BlockNames | None = None,
    head: str | None = None,
) -> Outline:
    """The Outline of ``model(*args, **kwargs)`` and its backward. Tensors may lie on meta: only their shapes count.

    Every block runs on fake tensors; those whose graphs save tensors of the same shapes are measured once. A scalar
    that the model returns is taken as the loss, otherwise the sum of all that it returns. ``device="cuda"``: attention
    as fused as GPUs have it. ``moves``: whether blocks may leave the device, embeddings and heads with them where
    ``blocks`` are not named. ``loss_chunks``, ``tables``, ``head``: as `tapestream.stream` takes them. The model's
    tensors are afterwards as before.
    Raises InputError for a model without blocks, for one without such a head where the loss is to be in chunks, and for
    one that cannot run without the values of its tensors.
    """
    found = find_blocks(model, blocks)
    looked_up = find_tables(model, found, tables)
    wide = wide_modules(model, found, looked_up) if moves and blocks is None else []
    lazy = None if loss_chunks is None else (find_head(model, head, found), loss_chunks)
    while True:
        outlined, direct = _outlined(model, args, kwargs or {}, device, found, wide, lazy)
        if not direct:
            return _with_tables(outlined, model, found, looked_up)
        wide = [m for k, m in enumerate(wide, len(found)) if outlined.uses[k] not in direct]


def _with_tables(
    found: Outline, model: nn.Module, blocks: Sequence[nn.Module], tables: Sequence[nn.Embedding]
) -> Outline:
    """``found`` with these tables off the device, and the names of others that might be."""
    away = {id(p): p for module in tables for p in module.parameters()}
    names = (name for name, module in model.named_modules() if module not in tables)
    trained = {
        name: any(p.requires_grad for p in model.get_submodule(name).parameters())
        for name in names
        if may_be_table(model, blocks, name)
    }
    outside = tuple(p for p in found.outside if id(p) not in away)
    return replace(found, outside=outside, tables=tuple(away.values()), look_up=trained)


def _outlined(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: str,
    blocks: Sequence[nn.Module],
    wide: Sequence[nn.Module],
    head: tuple[nn.Linear, Chunks] | None,
) -> tuple[Outline, Set[int]]:
    """The Outline with these modules streamed, and the parameter blocks that code uses outside of their calls."""
    groups, uses = parameter_groups(model, blocks, wide)
    modules = [*blocks, *wide]
    with fake_tensors(device, model) as meter:
        observed = _Outlining(model, meter, modules, uses, len(blocks))
        with _lazily(head, observed), _watched(modules, observed.observe), collector_off(), torch.enable_grad():
            try:
                turn_nbytes = observed.run(*faked((args, kwargs)))
            except TapestreamError:
                raise
            except Exception as error:
                raise InputError(
                    f"{type(model).__name__} could not be run without the values of its tensors "
                    f"({type(error).__name__}: {next(iter(str(error).splitlines()), '')}); check the example batch, or "
                    "plan it as it is, in Python: tapestream.plan(model, batch)"
                ) from error
    inside = {id(p) for module in modules for p in module.parameters()}
    found = Outline(
        tuple(observed.segments),
        tuple(modules),
        len(blocks),
        tuple(uses),
        tuple(parameters_of([modules[position] for position in group]) for group in groups),
        tuple(p for p in model.parameters() if id(p) not in inside),
        sum(b.nbytes for b in model.buffers()),
        observed.before_nbytes,
        turn_nbytes,
        # Of what head and loss do, twice as much in the backward as in the forward.
        {operation: 3 * count for operation, count in observed.outside.items()},
    )
    return found, observed.direct.found


@contextlib.contextmanager
def _lazily(head: tuple[nn.Linear, Chunks] | None, observed: "_Outlining") -> Iterator[None]:
    """``head`` makes no logits, as in `tapestream.stream`; what reads its weight is a call of it, where it moves."""
    if head is None:
        yield
        return
    linear, chunks = head
    own, observed.head = type(linear), linear
    compute_lazily(linear, chunks, lambda: partial(observed.reading, linear))
    try:
        yield
    finally:
        linear.__class__ = own


@contextlib.contextmanager
def _watched(blocks: Sequence[nn.Module], observe: Callable[..., Any]) -> Iterator[None]:
    """Calls of ``blocks`` go to ``observe``, as in `tapestream.stream`."""
    classes = [type(block) for block in blocks]
    for position, (block, base) in enumerate(zip(blocks, classes, strict=True)):
        block.__class__ = type(base.__name__, (base,), {"__call__": _calling(observe, position, base)})
    try:
        yield
    finally:
        for block, base in zip(blocks, classes, strict=True):
            block.__class__ = base


def _calling(observe: Callable[..., Any], position: int, base: type) -> Callable[..., Any]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return observe(position, lambda *a, **k: base.__call__(self, *a, **k), args, kwargs)

    return call


class _Outlining:
    """One run of the model; the counterpart of `frontends.module.observing.observe.Observation` on fake tensors."""

    def __init__(
        self, model: nn.Module, meter: FakeMeter, modules: Sequence[nn.Module], uses: Sequence[int | None], wide: int
    ) -> None:
        """``wide``: the position of the first of ``modules`` that is no repeated block."""
        self.model, self.meter, self.modules = model, meter, modules
        coming = {k: use for k, use in enumerate(uses) if k >= wide and use is not None}
        self.direct = DirectUse({id(p): use for k, use in coming.items() for p in modules[k].parameters()})
        self.segments: list[Segment] = []
        self.head: nn.Linear | None = None
        self.before_nbytes = 0
        self.outside: Work = {}
        self._costs: dict[object, Outlined] = {}
        self._alike = Alike[Outlined](modules)
        self._link = Link()
        self._root = torch.empty(0, requires_grad=True, device="cpu")
        self._measuring = contextlib.ExitStack()
        self._section = MemoryMeter()
        self._held: tuple[torch.Tensor, ...] = ()

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Call the model once and differentiate what follows its last block; the bytes that this takes."""
        self._measure_outside()
        result = self.model(*args, **kwargs)
        self.outside = Counter(self.meter.work)
        if not self.segments:
            raise InputError(f"the forward of {type(self.model).__name__} called none of its blocks")
        roots = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        roots = [t for t in roots if t.dim() == 0] or roots
        leaves = [t for t in self._link.tensors if t.requires_grad]
        made: tuple[torch.Tensor | None, ...] = ()
        if roots and leaves:
            made = torch.autograd.grad(roots, leaves, [torch.ones_like(t) for t in roots], allow_unused=True)
        self._measuring.close()
        loss = sum(3 * t.nbytes for t in roots if t.numel() > 1)  # as for a real profile: the user's own loss
        return max(0, self._section.rise_nbytes - sum(storages(t for t in made if t is not None).values())) + loss

    def _measure_outside(self, *held: torch.Tensor) -> None:
        """Measure until the next block; ``held``: its input, which the caller drops without making room by that."""
        self._held = held
        if self.direct.parameters:
            self._measuring.enter_context(self.direct)
        self._section = self._measuring.enter_context(self.meter.measured())

    def observe(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """One block's call."""
        module = self.modules[position]
        if (self.head is module and is_lazy(self.head, args, kwargs)) or self.direct.keeps(module, args, kwargs):
            return original(*args, **kwargs)
        self._measuring.close()
        self._held = ()
        with self.meter.counted():
            state, result = self._observed(position, original, args, kwargs)
        self._measure_outside(*state)
        return result

    def reading(self, head: nn.Linear, function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
        """A function that reads the weight of ``head``."""
        position = next((k for k, module in enumerate(self.modules) if module is head), None)
        return function(*tensors) if position is None else self.observe(position, function, tensors, {})

    def _observed(
        self, position: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Sequence[torch.Tensor], Any]:
        """The tensors of a block's input, and its output."""
        bare = Stage(position, self.modules[position])
        call = self._alike.of(position, args, kwargs)
        known = None if call is None else call.known()
        function = (
            original
            if call is None
            else call.noting(original, self.modules[position])
            if known is None
            else call.returning
        )
        run = BlockRun(bare.name, function, bare.modules, args, kwargs, self._link)
        run.keep_arguments(clone=True)
        before = storages(run.tensors)
        self.before_nbytes += max(0, self._section.end_nbytes - (0 if run.linked else sum(before.values())))
        if not run.linked:
            self.segments.append(Segment(sum(before.values())))
        state, tensors = take_apart(run.tensors)
        with as_recompute():
            if known is None:
                found, out = self._cost(position, run, tensors)
            else:
                found, out = known, take_apart(run(tensors))[0]
        if call is not None and known is None:
            call.learn(found)
        segment = self.segments[-1]
        segment.stages.append(replace(found.cost, reads_parameters=reads_parameters(self.modules[position])))
        segment.works.append(found.works)
        segment.behind.append(found.behind_nbytes)
        segment.positions.append(position)
        segment.follow(before, storages(out.tensors))
        self.before_nbytes += _taken_over(run, args, kwargs)
        outputs = tuple(self._guarded(bare.name, t, r) for t, r in zip(out.tensors, out.requires, strict=True))
        result, self._link = run.finish(out, outputs)
        return state.tensors, result

    def _guarded(self, name: str, tensor: torch.Tensor, requires: bool) -> torch.Tensor:
        if not requires:
            return tensor.detach()
        guarded: torch.Tensor = Guard.apply(self._root, tensor, name)  # type: ignore[no-untyped-call]
        return guarded

    def _cost(self, position: int, run: BlockRun, tensors: Sequence[torch.Tensor]) -> tuple[Outlined, State]:
        """What a block's call takes, and its output."""
        name, held = run.name, storages(tensors)
        inputs = tuple(self._guarded(name, t.detach(), t.requires_grad) for t in tensors)
        shapes: list[object] = []
        with (
            self.meter.counted() as forward,
            self.meter.measured() as section,
            saved_tensors_hooks(lambda t: shapes.append((t.shape, t.dtype)), _lost),
        ):
            out, _ = take_apart(run(inputs))
            del _
        nbytes = sum(n for key, n in storages(out.tensors).items() if key not in held)
        parameters = [p for p in self.modules[position].parameters() if p.requires_grad]
        work = frozenset(forward.items())
        kind = (tuple(shapes), work, nbytes, section.peak_nbytes, out.requires, len(parameters))
        if kind not in self._costs:
            cost, backward, behind = self._measured(run, tensors, nbytes, parameters)
            extra = max(0, section.peak_nbytes - nbytes)
            self._costs[kind] = Outlined(replace(cost, forward_extra_nbytes=extra), (forward, backward), behind)
        return self._costs[kind], out

    def _measured(
        self, run: BlockRun, tensors: Sequence[torch.Tensor], nbytes: int, parameters: Sequence[torch.Tensor]
    ) -> tuple[StageCost, Work, int]:
        """A recorded run and its backward, the operations of that, and bytes behind the cotangents that it gives."""
        held: set[int] = set()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            held.update(storages((tensor,)))
            return tensor.detach()

        inputs = tuple(self._guarded(run.name, t.detach(), t.requires_grad) for t in tensors)
        with self.meter.measured() as recorded, saved_tensors_hooks(pack, lambda t: t):
            out, live = take_apart(run(inputs))
        before, after = storages(inputs), storages(out.tensors)
        roots = [t for t in live if t.requires_grad]
        states = [t for t in inputs if t.requires_grad]
        leaves = [*states, *parameters]
        cotangents = [torch.ones_like(t) for t in roots]
        made: tuple[torch.Tensor | None, ...] = ()
        with self.meter.counted() as backward, self.meter.measured() as section:
            if roots and leaves:
                made = torch.autograd.grad(roots, leaves, cotangents, allow_unused=True)
        given = [t for t in made[: len(states)] if t is not None]
        behind = max(0, sum(storages(given).values()) - sum(t.nbytes for t in given))
        saved = max(0, recorded.end_nbytes - nbytes)
        cost = StageCost(
            0.0,
            0.0,
            nbytes,
            saved,
            reads_input=any(key in before for key in held),
            reads_output=any(key in after and key not in before for key in held),
            backward_extra_nbytes=max(
                -saved, section.peak_nbytes - sum(storages(t for t in made if t is not None).values())
            ),
            cotangent_nbytes=sum(t.nbytes for t, req in zip(out.tensors, out.requires, strict=True) if req),
            record_extra_nbytes=max(0, recorded.peak_nbytes - recorded.end_nbytes),
            saved_storages=len(held - {*before, *after, *storages(parameters)}),
        )
        return cost, backward, behind


def _lost(_: Any) -> Any:
    raise InputError("a block differentiates something of its own; plan it in Python: tapestream.plan(model, batch)")


def _taken_over(run: BlockRun, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Let objects among the arguments (key-value caches) have what the block did to them; bytes that they gained."""
    changing = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if may_change(leaf)]
    before = storages(tensors_in(changing))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fake tensors have no address to be counted by
        run.take_over()
    return max(0, sum(storages(tensors_in(changing)).values()) - sum(before.values()))
