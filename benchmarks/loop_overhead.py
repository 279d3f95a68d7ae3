"""What `Loop` adds to a step: a forward sweep beside a bare loop, and a gradient beside torch.utils.checkpoint.

A tanh recurrence (batch 64) with one weight. "forward": the loop's first sweep against the same step in a Python loop
under ``no_grad``, alone, with a row of the state as output, and until a condition holds. "gradient": forward and
backward of 10,000 steps against ``torch.utils.checkpoint`` in sqrt(n) segments, the loop being given the bytes that
checkpoint takes, and a tenth of them.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import tapestream as ts
from benchmarks.common import (
    Row,
    Run,
    Settings,
    Workload,
    alternate,
    mebibytes,
    peak_nbytes,
    same_bits,
    save,
    settings,
    yes,
)

Step = Callable[[Tensor], Tensor]
Shown = Callable[[Tensor], tuple[Tensor, Tensor]]
_SHORT = 8  # the width whose steps take little beside what a loop adds; that of others is within the noise
_WIDTHS = (_SHORT, 64, 256)


def main() -> None:
    """Run and write the table."""
    given = settings(rounds=5)
    torch.set_flush_denormal(True)  # gradients that vanish would make arithmetic tens of times slower than it is
    steps = 400 if given.quick else 10_000
    tables = (table(width, steps, given) for width in _WIDTHS for table in (forward, gradients))
    rows = chain.from_iterable(tables)
    save("loop_overhead", "Loop beside a bare loop and torch.utils.checkpoint", given, rows, steps=steps)


def recurrence(width: int) -> tuple[Step, Tensor, list[Tensor]]:
    """A step, its initial state, and the tensors that get a gradient."""
    torch.manual_seed(0)
    weight = (torch.randn(width, width) / width**0.5).requires_grad_()
    bias, start = torch.randn(width).requires_grad_(), torch.randn(64, width).requires_grad_()
    return lambda h: torch.tanh(torch.addmm(bias, h, weight)), start, [start, weight, bias]


def forward(width: int, steps: int, given: Settings) -> Iterator[Row]:
    """Microseconds that the first sweep adds to a step: of a state alone, with outputs, of a run of unknown length."""
    step, start, _ = recurrence(width)
    shown = showing(step)
    for what, ours in ways(step, shown, start, steps).items():
        plain = no_grad(bare(what, step, shown, start, steps))
        timings = alternate({"loop": ours, "bare": plain}, given.rounds, given.device)
        added = [(a - b) / steps * 1e6 for a, b in zip(timings.cpu["loop"], timings.cpu["bare"], strict=True)]
        middle = round(sorted(added)[len(added) // 2], 2)
        yield {
            "what": what, "width": width, "steps": steps,
            "us a step": round(timings.seconds("loop") / steps * 1e6, 2),
            "added us a step (processor time)": middle, **timings.ratio("loop", "bare"),
            **({"claim": "adds at most 5 us", "met": yes(middle <= 5)} if width == _SHORT else {}),
        }  # fmt: skip


def showing(step: Step) -> Shown:
    """The same step with a row of the state as output."""

    def shown(h: Tensor) -> tuple[Tensor, Tensor]:
        h = step(h)
        return h, h[0]

    return shown


def ways(step: Step, shown: Shown, start: Tensor, steps: int) -> dict[str, Run]:
    """First sweeps by name."""
    loop, with_outputs = (ts.Loop(one, planner="revolve", slots=40) for one in (step, shown))
    until = ts.Loop(step, budget=400 * start.nbytes)
    return {
        "forward": lambda: loop(start, steps=steps),
        "forward, outputs stacked": lambda: with_outputs(start, steps=steps, outputs="stack"),
        "forward, outputs summed": lambda: with_outputs(start, steps=steps, outputs="sum"),
        "forward, until": lambda: until(start, until=after(steps)),
    }


def bare(what: str, step: Step, shown: Shown, start: Tensor, steps: int) -> Run:
    """What one writes without a Loop."""

    def run() -> None:
        h, rows, total, over = start, list[Tensor](), torch.zeros(()), after(steps)
        for _ in range(steps):
            if what.endswith("ed"):
                h, row = shown(h)
                if what.endswith("stacked"):
                    rows.append(row)
                else:
                    total = total + row
            else:
                h = step(h)
                if what.endswith("until") and over(h):
                    break
        if rows:
            torch.stack(rows)

    return run


def after(steps: int) -> Callable[[object], bool]:
    """A condition that the state after so many steps fulfils."""
    left = iter(range(steps - 1, -1, -1))
    return lambda state: next(left) == 0


def no_grad(run: Run) -> Run:
    """The same without a graph."""
    return torch.no_grad()(run)


def gradients(width: int, steps: int, given: Settings) -> Iterator[Row]:
    """Time and bytes of a gradient."""
    step, start, leaves = recurrence(width)
    theirs = differentiating(checkpointed(step, start, steps), leaves)
    taken = peak_nbytes(theirs, given.device)
    for share in (1, 3) if given.quick else (1, 10):
        loop = ts.Loop(step, budget=taken // share)
        ours = differentiating(partial(loop, start, steps=steps), leaves)
        ours()
        same = same_bits(gradients_of(ours, leaves), gradients_of(theirs, leaves))
        timings = alternate({"loop": ours, "checkpoint": theirs}, given.rounds, given.device)
        assert loop.plan is not None
        yield {
            "what": "gradient", "width": width, "steps": steps,
            "us a step": round(timings.seconds("loop") / steps * 1e6, 2), **timings.ratio("loop", "checkpoint"),
            "MiB": mebibytes(peak_nbytes(ours, given.device)), "MiB of checkpoint": mebibytes(taken),
            "forwards a step": forwards_of(loop), "same bits": yes(same),
        }  # fmt: skip


def forwards_of(loop: ts.Loop) -> float:
    """How often the plan runs a step forward, on average."""
    assert loop.plan is not None
    return round(loop.plan.simulation.forwards / len(loop.plan.profile), 2)


def checkpointed(step: Step, start: Tensor, steps: int) -> Callable[[], Tensor]:
    """What torch.utils.checkpoint does in segments of sqrt(n) steps."""

    def segment(h: Tensor, count: int) -> Tensor:
        for _ in range(count):
            h = step(h)
        return h

    def run() -> Tensor:
        h, count = start, math.isqrt(steps)
        for first in range(0, steps, count):
            h = checkpoint(segment, h, min(count, steps - first), use_reentrant=False)
        return h

    return run


def workloads(given: Settings) -> Iterator[Workload]:
    """The loops alone, in a fifth of the steps, without the widest, most of whose time is that of matrix products."""
    torch.set_flush_denormal(True)
    steps = 400 if given.quick else 2_000
    for width in _WIDTHS[:2]:
        step, start, leaves = recurrence(width)
        for what, ours in ways(step, showing(step), start, steps).items():
            yield Workload(f"{what}, width {width}", ours)
        taken = peak_nbytes(differentiating(checkpointed(step, start, steps), leaves), given.device)
        for share in (1, 3):
            loop = ts.Loop(step, budget=taken // share)
            gradient = differentiating(partial(loop, start, steps=steps), leaves)
            name = f"gradient in 1/{share} of the memory, width {width}"
            yield Workload(name, gradient, lambda loop=loop: f"{forwards_of(loop)} forwards a step")  # type: ignore[misc]


def differentiating(run: Callable[[], Tensor], leaves: list[Tensor]) -> Run:
    """Forward and backward."""

    def both() -> None:
        for leaf in leaves:
            leaf.grad = None
        run().sum().backward()  # type: ignore[no-untyped-call]

    return both


def gradients_of(run: Run, leaves: list[Tensor]) -> list[Tensor | None]:
    """What it leaves behind."""
    run()
    return [leaf.grad for leaf in leaves]


if __name__ == "__main__":
    main()
