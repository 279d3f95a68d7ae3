"""Claim: recompute and a disk together need less time than either alone at a quarter and a sixth of the tape's memory.

The blocks of each network are one `ts.Chain` with RAM above a disk, at fractions of what storing everything takes, by
`rotor` (recompute alone), `offload` (the disk alone, nothing chosen) and `joint` (both); their steps run in turn with
plain PyTorch's. Simulated and measured seconds stand side by side.
"""

from collections.abc import Callable
from typing import Any

import tapestream as ts
from benchmarks.common import (
    Row,
    Settings,
    Timings,
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
from benchmarks.networks import Case, Network, gpt, pyramid, resnet
from tapestream.costs import Machine
from tapestream.ir import Tier
from tapestream.planners import planners

TITLE = "Step time over plain PyTorch at a quarter and a sixth of the tape's memory: recompute, disk, both"
_PARTS = (4, 6)
_PLANNERS = tuple(name for name in ("rotor", "offload", "joint") if name in planners)


def main() -> None:
    """Measure the disk below ``--folder``, then all networks."""
    chosen = settings("cpu", rounds=7)
    machine = ts.measure_machine("cpu", chosen.folder)
    rows = (row for case in _cases(chosen) for part in _PARTS for row in _rows(case, part, machine, chosen))
    save("offload_and_recompute", TITLE, chosen, rows, machine={_lane(*k): v for k, v in _rates(machine).items()})


def _cases(chosen: Settings) -> list[Case]:
    if chosen.quick:
        return [gpt(24, 64, 2, 64, "cpu"), pyramid(4, 16, "cpu")]
    return [gpt(24, 256, 4, 128, "cpu"), resnet(18, 16, "cpu"), pyramid(16, 32, "cpu")]


def _rows(case: Case, part: int, machine: Machine, chosen: Settings) -> list[Row]:
    """One row for each planner at one ``part``-th of the bytes that storing everything takes."""
    theirs = case.network()
    runs: dict[str, Callable[[], object]] = {"plain": stepper(theirs, case, theirs.run_blocks)}
    allowed = _stored_nbytes(case) // part
    ours: dict[str, tuple[Network, ts.Chain]] = {}
    refused: dict[str, str] = {}
    for name in _PLANNERS:
        network = case.network()
        chain = ts.Chain(
            list(network.blocks), budget=allowed, planner=name, folder=chosen.folder, machine=machine
        )  # fmt: skip
        step = stepper(network, case, chain)
        try:
            step()
        except ts.BudgetError as error:
            least = error.least_nbytes
            refused[name] = "nothing fits" if least is None else f"needs {mebibytes(least)} MiB"
        else:
            ours[name], runs[name] = (network, chain), step
    timings = alternate(runs, chosen.rounds, "cpu")
    over = {name: timings.ratio(name, "plain")["ratio"] for name in ours}
    row: Row = {"network": case.name, "part of the tape": f"1/{part}", "MiB allowed": mebibytes(allowed)}
    return [
        row | (_measured(name, case, *ours[name], theirs, timings, over, part) if name in ours else
               {"planner": name, "plan": refused[name]})
        for name in _PLANNERS
    ]  # fmt: skip


def _measured(
    name: str, case: Case, network: Network, chain: ts.Chain, theirs: Network, timings: Timings,
    over: dict[str, float], part: int,
) -> Row:  # fmt: skip
    plan = chain.plan
    assert plan is not None
    equal = same_bits([p.grad for p in network.parameters()], [p.grad for p in theirs.parameters()])
    found: Row = {
        "planner": name, "plan": f"{plan.simulation.forwards} forwards", "ms": milliseconds(timings.seconds(name)),
        **timings.ratio(name, "plain"), "simulated overhead of the blocks": round(plan.overhead, 4),
        "MiB to disk": mebibytes(plan.simulation.bytes_moved.get((Tier.DEVICE, Tier.DISK), 0)),
        "peak MiB with gradients": mebibytes(_peak_nbytes(network, chain, case)),
        "MiB of gradients": mebibytes(sum(p.nbytes for p in network.blocks.parameters())), "same bits": yes(equal),
    }  # fmt: skip
    if name == "joint":
        found |= _claims(over, part)
    return found


def _peak_nbytes(network: Network, chain: ts.Chain, case: Case) -> int:
    """Measured, with the gradients of the blocks' parameters, which are outside the budget."""
    x, _ = case.batch()
    state = network.before(x).detach().requires_grad_()

    def step() -> None:
        network.zero_grad()
        chain(state).sum().backward()

    peak_nbytes(step, case.device)  # what a step frees is seen only if the one that made it was metered
    network.zero_grad()
    return peak_nbytes(step, case.device)


def _claims(over: dict[str, float], part: int) -> Row:
    """POFO's claims: 20% at a quarter; offload removes a third of the overhead of recompute."""
    row: Row = {}
    claims: list[tuple[str, bool]] = []
    if part == 4:
        claims.append(("at most 1.20", over["joint"] <= 1.2))
    if "rotor" in over and over["rotor"] > 1:
        removed = 1 - (over["joint"] - 1) / (over["rotor"] - 1)
        row["of recompute's overhead removed"] = round(removed, 3)
        claims.append(("a third removed", removed >= 1 / 3))
    return {**row, "claim": ", ".join(text for text, _ in claims), "met": yes(all(met for _, met in claims))}


def _stored_nbytes(case: Case) -> int:
    network = case.network()
    chain = ts.Chain(list(network.blocks), planner="store_all")
    x, _ = case.batch()
    chain(network.before(x).detach().requires_grad_())
    assert chain.plan is not None
    return chain.plan.peak_nbytes


def _rates(machine: Machine) -> dict[tuple[Tier, Tier], Any]:
    return {lane: {"MiB per second": mebibytes(int(link.bytes_per_second))} for lane, link in machine.links.items()}


def _lane(source: Tier, target: Tier) -> str:
    return f"{source.name} to {target.name}"


if __name__ == "__main__":
    main()
