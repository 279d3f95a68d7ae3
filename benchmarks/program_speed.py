"""Claim: a program whose tape fits takes at most 1.10 times plain PyTorch, operations taking 100 microseconds or more.

Forward and backward of a tanh recurrence by `Program` and by plain PyTorch, in turn. "fits": the budget holds all that
plain PyTorch saves; "a quarter": of the bytes of its peak. "first": a first call, which plans and measures.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.common import (
    Row,
    Run,
    Settings,
    Workload,
    alternate,
    mebibytes,
    milliseconds,
    peak_nbytes,
    same_bits,
    save,
    settings,
    yes,
)
from tapestream.frontends.program.program import Program

MOST = 1.10


def main() -> None:
    """Run and write the table."""
    given = settings(rounds=9)
    torch.set_flush_denormal(True)  # gradients that vanish would make arithmetic slower than it is
    sizes, steps = _sizes(given)
    rows = (row for batch, width in sizes for row in measured(batch, width, steps, given))
    save("program_speed", "Program beside plain PyTorch", given, rows, steps=steps)


def _sizes(given: Settings) -> tuple[tuple[tuple[int, int], ...], int]:
    """Batch and width of each, and steps."""
    return (((64, 64),), 20) if given.quick else (((64, 64), (256, 256), (512, 512)), 200)


def measured(batch: int, width: int, steps: int, given: Settings) -> Iterator[Row]:
    """A row for each budget."""
    function, start, weight = recurrence(batch, width, steps)
    plain = differentiating(function, start, weight)
    taken = peak_nbytes(plain, given.device)
    for name, budget in budgets(taken):
        program = Program(function, budget=budget)
        ours = differentiating(program, start, weight)
        for _ in range(3):  # the plan is final from then on
            ours()
        assert program.report is not None
        same = same_bits([gradient(ours, weight)], [gradient(plain, weight)])
        runs = {"program": ours, "plain": plain, "first": differentiating_first(function, budget, start, weight)}
        timings = alternate(runs, given.rounds, given.device)
        us = milliseconds(timings.seconds("plain")) * 1e3 / (6 * steps)  # of which backward takes about two thirds
        ratio = timings.ratio("program", "plain")
        claim = {"claim": f"at most {MOST} of processor time", "met": yes(ratio["ratio of processor time"] <= MOST)}
        yield {
            "budget": name, "width": width, "us an operation": round(us, 1), **ratio,
            "first call": timings.ratio("first", "plain")["ratio of processor time"],
            "MiB": mebibytes(peak_nbytes(ours, given.device)), "MiB of plain": mebibytes(taken),
            "stretches": program.report.stages, "run again": program.report.reruns, "same bits": yes(same),
            **(claim if name == "fits" and us >= 100 else {}),
        }  # fmt: skip


def workloads(given: Settings) -> Iterator[Workload]:
    """The programs alone, without first calls; matrices are smaller, for what is not their product to show."""
    torch.set_flush_denormal(True)
    steps = _sizes(given)[1]
    for batch, width in ((64, 64),) if given.quick else ((64, 64), (64, 256)):
        function, start, weight = recurrence(batch, width, steps)
        for name, budget in budgets(peak_nbytes(differentiating(function, start, weight), given.device)):
            program = Program(function, budget=budget)
            ours = differentiating(program, start, weight)
            yield Workload(f"{name}, width {width}", ours, partial(_planned, program))


def _planned(program: Program) -> str:
    assert program.report is not None
    return f"{program.report.stages} stretches, {program.report.reruns} run again"


def recurrence(batch: int, width: int, steps: int) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """The function, where it starts, and its weight."""
    torch.manual_seed(0)
    weight, start = (torch.randn(width, width) / width**0.5).requires_grad_(), torch.randn(batch, width)

    def function(h: Tensor) -> Tensor:
        for _ in range(steps):
            h = torch.tanh(h @ weight)
        return h.sum()

    return function, start, weight


def budgets(taken: int) -> tuple[tuple[str, int], ...]:
    """Names and bytes, by what plain PyTorch takes."""
    return ("fits", 2 * taken), ("a quarter", taken // 4)


def differentiating(run: object, start: Tensor, weight: Tensor) -> Run:
    """Forward and backward."""

    def both() -> None:
        weight.grad = None
        run(start).backward()  # type: ignore[operator]

    return both


def differentiating_first(function: object, budget: int, start: Tensor, weight: Tensor) -> Run:
    """Forward and backward by a program that is made anew."""
    return lambda: differentiating(Program(function, budget=budget), start, weight)()  # type: ignore[arg-type]


def gradient(run: Run, weight: Tensor) -> Tensor | None:
    """What it leaves behind."""
    run()
    return weight.grad


if __name__ == "__main__":
    main()
