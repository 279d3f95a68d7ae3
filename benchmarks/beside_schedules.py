"""Beside checkpoint_schedules and pyrevolve (``pip install checkpoint_schedules==1.0.4 pyrevolve numba``): no dearer.

The same chain of equal steps, the same number of slots, the same prices: forwards where nothing else is paid, else the
makespan, in which a step costs ``uf`` and a reversed step, its recording included, ``ub``, a state written to disk or
read from it 2. Costs of the others are counted from the actions that they give; ours are the judge's. Time is that of
making the schedule and listing every action; a contest that takes seconds gets fewer rounds. ``--full``: longer chains
too, on which the others take minutes. The others know equal steps and no overlap of copies with computation.
numba is what the mixed schedule of checkpoint_schedules asks for; without it, it is slower.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from time import perf_counter
from types import SimpleNamespace
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.common import Row, Settings, alternate, milliseconds, settings, write, yes
from tapestream.costs import Link, Machine, Profile, StageCost, UniformStages
from tapestream.ir import Schedule, Tier
from tapestream.planners import planners
from tapestream.simulate import simulate

TITLE = "Beside checkpoint_schedules and pyrevolve, on the same instances"
_SECONDS = 3.0  # of rounds of one of theirs, about
DISK_SECONDS = 2.0  # of writing or reading one state
PEERS = ("checkpoint_schedules", "pyrevolve")


@dataclass(frozen=True, slots=True)
class Tally:
    """What a schedule does: forwards that record nothing, reversed steps, states written to and read from disk."""

    forwards: int
    reversed: int
    written: int = 0
    read: int = 0

    def makespan(self, uf: float, ub: float) -> float:
        """Seconds in the papers' prices."""
        return self.forwards * uf + self.reversed * ub + (self.written + self.read) * DISK_SECONDS


@dataclass(frozen=True, slots=True)
class Contest:
    """One instance. ``theirs`` makes a schedule and lists its actions; ``count`` reads these; ``knobs`` are ours."""

    peer: str
    name: str
    slots: str
    n: int
    planner: str
    knobs: dict[str, Any]
    theirs: Callable[[], list[Any]]
    count: Callable[[list[Any]], Tally]
    prices: tuple[float, float] | None = None  # uf, ub; None: forwards are what counts


def main() -> None:
    """Run all contests, those of libraries that are not installed left out; a table of them at the end."""
    chosen = settings("cpu", rounds=5, full="longer chains too, on which the others take minutes")
    there = [peer for peer in PEERS if find_spec(peer) is not None]
    if not there:
        print(f"neither is installed, so nothing is measured: pip install checkpoint_schedules==1.0.4 {PEERS[1]} numba")
        return
    contests = [contest for peer in there for contest in CONTESTS[peer](chosen)]
    with redirect_stdout(sys.stderr):  # one of theirs prints, another asks for a descriptor
        rows = [measure(contest, chosen) for contest in track(contests, TITLE, console=Console(stderr=True))]
    table = Table(*rows[0], title=TITLE)
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console(width=None if sys.stdout.isatty() else 220).print(table)
    if chosen.save:
        versions = {peer: metadata.version(peer) for peer in there}
        write("beside_schedules", TITLE, chosen, rows, chosen.results, peers=versions, full=chosen.full)


def measure(contest: Contest, chosen: Settings) -> Row:
    """One contest."""
    uf, ub = contest.prices or (1.0, 1.0)
    slow = DISK_SECONDS if contest.prices else 0.0
    profile = Profile(UniformStages(StageCost(uf, ub, 1, 1, record_seconds=0.0), contest.n), 1)
    link = Link(1 / slow if slow else 1e30)
    machine = Machine({(Tier.DEVICE, Tier.DISK): link, (Tier.DISK, Tier.DEVICE): link})
    below = {} if contest.planner in ("revolve", "mixed") else {"machine": machine}

    def ours() -> tuple[Schedule, int]:
        schedule = planners[contest.planner](profile, None, **below, **contest.knobs)
        return schedule, len(list(schedule))

    judged = simulate(ours()[0], profile, machine)
    started = perf_counter()
    theirs = contest.count(contest.theirs())
    taken = perf_counter() - started
    rounds = max(3, min(chosen.rounds, round(_SECONDS / taken)))
    timings = alternate({"ours": ours, "its": contest.theirs}, rounds, "cpu", warm=0)
    ratio = timings.ratio("ours", "its")
    if theirs.reversed != contest.n:
        raise ValueError(f"{contest.peer} reversed {theirs.reversed} of {contest.n} steps")
    if contest.prices is None:
        cost: dict[str, int] = {"its cost": theirs.forwards + contest.n, "cost": judged.forwards}
    else:  # all prices are whole numbers
        cost = {"its cost": round(theirs.makespan(uf, ub)), "cost": round(judged.makespan_seconds)}
    return {
        "of": contest.peer, "its schedule": contest.name, "steps": contest.n, "slots": contest.slots,
        "our planner": contest.planner, "what counts": _counted(contest.prices), **cost,
        "claim": "never dearer", "met": yes(cost["cost"] <= cost["its cost"]),
        "its ms": milliseconds(timings.seconds("its")), "ms": milliseconds(timings.seconds("ours")), "rounds": rounds,
        "time over its": ratio["ratio"], "processor time over its": ratio["ratio of processor time"],
        "planning time claim": "never longer", "planning time met": yes(ratio["ratio of processor time"] <= 1),
    }  # fmt: skip


def _counted(prices: tuple[float, float] | None) -> str:
    return "forwards" if prices is None else f"makespan, uf {prices[0]:g}, ub {prices[1]:g}"


def _checkpoint_schedules(chosen: Settings) -> Iterator[Contest]:
    """Its schedules, one or two instances of each."""
    made = import_module("checkpoint_schedules")
    quick = chosen.quick
    few, many = (30, 60) if quick else (1000, 10_000)
    short = few if quick or chosen.full else 250  # its Revolve takes 35 s for 1,000 steps

    def contest(
        name: str, n: int, slots: str, planner: str, knobs: dict[str, Any], *arguments: Any, **more: Any
    ) -> Contest:
        prices = more.pop("prices", None)
        return Contest(
            PEERS[0], name, slots, n, planner, knobs,
            lambda: _listed(getattr(made, name)(*arguments, **more), n), lambda found: _tally(made, found, n), prices,
        )  # fmt: skip

    ram = {"binomial_storage": made.StorageType.RAM}
    yield contest("Revolve", short, "20", "revolve", {"slots": 20}, short, 20)
    yield contest("MultistageCheckpointSchedule", few, "3 + 17", "revolve", {"slots": 20}, few, 3, 17)
    yield contest("MultistageCheckpointSchedule", many, "20 + 0", "revolve", {"slots": 20}, many, 20, 0)
    yield contest("MixedCheckpointSchedule", 100, "10", "mixed", {"slots": 10}, 100, 10)
    yield contest("MixedCheckpointSchedule", few, "10", "mixed", {"slots": 10}, few, 10)
    yield contest("TwoLevelCheckpointSchedule", few, "5, period 50", "periodic_disk_revolve",
                  {"slots": 5, "period": 50}, 50, 5, **ram)  # fmt: skip
    for n in _lengths(chosen):
        for uf, ub in ((1.0, 1.0), (5.0, 1.0)):
            cost = {"uf": uf, "ub": ub, "wd": DISK_SECONDS, "rd": DISK_SECONDS, "prices": (uf, ub)}
            yield contest("HRevolve", n, "3 + 3", "h_revolve", {"slots": (3, 3)}, n, 3, 3, **cost)
            yield contest("HRevolve", n, "5 + 10", "h_revolve", {"slots": (5, 10)}, n, 5, 10, **cost)
            yield contest("DiskRevolve", n, "3", "disk_revolve", {"slots": 3}, n, 3, **cost)
            yield contest("PeriodicDiskRevolve", n, "3", "periodic_disk_revolve", {"slots": 3}, n, 3, **cost)
            yield contest("MultistageCheckpointSchedule", n, "3 + 3", "h_revolve", {"slots": (3, 3)}, n, 3, 3,
                          prices=(uf, ub))  # fmt: skip


def _lengths(chosen: Settings) -> tuple[int, ...]:
    """Steps for the schedules with a price of their own for the disk."""
    return (20,) if chosen.quick else (100, 250, 500) if chosen.full else (100, 250)


def _listed(schedule: Any, n: int) -> list[Any]:
    """The actions; a schedule that does not know the length is told it once the forward has come so far."""
    found = []
    for action in schedule:
        found.append(action)
        kind = type(action).__name__
        if kind == "Forward" and schedule.max_n is None and action.n1 >= n:
            schedule.finalize(n)
        if kind == "EndReverse":
            break
    return found


def _tally(made: Any, actions: list[Any], n: int) -> Tally:
    forwards = reversed_ = written = read = 0
    disk = made.StorageType.DISK
    for action in actions:
        match type(action).__name__:
            case "Forward":
                forwards += 0 if action.write_adj_deps else min(action.n1, n) - action.n0
                written += bool(action.write_ics and action.storage is disk)
            case "Reverse":
                reversed_ += action.n1 - action.n0
            case "Copy" | "Move":
                read += action.from_storage is disk
    return Tally(int(forwards), int(reversed_), int(written), int(read))  # some are numbers of NumPy


def _pyrevolve(chosen: Settings) -> Iterator[Contest]:
    """Revolve in C, H-Revolve in Python (there n - 1 counts the steps before the last)."""
    made = import_module("pyrevolve.schedulers")
    for n in (30,) if chosen.quick else (100, 1000, 10_000):
        yield Contest(
            PEERS[1], "CRevolve", "20", n, "revolve", {"slots": 20},
            lambda n=n: _drained(made, made.CRevolve(20, n)), lambda found: _tallied(made, found),
        )  # fmt: skip
    for n in _lengths(chosen):
        for uf, ub in ((1.0, 1.0), (5.0, 1.0)):

            def theirs(n: int = n, uf: float = uf, ub: float = ub) -> list[Any]:
                tiers = [SimpleNamespace(wd=w, rd=w, nckp=c) for w, c in ((0, 5), (DISK_SECONDS, 10))]
                levels = import_module("pyrevolve").Architecture(tiers)
                return _drained(made, made.HRevolve(n - 1, n - 1, levels, uf, ub, 0))

            yield Contest(
                PEERS[1], "HRevolve", "5 + 10", n, "h_revolve", {"slots": (5, 10)}, theirs,
                lambda found: _tallied(made, found), (uf, ub),
            )  # fmt: skip


def _drained(made: Any, schedule: Any) -> list[Any]:
    """Its actions as (type, steps or tier). An action may be reused for the next, so it is read at once."""
    act, found = made.Action, []
    while True:
        action = schedule.next()
        if action.type == act.TERMINATE:
            return found
        if action.type == act.ADVANCE:
            found.append((action.type, action.capo - action.old_capo))
        elif action.type in (act.TAKESHOT, act.RESTORE):
            found.append((action.type, action.storageIndex()))
        else:
            found.append((action.type, 0))


def _tallied(made: Any, actions: list[Any]) -> Tally:
    act = made.Action
    forwards = sum(steps for kind, steps in actions if kind == act.ADVANCE)
    reversed_ = sum(kind == act.REVERSE for kind, _ in actions)
    written, read = (sum(kind == one and tier > 0 for kind, tier in actions) for one in (act.TAKESHOT, act.RESTORE))
    last = sum(kind == act.LASTFW for kind, _ in actions)  # there the last step is reversed by an action of its own
    return Tally(forwards, reversed_ + last, written, read)


CONTESTS = {PEERS[0]: _checkpoint_schedules, PEERS[1]: _pyrevolve}

if __name__ == "__main__":
    main()
