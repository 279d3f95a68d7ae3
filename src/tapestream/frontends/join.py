"""`Join`: several chains that meet in one head, as one differentiable function under a budget."""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import InputError, ScheduleError
from tapestream.executor.interpreter import Interpreter
from tapestream.frontends.chain import Chain
from tapestream.frontends.chain_call import Call
from tapestream.frontends.reached import also_reached
from tapestream.ir.actions import PhaseKind
from tapestream.planning.cache import Prepared
from tapestream.planning.plan import Plan
from tapestream.planning.profile import profile_stages
from tapestream.runner.nesting import covering
from tapestream.runner.runner import Gradients
from tapestream.runner.stage import Mode, Stage, Traits, mode_of
from tapestream.runner.state import State, take_apart
from tapestream.runner.trees import tree_flatten, tree_leaves


class Join(Chain):
    """Several chains that meet in one head: ``join(x_a, x_b, ..)`` gives ``head(output_a, output_b, ..)``.

    ``branches``: for each branch a list of stages, with an input of its own. ``head``: any callable; without one, the
    call gives the outputs as a tuple. Uses: towers of text and images before one contrastive loss, a Siamese network.
    Stages, states, ``budget``, ``device`` and ``plan`` are as in `Chain`. All branches share the budget, and the
    planner ("join") chooses which of them is recomputed from where. The head runs as plain PyTorch between forward and
    backward. What it takes is measured with the stages, once for each shape, and the plan leaves it room. ``folder``,
    ``home``, ``machine`` and ``engine`` (as in `Chain`) are for a ``plan`` that moves states; plans made here move
    nothing.

    Branches run forward in the order given, so random numbers are drawn, and buffers written, as without a plan. In
    backward they take turns. Branches that share parameters do not: they are differentiated one after the other, from
    the last to the first, as in plain PyTorch. Gradients equal plain PyTorch's bit for bit, as far as a Chain's do.

    Raises BudgetError if no plan fits, InputError for unusable stages or inputs.
    """

    def __init__(
        self,
        branches: Sequence[Sequence[Callable[[Any], Any]]],
        head: Callable[..., Any] | None = None,
        *,
        budget: Budget | str | int | None = None,
        device: torch.device | str | None = None,
        plan: Plan | None = None,
        folder: str | os.PathLike[str] | None = None,
        home: str = "auto",
        machine: Machine | None = None,
        engine: str = "auto",
        memory_steps: int | None = None,
    ) -> None:
        lists = [list(stages) for stages in branches]
        if not lists or not all(lists):
            raise InputError(
                f"Join: every branch needs at least one stage, found branches of {[len(one) for one in lists]} stages"
            )
        knobs: dict[str, Any] = {} if memory_steps is None else {"memory_steps": memory_steps}
        numbered: list[Callable[[Any], Any]] = [*lists[0]]
        for one in lists[1:]:
            numbered += (_no_stage, *one)  # states are numbered branch after branch: see Profile.join
        super().__init__(
            numbered, budget=budget, planner="join", device=device, plan=plan, folder=folder, home=home,
            machine=machine, engine=engine, **knobs,
        )  # fmt: skip
        self.head = head
        self._head = None if head is None else Stage(0, head)
        if self._head is not None and not isinstance(head, nn.Module):
            self._modules_behind = also_reached([*self._stages, self._head], self.stages)
        self._spans = [
            (start := sum(len(one) + 1 for one in lists[:i]), start + len(lists[i])) for i in range(len(lists))
        ]
        for i, (start, stop) in enumerate(self._spans):
            for k in range(start, stop):
                stage = self._stages[k]
                stage.name = f"branch {i}, {stage.name.replace(f'stage {k}', f'stage {k - start}')}"

    _fusing = False  # each branch has an end of its own

    def forward(self, *states: Any) -> Any:
        """The head's result, or the last states of all branches, differentiable like any other tensor."""
        if len(states) != len(self._spans):
            raise InputError(
                f"Join: there are {len(self._spans)} branches, found {len(states)} inputs; give one for each"
            )
        outputs = super().forward(states)
        return outputs if self.head is None else self.head(*outputs)

    def _take_apart(self, state: Any) -> tuple[State, tuple[torch.Tensor, ...]]:
        return take_apart(tuple(state))

    def _plain(self, state: Any) -> Any:
        outputs = []
        with covering():
            for (start, stop), one in zip(self._spans, state, strict=True):
                for stage in self._stages[start:stop]:
                    one = stage.function(one)
                outputs.append(one)
        return tuple(outputs)

    def _call(self, prepared: Prepared, initial: State, device: torch.device) -> Call:
        return _JoinCall(self, prepared, initial, device)

    def _mode(self) -> Mode:
        modules = [module for stage in self._stages for module in stage.modules]
        return mode_of([*modules, *(self._head.modules if self._head else ())])

    def _knobs_for(self, traits: Sequence[Traits], initial: State) -> dict[str, Any]:
        """Gradients of what branches share are added in plain PyTorch's order only branch by branch."""
        users = Counter(
            key
            for (start, stop), numbers in zip(self._spans, numbers_of(initial), strict=True)
            for key in {id(leaf) for trait in traits[start:stop] for leaf in trait.leaves}
            | {i for i in numbers if initial.requires[i]}  # far below any id
        )
        return {**self._knobs, "in_order": "both" if max(users.values(), default=1) > 1 else "sweep"}

    def _repeated(self, traits: Sequence[Traits], initial: State) -> frozenset[int]:
        uses = Counter[int]()
        for (start, _), numbers in zip(self._spans, numbers_of(initial), strict=True):
            uses.update(numbers)
            uses.update(numbers[i] for i in traits[start].inputs_repeated)
        return frozenset(i for i, count in uses.items() if count > 1)

    def _profile(self, initial: State, device: torch.device) -> tuple[Profile, list[Traits], State]:
        profiles: list[Profile] = []
        traits: list[Traits] = []
        lasts: list[State] = []
        for (start, stop), one in zip(self._spans, apart(initial), strict=True):
            profile, found, last = self._profile_part(slice(start, stop), one, device)
            profiles.append(profile)
            traits += (Traits(),) * bool(lasts) + (*found,)
            lasts.append(last)
        output = together(lasts)
        if self._head is None:
            return Profile.join(profiles), traits, output
        nbytes, seconds = self._turn(self._head, output, device)
        joined = Profile.join([_holding(profile) for profile in profiles], turn_nbytes=nbytes, turn_seconds=seconds)
        return joined, traits, output

    def _turn(self, head: Stage, output: State, device: torch.device) -> tuple[int, float]:
        """Bytes at the peak and seconds of the head's forward and backward."""
        spread = head.calling(lambda outputs: head.function(*outputs))
        profile, _, _ = profile_stages([spread], output, device)
        (cost,) = profile.stages
        during = max(cost.recorded_extra_nbytes, cost.cotangent_bytes + cost.backward_extra_nbytes)
        return cost.saved_nbytes + cost.output_nbytes + during, cost.recorded_seconds + cost.backward_seconds


def _holding(branch: Profile) -> Profile:
    """Autograd holds the cotangent that the head's backward has made until all branches' backward ends."""
    *stages, last = branch.stages
    return replace(branch, stages=(*stages, replace(last, gradient_nbytes=last.cotangent_bytes)))


class _JoinCall(Call):
    """One live call of several branches."""

    def _run_forward(self, interpreter: Interpreter) -> State:
        spans = self.prepared.plan.profile.spans
        first, *others = apart(self.initial)
        interpreter.begin(first, zip((start for start, _ in spans[1:]), others, strict=True))
        interpreter.run_phase(PhaseKind.FORWARD)
        return together([interpreter.hand_over(stop) for _, stop in spans])

    def _run_backward(self, interpreter: Interpreter, cotangents: Gradients) -> Gradients:
        spans, inputs = self.prepared.plan.profile.spans, numbers_of(self.initial)
        given = iter(cotangents)
        for (_, stop), part in zip(spans, apart(self.prepared.output), strict=True):
            interpreter.cotangents[stop] = [next(given) for _ in part.tensors]
        totals: Gradients = [None] * len(self.initial.tensors)
        numbers = {start: numbers for (start, _), numbers in zip(spans, inputs, strict=True)}
        # What is the input of several branches: a later branch's gradient is where an earlier one's sum begins.
        cotangents_of = interpreter.cotangents
        interpreter.segments.begun = lambda k: [self._begun(i, numbers, cotangents_of) for i in numbers.get(k, ())]
        interpreter.run_phase(PhaseKind.BACKWARD)
        for start, found in numbers.items():
            for i, gradient in zip(found, interpreter.cotangents[start], strict=True):
                totals[i] = gradient if totals[i] is None else totals[i]
        return totals

    def _begun(self, i: int, numbers: dict[int, list[int]], cotangents: dict[int, Gradients]) -> torch.Tensor | None:
        found = _taken(i, numbers, cotangents)
        return self.begun(i) if found is None else found


def _taken(i: int, numbers: dict[int, list[int]], cotangents: dict[int, Gradients]) -> torch.Tensor | None:
    """The gradient of tensor ``i`` from a branch that has found it (by first state), which gives it away."""
    for start, held in numbers.items():
        if start in cotangents and i in held:
            place = held.index(i)
            if (gradient := cotangents[start][place]) is not None:
                cotangents[start][place] = None
                return gradient
    return None


def together(states: Sequence[State]) -> State:
    """The state whose tree is the tuple of the states' trees."""
    tensors: list[torch.Tensor] = []
    others: list[Any] = []
    slots: list[int] = []
    for state in states:
        slots += (s + len(tensors) if s >= 0 else s - len(others) for s in state.slots)
        tensors += state.tensors
        others += state.others
    _, spec = tree_flatten(tuple(_skeleton(state.spec) for state in states))
    return State(tuple(tensors), tuple(r for s in states for r in s.requires), tuple(others), tuple(slots), spec)


def apart(state: State) -> list[State]:
    """The states whose trees the tuple of a state's tree holds."""
    parts: list[State] = []
    leaves = 0  # of the parts so far
    for tree, numbers in zip(_skeleton(state.spec), numbers_of(state), strict=True):
        _, spec = tree_flatten(tree)
        slots = state.slots[leaves : leaves + spec.num_leaves]
        leaves += spec.num_leaves
        others = [~s for s in slots if s < 0]
        parts.append(
            State(
                tuple(state.tensors[i] for i in numbers),
                tuple(state.requires[i] for i in numbers),
                tuple(state.others[i] for i in others),
                tuple(numbers.index(s) if s >= 0 else ~others.index(~s) for s in slots),
                spec,
            )
        )
    return parts


def numbers_of(state: State) -> list[list[int]]:
    """Of a state whose tree is a tuple: which of its tensors each member holds, in order."""
    found: list[list[int]] = []
    leaves = 0
    for tree in _skeleton(state.spec):
        stop = leaves + len(tree_leaves(tree))
        found.append(list(dict.fromkeys(s for s in state.slots[leaves:stop] if s >= 0)))
        leaves = stop
    return found


def _skeleton(spec: pytree.TreeSpec) -> Any:
    """A tree of this structure: of tensors, around which dataclasses are nodes."""
    return pytree.tree_unflatten([torch.empty(0, device="cpu")] * spec.num_leaves, spec)


def _no_stage(state: Any) -> Any:
    raise ScheduleError("between two branches there is no stage to run")
