"""`TensorSteps`: runs the steps of a loop by autograd, one or a chunk of them at a time.

A sweep that keeps nothing is a bare Python loop over the user's function. Gradients of parameters come out bit for bit
as from plain autograd: each recorded stage is seeded with the sum of all later ones (DESIGN, "sums in the same order").
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from tapestream.errors import GradientError, InputError
from tapestream.executor.loop.keep import Keeper, Kept
from tapestream.executor.loop.stand_ins import StandIns
from tapestream.executor.loop.sweep import NAME, Sweeps, paired
from tapestream.executor.loop.traits import Body, Source
from tapestream.runner.graph import next_sequence_number, numbered_here, reached_leaves
from tapestream.runner.guards import drop_hooks, mark
from tapestream.runner.state import replica

Cotangent = list[torch.Tensor | None]
Place = torch.Tensor | GradientEdge | None
"""Where cotangents enter or leave a graph: a leaf, or an edge."""
_LOOK_EVERY = 16  # records, of those that build graphs of a size seen before


@dataclass(slots=True)
class _Tape:
    """One recorded stage, by leaf: where cotangents leave and enter; by step: where those of outputs and inputs do."""

    inputs: list[Place]
    edges: list[Place]
    outputs: list[tuple[int, list[Place]]]
    given: list[tuple[int, list[torch.Tensor]]]


class TensorSteps(Sweeps):
    """See `segments.Segments`. ``steps`` is the number of all steps; ``tick`` hears of steps done.

    ``reversing``: enters what the user's backward runs in, where that is other than what steps run in. ``sums``: by
    place in ``traits.leaves``, the gradient accumulated so far; ``begun``: by leaf of state 0, where that of others
    begins.
    """

    def __init__(self, body: Body, steps: int | None, tick: Callable[[int], None] | None = None) -> None:
        super().__init__(body, tick)
        self.steps = steps
        self.keeper = Keeper(body)
        self.stands = StandIns.of(body.traits)
        self.sums: Cotangent = [None] * len(body.traits.leaves)
        self.begun: dict[int, torch.Tensor] = {}
        self._targets = self.stands.targets(body.traits.leaves)
        self._sizes: set[int] = set()
        self._records = 0
        self.reversing: Callable[[], contextlib.AbstractContextManager[None]] | None = None
        self._marks = [mark(leaf) for leaf in body.traits.leaves]

    def forward(self, live: list[Any], start: int, stop: int) -> Any:
        """Stages start .. stop-1, keeping nothing."""
        return self.sweep(live.pop(), start * self.body.chunk, self._end(stop))

    def record(self, live: list[Any], stage: int, *, output_needed: bool) -> tuple[Any, _Tape]:
        """Run a stage and keep its graph."""
        state = live.pop()
        first, last = stage * self.body.chunk, self._end(stage + 1)
        with torch.enable_grad(), numbered_here(self.body.device), self.stands.standing_in():
            since = next_sequence_number()
            inside, inputs = self._guarded(state, self.traits.requires if first else self.traits.requires_first)
            tape = _Tape(inputs, [], [], [])
            after = inside
            xs = repeat(()) if self.body.source is None else self._fresh_inputs(self.body.source, first, last, tape)
            matches = self.form.matches
            roots: list[torch.Tensor] = []
            for step, (after, output) in enumerate(self._run(inside, xs, first, last), first):
                if self.body.sink is not None:
                    self._note_output(step, last, output, tape, roots)
                if not matches(after):
                    raise self.form.changed(after, step)
        live = self.stands.originals_out(self.form.leaves(after))
        tape.edges, state = self._closed(live, last)
        self._look(live, roots, inside, tape, since)
        if not self.first_run:
            drop_hooks(self.traits.leaves)
        if self.tick is not None:
            self.tick(last - first)
        return state, tape

    def backward(self, tape: _Tape, stage: int, cotangent: Cotangent) -> Cotangent:
        """Consume the graph of a stage."""
        edges: Iterable[Any] = tape.edges
        gradients: Iterable[torch.Tensor | None] = cotangent
        if self.body.sink is not None:
            edges, gradients = self._with_outputs(tape, stage, cotangent)
        roots = [edge for edge, g in zip(edges, gradients, strict=True) if edge is not None and g is not None]
        if not roots:
            return [None] * len(tape.inputs)
        seeds = [g for edge, g in zip(edges, gradients, strict=True) if edge is not None and g is not None]
        if not stage and self.begun:
            places = [i for i in self.begun if tape.inputs[i] is not None]
            roots = [*(tape.inputs[i] for i in places), *roots]
            seeds = [*(self.begun.pop(i) for i in places), *seeds]
        for target, total in zip(self._targets, self.sums, strict=True):
            if total is not None:
                roots.append(target)
                seeds.append(total)
        asked = [place for place in tape.inputs if place is not None]
        wanted, sums = len(asked), len(self.sums)
        asked += self._targets
        for _, tensors in tape.given:
            asked += tensors
        if not asked:
            return [None] * len(tape.inputs)
        with contextlib.nullcontext() if self.reversing is None else self.reversing():
            answer = differentiated(tuple(roots), tuple(seeds), tuple(asked))
        self.sums = list(answer[wanted : wanted + sums])
        of_given = iter(answer[wanted + sums :])
        for step, tensors in tape.given:
            assert self.body.source is not None
            self.body.source.add(step, [next(of_given) for _ in tensors])
        of_inputs = iter(answer)
        return [None if place is None else next(of_inputs) for place in tape.inputs]

    def _with_outputs(self, tape: _Tape, stage: int, cotangent: Cotangent) -> tuple[list[Any], Cotangent]:
        """Where cotangents enter and these, in the order in which plain PyTorch adds them up."""
        sink = self.body.sink
        assert sink is not None
        first: list[tuple[Any, torch.Tensor | None]] = []
        before = stage * self.body.chunk - 1
        if sink.early and self.traits.aliases and before >= 0 and sink.wants(before):
            found = sink.cotangents(before)
            first += [(tape.inputs[leaf], found[out]) for out, leaf in self.traits.aliases if found]
        outputs: list[tuple[Any, torch.Tensor | None]] = []
        for step, edges in tape.outputs:
            outputs += zip(edges, sink.cotangents(step), strict=False)
        own = list(zip(tape.edges, cotangent, strict=True))
        pairs = [*first, *outputs, *own] if sink.early else [*own, *outputs]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]

    def keep(self, state: Any, stage: int) -> Kept:
        """A restart checkpoint."""
        return self.keeper.keep(state)

    def restore(self, kept: Kept, stage: int, *, last: bool) -> Any:
        """The live state of a restart checkpoint."""
        return self.keeper.restore(kept, last)

    def begin_backward(self) -> None:
        """From here on steps are recomputed. Raises GradientError when what they use has changed since."""
        self.first_run = False
        if self._marks != [mark(leaf) for leaf in self.traits.leaves]:
            raise GradientError(
                "Loop: a parameter or captured tensor was modified by an in-place operation after the loop had run, or "
                "its .data replaced, so recomputing would use the new values; run backward before the optimizer's "
                "step, or clone() the tensor"
            )

    def end_backward(self) -> None:
        """All is reversed."""

    def _run(self, tree: Any, xs: Iterator[tuple[Any, ...]], first: int, last: int) -> Iterator[tuple[Any, Any]]:
        """State and output after each of the steps first .. last-1, in one graph."""
        for step in range(first, last):
            found = self.body.function(tree, *next(xs))
            tree, output = (found, None) if self.body.sink is None else paired(found, step)
            yield tree, output

    # -- one record ---------------------------------------------------------------------------------------------

    def _end(self, stage: int) -> int:
        end = stage * self.body.chunk
        return end if self.steps is None else min(end, self.steps)

    def _guarded(self, state: Any, requires: tuple[bool, ...]) -> tuple[Any, list[Place]]:
        """The state with leaves of its own where gradients flow, and where the cotangents leave."""
        fresh: dict[int, torch.Tensor] = {}
        leaves = list(self.form.leaves(state))
        places: list[Place] = [None] * len(leaves)
        for i, wanted in enumerate(requires):
            leaf, written = leaves[i], i in self.traits.mutates
            if not wanted and not written:
                continue
            if id(leaf) not in fresh:
                # What a sweep under no_grad made, a step with a graph may not write into.
                entered = replica(leaf) if written else leaf
                fresh[id(leaf)] = self._entering(entered) if wanted else entered
                if wanted:  # what a guard gave may be written into: its place in the graph is noted before
                    places[i] = get_gradient_edge(fresh[id(leaf)]) if self.traits.guarded else fresh[id(leaf)]
            leaves[i] = fresh[id(leaf)]
        return self.form.build(leaves), places

    def _fresh_inputs(self, source: Source, first: int, last: int, tape: _Tape) -> Iterator[tuple[Any, ...]]:
        for step, x in enumerate(source.read(first, last), first):
            if source.differentiable:
                x, tensors = source.fresh(x)
                tape.given.append((step, list(tensors)))
            yield (x,)

    def _note_output(self, step: int, last: int, output: Any, tape: _Tape, roots: list[torch.Tensor]) -> None:
        sink = self.body.sink
        assert sink is not None
        if not sink.wants(step):
            return
        if self.first_run:
            self._take(step, output)
        assert sink.form is not None
        leaves = self.stands.originals_out(sink.form.leaves(output))
        if not sink.early:  # the cotangent of a sum arrives in its turn, after those of the steps that follow
            for i, _ in self.traits.aliases:
                leaves[i] = leaves[i].view_as(leaves[i])
        edges = [edge_of(leaf) for leaf in leaves]
        if sink.early and step == last - 1 and last != self.steps:
            for i, _ in self.traits.aliases:
                edges[i] = None  # its cotangent comes first among those of the next stage's input
        if sink.differentiable:
            for i, edge in enumerate(edges):
                if edge is not None and not self.traits.outputs_require[i]:
                    raise self._begun_late(sink.form.parts[i].name, step)
        roots += [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        tape.outputs.append((step, edges))

    def _closed(self, live: list[Any], last: int) -> tuple[list[Place], Any]:
        """Where cotangents enter, and the state without its graph."""
        if self.late.states and self.first_run:
            self.traits = self.late.of_state(self.traits, live)
        edges: list[Place] = [None] * len(live)
        fresh: dict[int, torch.Tensor] = {}
        out = list(live)
        for i, leaf in enumerate(live):
            if not isinstance(leaf, torch.Tensor):
                continue
            if id(leaf) not in fresh:
                fresh[id(leaf)] = leaf.detach()
                if leaf.requires_grad:
                    if not self.traits.requires[i]:
                        self.late.begun()
                        raise self._begun_late(self.form.parts[i].name, last - 1)
                    edges[i] = edge_of(leaf)
            out[i] = fresh[id(leaf)]
        return edges, self.form.build(out)

    def _begun_late(self, leaf: str, step: int) -> GradientError:
        return GradientError(
            f"Loop: {leaf} begins to require a gradient at step {step}, but did not in the first steps; run the step "
            "again (later calls look at all steps), or let the state require one from the start (requires_grad_() on "
            "the initial state)"
        )

    def _look(self, live: list[Any], roots: list[torch.Tensor], inside: Any, tape: _Tape, since: int) -> None:
        """Whether the graph ends where it may: at every record that builds one of a size not seen before, and at every
        sixteenth of the others (a look takes longer than a small step's operations)."""
        size = next_sequence_number() - since
        self._records += 1
        if size in self._sizes and self._records % _LOOK_EVERY:
            return
        self._sizes.add(size)
        own = [t for t in self.form.leaves(inside) if isinstance(t, torch.Tensor)]
        own += [t for _, tensors in tape.given for t in tensors]
        known = {id(t) for t in (*own, *self._targets, self._root)}
        ends = [t for t in (*live, *roots) if isinstance(t, torch.Tensor)]
        strangers = [t for t in reached_leaves(ends, since, NAME, frozenset(known)) if id(t) not in known]
        if strangers and not self.traits.makes_leaves:
            raise InputError(
                f"Loop: {NAME} used a tensor of shape {tuple(strangers[0].shape)} that requires a gradient and that it "
                "neither used in its first steps nor holds in a module or closure; make it a parameter of a module "
                "that the step uses, or use it in every step"
            )


def edge_of(leaf: Any) -> Place:
    """Where the cotangent of a tensor enters its graph, None where it has none. The tensor itself is not held."""
    if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
        return None
    node = leaf.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # what Python made needs more care
        return get_gradient_edge(leaf)
    return GradientEdge(node, leaf.output_nr)


def differentiated(
    roots: Sequence[Any], seeds: Sequence[torch.Tensor], asked: Sequence[Any]
) -> tuple[torch.Tensor | None, ...]:
    """`torch.autograd.grad` without its checks, which take as long as the backward of a small step: every seed is a
    gradient that autograd itself gave for its root, and autograd compares their shapes again."""
    return _ENGINE.run_backward(roots, seeds, False, False, asked, True, accumulate_grad=False)  # type: ignore[no-any-return]


_ENGINE: Any = torch.autograd.Variable._execution_engine
