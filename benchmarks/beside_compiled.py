"""``torch.compile`` with ``activation_memory_budget``, beside `ts.Program` at the peak that it takes: memory, time and
correctness side by side.

Each network is compiled with budgets of a quarter and of a half, as it comes (``fallback_random`` off) and with eager
PyTorch's random numbers. A Program then gets the largest budget found whose measured peak is no higher. Correctness is
the largest difference of a gradient, as a part of that gradient's largest number: from that of plain PyTorch, where
random numbers are the same; and from that of the same compilation with a budget of 1, which recomputes nothing: there
both draw the same numbers, so that what differs is what recomputing got wrong (or rounded otherwise).
"""

from collections.abc import Iterator

from torch import Tensor

from benchmarks.common import Row, Settings, alternate, mebibytes, milliseconds, same_bits, save, settings, yes
from benchmarks.equal_peak import peak_of_step
from benchmarks.networks import Case, gpt, resnet
from benchmarks.program_networks import at_peak, compiled, off_by, step_of, with_dropout

TITLE = "torch.compile with activation_memory_budget, beside a Program at the same peak"
BUDGETS = (0.25, 0.5)


def main() -> None:
    """Measure all networks."""
    chosen = settings(rounds=5)
    save("beside_compiled", TITLE, chosen, (row for case in _cases(chosen.quick) for row in _rows(case, chosen)))


def _cases(quick: bool) -> list[Case]:
    transformer = gpt(2, 64, 2, 64, "cpu") if quick else gpt(24, 256, 4, 128, "cpu")
    return [resnet(1, 2, "cpu") if quick else resnet(18, 16, "cpu"), transformer, with_dropout(transformer)]


def _rows(case: Case, chosen: Settings) -> Iterator[Row]:
    draws = "dropout" in case.name
    for fallback in (True, False) if draws else (True,):
        everything = compiled(case, 1.0, fallback=fallback)[2]
        for budget in BUDGETS:
            yield _row(case, budget, fallback, everything, chosen)


def _row(case: Case, budget: float, fallback: bool, everything: list[Tensor | None], chosen: Settings) -> Row:
    theirs, step, found = compiled(case, budget, fallback=fallback)
    allowed = peak_of_step(theirs, step, case)
    plain, (ours, program) = case.network(), at_peak(case, allowed)
    steps = {"plain": step_of(plain, case, plain), "compiled": step, "Program": step_of(ours, case, program)}
    timings = alternate(steps, chosen.rounds, chosen.device)
    wanted = [p.grad for p in plain.parameters()]
    peak, same = peak_of_step(ours, steps["Program"], case), same_bits([p.grad for p in ours.parameters()], wanted)
    return {
        "network": case.name, "activation_memory_budget": budget, "random numbers of eager PyTorch": yes(fallback),
        "its MiB": mebibytes(allowed), "MiB": mebibytes(peak), "ms of plain": milliseconds(timings.seconds("plain")),
        "its over plain": timings.ratio("compiled", "plain")["ratio"],
        "over plain": timings.ratio("Program", "plain")["ratio"], **timings.ratio("Program", "compiled"),
        "its gradients off plain by": round(off_by(found, wanted), 7),
        "its gradients off those of its budget 1 by": round(off_by(found, everything), 7),
        "claim": "bits of plain PyTorch at no more memory", "met": yes(same and peak <= allowed),
    }  # fmt: skip


if __name__ == "__main__":
    main()
