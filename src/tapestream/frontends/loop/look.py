"""Watching the first two steps of a loop: what they write, draw and reach, and whether they need a graph to run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy
import torch

from tapestream.capture.buffers import Slot, buffer_slots, held, put
from tapestream.capture.observe import UnknownModules, observed
from tapestream.capture.python_state import GENERATORS, key_of_generator, things_behind
from tapestream.capture.snapshot import Snapshot
from tapestream.errors import GradientError
from tapestream.executor.loop.form import Form, Leaf
from tapestream.executor.loop.sweep import NAME
from tapestream.executor.loop.traits import StepTraits, Sweep
from tapestream.frontends.loop.inputs import Called, Feed
from tapestream.frontends.loop.watch import Mask, Split, Watched, requires_of, watch
from tapestream.planning.profile import undisturbed
from tapestream.planning.repeating import KeepsState, check_runs_alike
from tapestream.runner.ambient import Autocast, HostGenerators, TorchGenerators, as_recompute
from tapestream.runner.belongings import Belongings, Change, undo
from tapestream.runner.captured import leaves_captured
from tapestream.runner.checkpointing import reentrant_checkpointing_off
from tapestream.runner.graph import next_sequence_number
from tapestream.runner.guards import refusing_backward
from tapestream.runner.left import left_by
from tapestream.runner.modes import unhooked
from tapestream.runner.nesting import covering
from tapestream.runner.stage import Stage
from tapestream.runner.state import replica, tensors_in
from tapestream.system.collector import collector_off


@dataclass(frozen=True, slots=True)
class Look:
    """The traits; the last state from which a step was watched, and its output."""

    traits: StepTraits
    state: Any
    output: Any


@covering()
@unhooked()
@as_recompute()
@collector_off()
def look_at(
    stage: Stage, state: Any, form: Form, feeds: Sequence[Feed], split: Split, device: torch.device,
    *, ended: Callable[[Any], bool] | None = None, verify: bool = False,
) -> Look:  # fmt: skip
    """Watch one step for each of ``feeds`` (at most two), from ``state``; one alone where ``ended`` accepts its state.

    Generators, buffers and other memory that it writes are as before afterwards. Raises InputError where the form of
    the state changes, and with ``verify`` GradientError where a step gives two results for one input.
    """
    for looks in stage.learning():
        snapshot = Snapshot.of(stage.modules)
        buffers = [(slot, held(slot)) for slot in buffer_slots(stage.modules)]
        try:
            own = tuple(things_behind(stage.function, GENERATORS))
            with undisturbed((stage,), device, own), reentrant_checkpointing_off():
                looking = _Looking(stage, form, split, device, snapshot, own, looks)
                return looking.look(state, feeds, ended, verify=verify)
        except UnknownModules as unknown:
            stage.reaches(unknown.modules)
        finally:
            _rebind(buffers)
            snapshot.put_back()
    raise AssertionError("the last try does not look")


def _rebind(buffers: Sequence[tuple[Slot, Any]]) -> None:
    """Let modules hold the buffers that they held; a step may have put its results in their places."""
    for slot, before in buffers:
        if isinstance(before, torch.Tensor) and held(slot) is not before:
            put(slot, before)


@dataclass(slots=True)
class _Looking:
    """Watches steps of one kind. ``own``: generators of their own; others are found on the way.
    ``looks``: at calls of modules that nobody knows."""

    stage: Stage
    form: Form
    split: Split
    device: torch.device
    snapshot: Snapshot
    own: tuple[Any, ...]
    looks: bool
    torch_before: TorchGenerators = field(init=False)
    host_before: HostGenerators = field(init=False)

    def __post_init__(self) -> None:
        self.torch_before, self.host_before = TorchGenerators.capture(self.device), HostGenerators.capture(self.own)

    def look(self, state: Any, feeds: Sequence[Feed], ended: Callable[[Any], bool] | None, *, verify: bool) -> Look:
        """See `look_at`."""
        stage, form, split, step = self.stage, self.form, self.split, self.stage.function
        first, behind = requires_of(form.leaves(state)), _leaves_of(stage, feeds)
        belongings = Belongings(stage.modules, step)
        since = next_sequence_number()
        with refusing_backward(NAME, [*stage.parameters(), *leaves_captured(step)]):
            found = [self._watch(state, first, feeds[0], 0)]
        first_written = self.snapshot.buffers.changed()

        def repeats() -> bool:
            self.again()
            once_more = watch(step, state, first, form, feeds[0], split, 0)
            return _same([(list(form.leaves(once_more.state)), _outputs(once_more))], found)

        left: list[Change] = []
        of_generators, replaced = check_runs_alike(stage, belongings, repeats, left, self.snapshot.observations[0])
        mask = found[0].requires
        twice = len(feeds) > 1 and not (ended is not None and ended(found[0].state))
        for _ in range((1 + len(mask)) * twice):  # each but the last adds a leaf to the mask
            found.append(self._watch(found[0].state, mask, feeds[1], 1))
            try:
                _check_threaded(found[-1].captured, since)
            except KeepsState:
                undo([*left, *replaced])
                raise
            if _either(mask, found[-1].requires) == mask:
                break
            mask = _either(mask, found[-1].requires)  # a gradient that takes several steps to arrive
        still = {id(leaf) for leaf in _leaves_of(stage, feeds)}
        behind = [leaf for leaf in behind if id(leaf) in still]  # others are results that a step has left, and replaces
        traits = self._drawn_and_written(_merged(behind, found, first, mask, self.device), first_written)
        traits = replace(
            traits,
            leaves_behind=len(left) > len(of_generators),
            left_nbytes=sum(nbytes for _, nbytes in left_by(replaced)),
            left_graph=any(t.grad_fn is not None for t in tensors_in([change.now() for change in replaced])),
        )
        self.again()
        # With a third run the generators were elsewhere when the second began.
        runs = [found[0], found[1]] if len(found) == 2 else [found[0]]
        if traits.sweep is not Sweep.GRAPH and _bare_runs_alike(step, state, form, feeds, split, runs):
            traits = replace(traits, sweep=Sweep.PLAIN)
        if verify or traits.sweep is not Sweep.PLAIN:  # else the bare runs have shown it
            self.again()
            check_repeats(found[0].state, watch(step, state, first, form, feeds[0], split, 0).state, form)
        return Look(traits, found[0].state if twice else state, found[-1].output)

    def again(self) -> None:
        """Have generators, buffers and other memory as they were before the first step."""
        self.torch_before.restore()
        self.host_before.restore()
        self.snapshot.put_back()

    def _watch(self, state: Any, requires: Mask, feed: Feed, number: int) -> Watched:
        arguments = tensors_in([feed.row, *self.form.leaves(state)])
        around = partial(self._observing, arguments)
        return watch(self.stage.function, state, requires, self.form, feed, self.split, number, around)

    @contextmanager
    def _observing(self, arguments: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> Iterator[None]:
        with observed([*arguments, *copies], self.stage.modules, calls=self.looks) as seen:
            self.snapshot.observations.append(seen)
            yield

    def _drawn_and_written(self, traits: StepTraits, first_written: Sequence[Slot]) -> StepTraits:
        """With what the steps that were watched have drawn from and written into."""
        seen = self.snapshot.observations
        drawn = (one for each in seen for one, _ in each.generators)
        generators = {key_of_generator(one): one for one in (*drawn, *self.own)}
        drew = len(generators) > len(self.own) or not self.host_before.equals(HostGenerators.capture(self.own))
        written = dict.fromkeys((*first_written, *self.snapshot.buffers.changed()))  # two steps may undo each other
        return replace(
            traits,
            buffers=tuple(written),
            cells=tuple({cell.key: cell for each in seen for cell in each.cells}.values()),
            draws_torch=not self.torch_before.still(),
            draws_host=drew,
            generators=tuple(generators.values()),
        )


def _check_threaded(captured: Sequence[torch.Tensor], since: int) -> None:
    """``since``: the sequence number of the first node of the steps that are watched."""
    for tensor in captured:
        if tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() >= since:
            raise KeepsState(
                f"Loop: a step reads a tensor of shape {tuple(tensor.shape)} that an earlier step has left in a buffer "
                "or elsewhere, and through which a gradient flows; pass it through the state, or use ts.Program"
            )


def _leaves_of(stage: Stage, feeds: Sequence[Feed]) -> list[torch.Tensor]:
    """Tensors that the step, or a function as ``inputs=``, reaches and that may get a gradient, each once."""
    found = [*stage.parameters(), *things_behind(stage.function, (torch.Tensor,))]
    if isinstance(feeds[0].source, Called):
        found += things_behind(feeds[0].source.function, (torch.Tensor,))
    return list({id(tensor): tensor for tensor in found if tensor.requires_grad}.values())


def _merged(
    behind: Sequence[torch.Tensor], found: list[Watched], first: Mask, mask: Mask, device: torch.device
) -> StepTraits:
    autocast = Autocast.capture(device)
    leaves = {id(leaf): leaf for one in found for leaf in (*one.leaves, *one.captured)}
    leaves |= {id(leaf): leaf for leaf in behind}
    stand_ins = [(i, leaf.dtype) for i, leaf in enumerate(leaves.values()) if leaf.grad_fn is not None]
    if autocast.enabled:
        casts = frozenset[int]().union(*(one.casts for one in found)).difference(*(one.uncast for one in found))
        dtype = autocast.dtype(device)
        stand_ins += [(i, dtype) for i, (key, leaf) in enumerate(leaves.items()) if key in casts and leaf.is_leaf]
    mutates = frozenset[int]().union(*(one.mutates for one in found))
    repeated = frozenset[int]().union(*(one.repeated for one in found))
    return StepTraits(
        sweep=Sweep.GRAPH if any(one.calls_autograd for one in found) else Sweep.HOOKS,
        requires_first=first,
        requires=mask,
        mutates=mutates,
        guarded=bool(mutates) or any(one.escapes for one in found),
        makes_leaves=any(one.makes_leaves for one in found),
        leaves=tuple(leaves.values()),
        stand_ins=tuple(stand_ins),
        aliases=tuple(sorted(frozenset.intersection(*(one.aliases for one in found)))),
        nodes=max(1, *(one.nodes for one in found)),
        used_again=frozenset(i for i, leaf in enumerate(leaves.values()) if leaf.grad_fn or id(leaf) in repeated),
        state_used_again=found[0].state_repeated,
        outputs_require=tuple(map(any, zip(*(one.output_requires for one in found), strict=True))),
    )


def _bare_runs_alike(
    step: Callable[..., Any], state: Any, form: Form, feeds: Sequence[Feed], split: Split, found: Sequence[Watched]
) -> bool:
    """Whether the same steps under ``no_grad`` give what was ``found``; not where one raises."""
    written = frozenset[int]().union(*(one.mutates for one in found))
    leaves, pairs = list(form.leaves(state)), dict[int, Any]()
    for i in sorted(written):  # these are tensors
        pairs.setdefault(id(leaves[i]), replica(leaves[i]))
    for leaf in leaves:  # steps leave the rest as it was; but hooks, names, and requires_grad_() are not for the user's
        pairs.setdefault(id(leaf), leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    tree = form.build([pairs[id(leaf)] for leaf in leaves])
    del leaves, pairs
    with torch.no_grad():
        for number, one in enumerate(found):
            try:
                tree, output = split(step(tree, *feeds[number].given()), number)
            except Exception:  # the step differentiates something of its own, or needs its graph otherwise
                return False
            # At once: the next step may write into its state, and holds less without this one's output.
            if not _same([(list(form.leaves(tree)), list(Form.of(output).leaves(output)))], [one]):
                return False
            del output
    return True


def _same(runs: list[tuple[Any, Any]], found: list[Watched]) -> bool:
    if len(runs) != len(found):
        return False
    for (state, output), one in zip(runs, found, strict=True):
        expected = (*Form.of(one.state).leaves(one.state), *_outputs(one))
        if not all(_equal(a, b) for a, b in zip((*state, *output), expected, strict=True)):
            return False
    return True


def _outputs(one: Watched) -> list[Any]:
    return list(Form.of(one.output).leaves(one.output))


def _equal(a: Any, b: Any) -> bool:
    if not isinstance(a, torch.Tensor):
        return True
    both = isinstance(b, torch.Tensor) and a.shape == b.shape and a.dtype == b.dtype
    return both and (torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all()))


def check_repeats(one: Any, other: Any, form: Form) -> None:
    """Raise GradientError naming the first leaf in which the states after two runs from one state differ."""
    part = first_difference(one, other, form)
    if part is not None:
        raise GradientError(
            f"Loop: the step is not deterministic: two runs with the same state, random state and buffers give "
            f"different {part.name}. Gradients of a recomputed step would be wrong; take its randomness from "
            "torch's, Python's or NumPy's generators, and keep counts in the state"
        )


def first_difference(one: Any, other: Any, form: Form) -> Leaf | None:
    """The first leaf in which two states of that form differ."""
    pairs = zip(form.parts, form.leaves(one), form.leaves(other), strict=True)
    return next((part for part, a, b in pairs if not _repeated(part, a, b)), None)


def _repeated(part: Leaf, a: Any, b: Any) -> bool:
    if part.kind is torch.Tensor:
        return _equal(a, b)
    if part.kind is None:
        return a is b or bool(a == b)
    return bool(numpy.array_equal(a, b, equal_nan=part.dtype.kind in "fc"))


def _either(a: Mask, b: Mask) -> Mask:
    return tuple(x or y for x, y in zip(a, b, strict=True))
