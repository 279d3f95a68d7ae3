"""Claim: recomputes that are given their attention take no more time than the same plan without, and no more memory
than the budget.

A GPT of which every block is recomputed, on sequences of several lengths, as many tokens in all: the longer they are,
the more of a block's time is attention. The budget is a share above the least that the chain can do with, and ours is
what ``planner="auto"`` makes of it. The other side runs the same schedule, but for what is kept.
"""

from dataclasses import replace

import torch

import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    alternate,
    mebibytes,
    milliseconds,
    peak_nbytes,
    same_bits,
    save,
    settings,
    yes,
)
from benchmarks.equal_peak import stepper
from benchmarks.networks import Case, Network, gpt
from tapestream.ir import KeepInside, Schedule

TITLE = "Recomputes that are given their attention, beside the same plan without"
_SHARE = 1.25  # of the least budget: there every block is recomputed, and there is room for what is kept


def main() -> None:
    """Measure all lengths."""
    chosen = settings(rounds=7)
    sizes = [(2, 64, 2, 64)] if chosen.quick else [(6, 256, 8, 512), (6, 256, 2, 2048), (6, 256, 1, 4096)]
    rows = (measure(gpt(*size, chosen.device), chosen) for size in sizes)
    save("kept_attention", TITLE, chosen, rows, share_of_the_least_budget=_SHARE)


def measure(case: Case, chosen: Settings) -> Row:
    """One network."""
    network, other = case.network(), case.network()
    budget = int(_SHARE * _least(network, case))
    ours = ts.Chain(list(network.blocks), budget=budget, gradients_within=True)
    step = stepper(network, case, ours)
    step()
    plan = ours.plan
    assert plan is not None
    kept = sum(isinstance(action, KeepInside) for action in plan.schedule)
    bare = Schedule.of(
        [action for action in plan.schedule if not isinstance(action, KeepInside)], plan.schedule.stages,
        planner=plan.schedule.planner,
    )  # fmt: skip
    without = ts.Chain(list(other.blocks), plan=replace(plan, schedule=bare), gradients_within=True)
    timings = alternate({"without": stepper(other, case, without), "ours": step}, chosen.rounds, chosen.device)
    ratio = timings.ratio("ours", "without")
    equal = same_bits([p.grad for p in network.parameters()], [p.grad for p in other.parameters()])
    peak = _peak_of_chain(network, ours, case)
    return {
        "network": case.name, "budget MiB": mebibytes(budget), "MiB": mebibytes(peak),
        "plan": f"{plan.schedule.planner}, {plan.simulation.forwards} forwards, {kept} of them keep their attention",
        "ms without": milliseconds(timings.seconds("without")), "ms": milliseconds(timings.seconds("ours")), **ratio,
        "claim": "at most 1.00", "met": yes(ratio["ratio"] <= 1.0 and peak <= budget),
        "same bits": yes(equal),
    }  # fmt: skip


def _peak_of_chain(network: Network, chain: ts.Chain, case: Case) -> int:
    """Bytes beyond weights and what the chain is given, gives and gets from the loss: what the budget is for."""
    hidden = network.before(case.batch()[0]).detach()
    cotangent = torch.ones_like(chain(hidden))

    def step() -> None:
        torch.autograd.backward(chain(hidden), cotangent)

    network.zero_grad()
    step()
    network.zero_grad()
    return peak_nbytes(step, case.device) - cotangent.nbytes  # as many as what the chain gives


def _least(network: Network, case: Case) -> int:
    chain = ts.Chain(list(network.blocks), budget=1, gradients_within=True)
    try:
        stepper(network, case, chain)()
    except ts.BudgetError as error:
        return error.least_nbytes or 0
    return 1


if __name__ == "__main__":
    main()
