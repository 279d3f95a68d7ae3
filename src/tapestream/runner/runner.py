"""`Runner`: forward, record and backward of single stages within one live call."""

import contextlib
import weakref
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from tapestream.accelerator.device import is_accelerator
from tapestream.capture.rebinding import Rebinding
from tapestream.errors import GradientError, InputError, ScheduleError
from tapestream.runner.ambient import Autocast, as_recompute
from tapestream.runner.casts import SharedCasts
from tapestream.runner.counts import digest_of
from tapestream.runner.entry import Entry, Tape
from tapestream.runner.fused import PartBorders
from tapestream.runner.graph import gradient_edges, reached_leaves, root_of_graph, user_of
from tapestream.runner.guards import (
    Guard,
    Pack,
    Unpack,
    Watch,
    check_versions,
    escaped,
    hooks_off,
    mark,
    with_copies_of,
    with_versions,
)
from tapestream.runner.inside import Giving, Keeping, Otherwise
from tapestream.runner.kernels import algorithms_not_tried
from tapestream.runner.modes import Surroundings, as_a_stage
from tapestream.runner.seen import Seen, Versions, first_run, settled, written
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State, replica, take_apart, tensors_in
from tapestream.runner.stills import Look
from tapestream.runner.unneeded import End, LeftOut, end_left_out

Gradients = list[torch.Tensor | None]
Sums = Mapping[int, tuple[torch.Tensor, torch.Tensor]]


class Runner:
    """Runs the stages of one live call; a recompute sees what the first run saw.

    States are given in lists, which are emptied: of a stage of several parts nothing but its graph, and whoever has
    kept it, then holds the state before it. (A part at work holds its own.)
    ``hooks`` gives, per stage, the saved-tensor hooks to record under (None: plain recording). ``once``: stages that
    run a single time, so that nothing is noted for recomputes. ``resident``: parameters keep their addresses.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        traits: Sequence[Traits],
        device: torch.device,
        hooks: Callable[[int], tuple[Pack, Unpack] | None] | None = None,
        once: Container[int] = (),
        resident: bool = True,
        watch: Watch | None = None,
    ) -> None:
        self.stages, self.traits, self.device, self.hooks = stages, traits, device, hooks
        self._once, self._resident, self.autocast = once, resident, Autocast.capture(device)
        self._on_accelerator = is_accelerator(device)  # the data of parameters may go elsewhere, and come back
        self._surrounded = Surroundings(on_cpu=device.type == "cpu")
        self.watch = watch or Watch()  # open while a stage is recorded or differentiated
        self.seen: dict[int, Seen] = {}
        self.inside: dict[int, deque[Any]] = {}  # what runs have kept for their recomputes
        self.runs, self._running = 0, [""]  # the name of the part at work
        self._root = root_of_graph()  # what guards start from: a state would be held by its own leaf
        self._casts = SharedCasts.find(stages, traits) if self.autocast.enabled else SharedCasts({}, {})

    def forward(self, k: int, states: list[State], *, keep_inside: bool = False) -> State:
        """Run stage ``k`` on the only one of ``states`` and keep nothing but its output; with ``keep_inside`` also what
        `tapestream.runner.inside` names."""
        traits, first = self.traits[k], k not in self.seen
        if not first:
            self._settle_counts(k, states[0])
        with self._surroundings(k), Keeping() if keep_inside else contextlib.nullcontext() as keeping:
            if keeping is not None:
                self.inside[k] = keeping.found
            if traits.plain_forward and keeping is None:  # kernels may make less there
                with torch.no_grad():
                    tree = self._call(k, states, [t.detach() for t in self._inputs(k, states[0])])
                out, _ = take_apart(tree)
                # Such a stage gave all its floating outputs a gradient; where one has none, a cotangent too many is
                # dropped.
                out = replace(out, requires=tuple(t.is_floating_point() or t.is_complex() for t in out.tensors))
            else:
                pack, unpack = self._dropping(k, keep=traits.calls_autograd)
                with saved_tensors_hooks(pack, unpack):
                    guarded, _ = self.guarded(k, states[0])
                    tree = self._call(k, states, guarded)
                out, _ = take_apart(tree)
        counted = self.seen[k].counted
        if counted is not None:
            self.seen[k] = replace(self.seen[k], counted=replace(counted, digest=digest_of(out.tensors)))
        return out

    def record(self, k: int, states: list[State], *, output_needed: bool = True) -> tuple[State, Tape]:
        """Run stage ``k`` on the only one of ``states`` and keep its saved tensors in a Tape.

        Unless its output is needed, a recompute may leave out what follows the last saved tensor; the state then has no
        tensors.
        """
        if k in self.seen:
            self._settle_counts(k, states[0])
        end, again = self.traits[k].end, [*states]
        # What backward reads of a state of several tensors may be one of them: the others would be held for nothing.
        held = len(self.stages[k].parts) == 1 or len(states[0].tensors) == 1
        if end is None or end.failed or output_needed or not held or k not in self.seen:
            end = None
        if end is None and k not in self.inside:
            again.clear()
        try:
            return self._record(k, states, end)
        except Exception as error:  # the user's code may stumble over numbers that are none, too
            if not again:
                raise
            if end is not None and not isinstance(error, Otherwise):
                end.failed = True
            self.inside.pop(k, None)  # the failed graph has what it was given
            return self._record(k, again, None)
        finally:
            self.inside.pop(k, None)

    def _record(self, k: int, states: list[State], end: End | None) -> tuple[State, Tape]:
        borders = PartBorders(self.stages[k].parts)
        given = Giving(self.inside[k]) if k in self.inside else contextlib.nullcontext()
        with self._surroundings(k), given:
            with self.watch.opened(), self._recording(k, end) as left_out:
                guarded, inputs = self.guarded(k, states[0])
                own = [weakref.ref(t) for t in guarded]
                with self._casts.standing_in(k, self.autocast.dtype(self.device)) as stood_for:
                    tree = self._call(k, states, guarded, borders)
            out, live = take_apart(tree)
        if isinstance(given, Giving):
            given.check()
        own += borders.inputs
        mine = self.own_leaves([t for t in (reference() for reference in own) if t is not None])
        reached = reached_leaves(live, borders.starts[0], borders.name_of, mine)
        if self.traits[k].makes_leaves:
            known = {id(leaf) for leaf in self.traits[k].leaves}
            reached = [leaf for leaf in reached if id(leaf) in known or id(leaf) in stood_for]
        owners = [stood_for.get(id(leaf), leaf) for leaf in reached]
        places = gradient_edges(reached) if self._on_accelerator else reached
        self._check_known(owners, k, lambda stranger: borders.name_of(user_of(live, stranger)))
        # Plans count a stage's cotangents as long as it is differentiated; of several parts, as long as the last is.
        entry = Entry(live, giving=len(self.stages[k].parts) > 1)
        if isinstance(left_out, LeftOut):
            out = replace(out, tensors=())
            del tree, live
            left_out.check_dropped()
        return out, Tape(inputs, entry, reached, owners, places, borders.watch)

    def _recording(self, k: int, end: End | None) -> contextlib.AbstractContextManager[object]:
        hooks = None if self.hooks is None else self.hooks(k)
        seen = self.seen.get(k)
        if seen is not None and seen.contents is not None:
            hooks = with_copies_of(seen.contents.cells, *(hooks or with_versions(self.stages[k].name)))
        if end is not None:
            return end_left_out(end, *(hooks or with_versions(self.stages[k].name)), self.device)
        return contextlib.nullcontext() if hooks is None else saved_tensors_hooks(*hooks)

    def backward(
        self, k: int, tape: Tape, cotangents: Gradients, sums: Sums, begun: Gradients | None = None
    ) -> tuple[Gradients, list[tuple[torch.Tensor, torch.Tensor]]]:
        """Consume ``tape``, and of a stage of several parts ``cotangents`` (the list is emptied): cotangents of the
        inputs, and (leaf, gradient) pairs.

        ``sums``: by ``id`` of a leaf, the leaf and the gradient that later stages have accumulated for it. It enters as
        an extra root, so that the additions happen in the order of plain autograd; the pair returned is the new sum.
        ``begun``: the same for inputs, where others have used them too.
        """
        if len(tape.entry.takes) != len(cotangents):
            raise GradientError(
                f"{self.stages[k].name} returned another structure when it was recomputed ({len(tape.entry.takes)} "
                f"tensors) than at first ({len(cotangents)}); it must depend on nothing but its input, its buffers and "
                "the global random generators"
            )
        begun = begun or [None] * len(tape.inputs)
        entering: list[tuple[Any, torch.Tensor]] = [*tape.entry.roots(cotangents)]
        if not entering:
            return begun, []
        entering += _both(tape.inputs, begun)
        trio = zip(tape.leaves, tape.owners, tape.places, strict=True)
        thawed = [(place, weight) for leaf, weight, place in trio if leaf.requires_grad]  # as in plain PyTorch
        entering += [(place, sums[id(weight)][1]) for place, weight in thawed if id(weight) in sums]
        wanted: list[Any] = [edge for edge in tape.inputs if edge is not None]
        if not wanted and not thawed:
            return [None] * len(tape.inputs), []
        with hooks_off(tape.leaves), self.watch.opened(), tape.watch.opened(), algorithms_not_tried(self.device):
            roots, seeds = zip(*entering, strict=True)
            made = torch.autograd.grad(roots, (*wanted, *(place for place, _ in thawed)), seeds, allow_unused=True)
        of_inputs = iter(made[: len(wanted)])
        cotangents_in = [None if edge is None else next(of_inputs) for edge in tape.inputs]
        for i in self.traits[k].dense:
            cotangent = cotangents_in[i]
            cotangents_in[i] = None if cotangent is None else cotangent.contiguous()
        pairs = zip((weight for _, weight in thawed), made[len(wanted) :], strict=True)
        return cotangents_in, [(weight, self._casts.finished(k, weight, g)) for weight, g in pairs if g is not None]

    def ran(self, k: int) -> None:
        """Stage ``k`` has been run elsewhere, drew no random numbers and wrote no buffers: what follows recomputes."""
        self.seen[k] = Seen(None, None, None, None, self._versions(k), self._look(k))

    def forget(self, k: int) -> None:
        """Drop what recomputes of stage ``k`` would need: there will be none."""
        self.seen.pop(k, None)

    def _settle_counts(self, k: int, state: State) -> None:
        """Before the first recompute of stage ``k``."""

        def again(seen: Seen) -> State:
            self.seen[k] = seen
            return self.forward(k, [state])

        if self.seen[k].counted is not None:
            self.seen[k] = settled(self.seen[k], again, self.stages, k)

    # -- one run ------------------------------------------------------------------------------------------------

    def _inputs(self, k: int, state: State) -> list[torch.Tensor]:
        # A stage that writes into its input gets a copy: the state may be kept, or be the caller's.
        mutates = self.traits[k].mutates
        return [replica(t) if i in mutates else t for i, t in enumerate(state.tensors)]

    def guarded(self, k: int, state: State) -> tuple[list[torch.Tensor], list[GradientEdge | None]]:
        """The stage's inputs behind guards, and where their cotangents leave its graph (None where none flow)."""
        guarded = [
            Guard.apply(self._root, t, self.stages[k].parts[0].name) if requires else t.detach()  # type: ignore[no-untyped-call]
            for t, requires in zip(self._inputs(k, state), state.requires, strict=True)
        ]
        return guarded, [get_gradient_edge(t) if r else None for t, r in zip(guarded, state.requires, strict=True)]

    def own_leaves(self, guarded: Sequence[torch.Tensor]) -> frozenset[int]:
        """Ids of what a run's graph may end at: the guards' root, and inputs that the stage itself asked to require
        a gradient."""
        return frozenset(id(t) for t in (self._root, *guarded))

    def _call(self, k: int, states: list[State], inputs: list[torch.Tensor], borders: PartBorders | None = None) -> Any:
        """Stage ``k`` on ``inputs``, part by part. Both lists are emptied."""
        state = states.pop()
        given, tree = list(state.tensors), state.tree(inputs)
        callers = given if k == 0 else []  # stay in sight: a later part may not write into them either
        inputs.clear()
        del state
        for number, part in enumerate(self.stages[k].parts):
            if number:
                given = [*callers, *tensors_in(tree)]
                if borders is not None:
                    borders.stand_before(part, tree)
            before = [t._version for t in given]
            self.runs, self._running[0] = self.runs + 1, part.name
            tree = part.function(tree)
            if [t._version for t in given] != before:
                raise GradientError(
                    f"{part.name} changed its input in place, which it did not do when it was profiled; "
                    "make the operation out of place"
                )
        return tree

    def _run_once(self, k: int) -> None:
        """Note the only run of a stage in ``once``."""
        if k in self.seen:
            raise ScheduleError(f"{self.stages[k].name} was to run once, and was asked for again")
        self.seen[k] = Seen(None, None, None, None, (), None)

    @contextlib.contextmanager
    def _surroundings(self, k: int) -> Iterator[None]:
        traits, seen = self.traits[k], self.seen.get(k)
        with contextlib.ExitStack() as stack:
            if seen is not None and k not in self._once:
                stack.enter_context(self._unchanged(k, seen))
                stack.enter_context(as_recompute())
                stack.enter_context(self._surrounded.again())
                stack.enter_context(hooks_off(traits.leaves))
            stack.enter_context(as_a_stage(self.device))  # innermost: to leave inference mode undoes a part of it
            if traits.rebinds:
                stack.enter_context(Rebinding())
            if self.autocast.enabled or Autocast.capture(self.device) != self.autocast:
                stack.enter_context(self.autocast.entered(cache=traits.casts_twice))
            if k in self._once:
                self._run_once(k)
                yield
            elif seen is None:
                with first_run(self.stages, k, traits, self.device, lambda: self._versions(k)) as found:
                    yield
                self.seen[k] = found[0]
            else:
                seen.restore(stack, self.device)
                yield

    def _unchanged(self, k: int, seen: Seen) -> contextlib.AbstractContextManager[None]:
        """Raise GradientError where a recompute would find another parameter, or another object, than the first run."""
        if (now := self._versions(k)) != seen.versions:
            check_versions(self._user_of(k, seen.versions, now), seen.versions, now, "a parameter of")
        if seen.look is None:
            return contextlib.nullcontext()
        stage, own = self.stages[k], () if seen.buffers is None else seen.buffers.slots
        return stage.stills.check(stage.name, seen.look, self._look(k), (*written(stage, self.traits[k]), *own))

    def _versions(self, k: int) -> Versions:
        return tuple(mark(leaf) if self._resident else leaf._version for leaf in self.traits[k].leaves)

    def _user_of(self, k: int, then: Versions, now: Versions) -> str:
        """The part of stage ``k`` that uses the first leaf of which the version is another now."""
        pairs = zip(self.traits[k].leaves, then, now, strict=True)
        leaf = next(leaf for leaf, a, b in pairs if a != b)
        users = (part.name for part in self.stages[k].parts if any(p is leaf for p in part.parameters()))
        return next(users, self.stages[k].name)

    def _look(self, k: int) -> Look:
        stage, traits = self.stages[k], self.traits[k]
        return stage.stills.look(stage.function, written(stage, traits), traits.cells)

    def _dropping(self, k: int, *, keep: bool) -> tuple[Pack, Unpack]:
        kept: list[torch.Tensor] = []
        running = self._running  # not the runner, which a graph that escapes would hold

        def pack(tensor: torch.Tensor) -> tuple[int, str]:
            if keep:
                kept.append(tensor.detach())  # with its graph, a saved output would keep that graph alive for ever
            return len(kept) - 1, running[0]

        def unpack(saved: tuple[int, str]) -> torch.Tensor:
            index, name = saved
            if not 0 <= index < len(kept):
                raise escaped(name)
            return kept[index]

        return pack, unpack

    def _check_known(self, reached: Sequence[torch.Tensor], k: int, name_of: Callable[[torch.Tensor], str]) -> None:
        known = {id(leaf) for leaf in self.traits[k].leaves}
        strangers = [leaf for leaf in reached if id(leaf) not in known]
        if strangers:
            raise InputError(
                f"{name_of(strangers[0])} used a tensor of shape {tuple(strangers[0].shape)} that requires a gradient, "
                "which it did not use when it was profiled; pass it through the state, or make it one of its parameters"
            )


def _both(edges: Sequence[GradientEdge | None], gradients: Gradients) -> list[tuple[Any, torch.Tensor]]:
    pairs = zip(edges, gradients, strict=True)
    return [(edge, gradient) for edge, gradient in pairs if edge is not None and gradient is not None]
