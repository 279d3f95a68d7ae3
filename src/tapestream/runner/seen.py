"""`Seen`: what the first run of a stage saw beside its input, for its recomputes."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tapestream.capture.buffers import BufferSnapshot, Slot
from tapestream.capture.cells import Contents
from tapestream.capture.observe import observed
from tapestream.errors import GradientError
from tapestream.runner.ambient import HostGenerators, TorchGenerators, host_mark
from tapestream.runner.counts import Counted, digest_of, kinds_of
from tapestream.runner.guards import Mark
from tapestream.runner.stage import Stage, Traits
from tapestream.runner.state import State
from tapestream.runner.stills import Look

Versions = tuple[int | Mark, ...]


@dataclass(frozen=True, slots=True)
class Seen:
    """States of generators, buffers and other memory, where the run has changed them; versions of parameters; the rest:
    `Look`; ``counted``: what it has counted, unless it is known which values recomputes need."""

    torch_generators: TorchGenerators | None
    host_generators: HostGenerators | None
    buffers: BufferSnapshot | None
    contents: Contents | None
    versions: Versions
    look: Look | None
    counted: Counted | None = None

    def with_buffers(self, more: BufferSnapshot) -> "Seen":
        """With other contents of what it has counted."""
        return replace(self, buffers=more if self.buffers is None else self.buffers.also(more), counted=None)

    def restore(self, stack: contextlib.ExitStack, device: torch.device) -> None:
        """Have generators, buffers and other memory as they were."""
        if self.buffers is not None:
            stack.enter_context(self.buffers.substituted())
        if self.contents is not None:
            stack.enter_context(self.contents.exchanged())
        if self.torch_generators is not None:
            stack.callback(TorchGenerators.capture(device).restore)
            self.torch_generators.restore()
        if self.host_generators is not None:
            stack.callback(HostGenerators.capture(one for one, _ in self.host_generators.own).restore)
            self.host_generators.restore()


def generators_nbytes(seen: Iterable[Seen]) -> int:
    """What the states of torch's generators take, each once."""
    states: list[Any] = []
    for one in seen:
        if (held := one.torch_generators) is not None:
            states += [held.cpu, *(state for _, state in (*held.others, *held.own))]
        if one.host_generators is not None:
            states += [state for _, state in one.host_generators.own]
    return sum({id(s): s.nbytes for s in states if isinstance(s, torch.Tensor)}.values())


def written(stage: Stage, traits: Traits) -> tuple[Slot, ...]:
    """What the stage writes into itself: as it was profiled, and what it was seen to since."""
    late = stage.stills.late
    return (*traits.buffers, *late) if late else traits.buffers


@contextlib.contextmanager
def first_run(
    stages: Sequence[Stage], k: int, traits: Traits, device: torch.device, versions: Callable[[], Versions]
) -> Iterator[list[Seen]]:
    """The first run of stage ``k``, inside, which will be run again; gives what it saw, when it has ended.

    Raises GradientError where it changes itself what a recompute would see, unlike the profiled run.
    """
    stage, found = stages[k], list[Seen]()
    draws_host, own = traits.draws_host or stage.stills.draws_host, written(stage, traits)
    generators = TorchGenerators.capture(device)
    host = HostGenerators.capture(traits.generators) if draws_host else None
    marked = None if draws_host else host_mark()
    buffers = BufferSnapshot.for_recomputes(own) if own else None
    contents = Contents.take(traits.cells) if traits.cells else None
    before, then = stage.stills.look(stage.function, own, traits.cells), versions()
    if contents is None:
        yield found
    else:  # it may write into other memory than it did when it was profiled
        with observed((), stage.modules, calls=False) as seen:
            yield found
        contents = contents.also(seen.contents)
    drew = not generators.still()
    if host is not None and host.equals(HostGenerators.capture(traits.generators)):
        host = None
    if marked is not None and marked != host_mark():
        for other in stages:
            other.stills.draws_host = True
        raise GradientError(
            f"{stage.name} drew from Python's or NumPy's generator, which it did not do when it was profiled, so a "
            "recompute would draw other numbers; from the next call on the generators' states are kept: run the step "
            "again"
        )
    if versions() != then:
        raise GradientError(
            f"{stage.name} has changed one of its own parameters, which it did not do when it was profiled, so a "
            "recompute would use the new one; change parameters outside of the stage"
        )
    after = stage.stills.look(stage.function, own, traits.cells)
    try:
        late = stage.stills.changed_by_itself(stage.name, before, after, own)
    except GradientError:
        for other in stages:  # alike, they will do the same
            other.stills.expect(stage.stills.late)
        raise
    mine = Seen(generators if drew else None, host, buffers, contents, then, after)
    if late is not None:
        counted, known = Counted.since(late), stage.stills.counts.get(kinds_of(late.slots))
        mine = replace(mine, counted=counted) if known is None else mine.with_buffers(counted.after if known else late)
    found.append(mine)


def settled(seen: Seen, again: Callable[[Seen], State], stages: Sequence[Stage], k: int) -> Seen:
    """What stage ``k`` has seen, with what its recomputes need of what it has counted, which all ``stages`` learn.
    ``again`` runs it once more. Raises GradientError where neither value gives what the first run gave."""
    counted = seen.counted
    assert counted is not None
    both = [seen.with_buffers(held) for held in (counted.before, counted.after)]
    right = [digest_of(again(one).tensors) == counted.digest for one in both]
    if not any(right):
        raise GradientError(
            f"{stages[k].name} counts {counted.names} where tapestream.recomputing() is false, and reads it so that "
            "neither the old nor the new value gives again what the first run gave; count in each run, or do not read "
            "it there"
        )
    for stage in stages:
        stage.stills.learn(kinds_of(counted.before.slots), not right[0])
    return both[right.index(True)]
