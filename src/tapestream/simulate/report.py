"""A `Simulation` as a plain text table, for people."""

from tapestream.costs import Budget
from tapestream.ir import Tier
from tapestream.simulate.result import Simulation
from tapestream.units import format_nbytes, format_seconds


def report(simulation: Simulation, budget: Budget | None = None) -> str:
    """Peaks per tier against ``budget``, seconds by phase, stalls, stage runs and bytes moved, one per line."""
    rows: list[tuple[str, str]] = []
    for tier, peak in simulation.peak_nbytes.items():
        allowed = budget.nbytes(tier) if budget else None
        if peak or allowed is not None or tier is Tier.DEVICE:
            limit = "no limit" if allowed is None else f"{format_nbytes(allowed)} allowed, {_share(peak, allowed)} used"
            at = simulation.peak_position[tier]
            rows.append((f"peak in {tier.name}", f"{format_nbytes(peak)} ({limit}), at action {at}"))
    rows.append(("makespan", format_seconds(simulation.makespan_seconds)))
    rows += [(f"  {phase.value}", format_seconds(seconds)) for phase, seconds in simulation.phase_seconds.items()]
    share = _share(simulation.stall_seconds, simulation.makespan_seconds)
    rows.append(("stalls", f"{format_seconds(simulation.stall_seconds)} ({share} of the makespan)"))
    rows.append(("forward", f"{simulation.forwards} stages, {simulation.recorded} of them recorded"))
    rows.append(("backward", f"{simulation.backwards} stages"))
    for (source, target), nbytes in sorted(simulation.bytes_moved.items()):
        rows.append((f"{source.name} to {target.name}", f"{format_nbytes(nbytes)} moved"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "0%"
