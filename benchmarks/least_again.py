"""Claim: what a program's plan runs again is at most 1.3 times what any plan within its budget must.

The bound is a linear program: of all that backward needs, as much is there at the turn as fits into the budget, and the
rest is made again, each operation from what is there or is made again too. It knows nothing of the memory that running
again takes, so that no plan may reach it. Seconds of operations are those that the program measured; a step's ratio is
what the seconds that run again add to a step of plain PyTorch, without any time for planning, noting or copies.
"""

from typing import Any

import numpy
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

import tapestream as ts
from benchmarks.common import Row, Settings, alternate, milliseconds, save, settings, yes
from benchmarks.networks import Case, gpt, imagenet_resnet, resnet
from benchmarks.program_networks import step_of, tape_nbytes
from tapestream.frontends.program.candidates import Found
from tapestream.frontends.program.cuts import Borders

TITLE = "What plans of programs run again, beside the least that any plan must"
MOST = 1.3
_SHARES = (0.25, 0.4)


def main() -> None:
    """Measure all networks."""
    chosen = settings(rounds=5)
    save("least_again", TITLE, chosen, (row for case in _cases(chosen.quick) for row in _rows(case, chosen)))


def _cases(quick: bool) -> list[Case]:
    if quick:
        return [imagenet_resnet((1, 1), 8, 2, 32, "cpu"), gpt(2, 64, 2, 64, "cpu")]
    wide = imagenet_resnet((3, 8, 36, 3), 64, 4, 224, "cpu")
    return [wide, resnet(18, 16, "cpu"), gpt(12, 768, 1, 1024, "cpu"), gpt(24, 256, 4, 128, "cpu")]


def _rows(case: Case, chosen: Settings) -> list[Row]:
    plain = case.network()
    seconds = alternate({"plain": step_of(plain, case, plain)}, chosen.rounds, chosen.device).seconds("plain")
    tape, shares = tape_nbytes(plain, case), (0.9,) if chosen.quick else _SHARES
    return [_row(case, share, tape, seconds) for share in shares]


def _row(case: Case, share: float, tape: int, seconds: float) -> Row:
    network, budget = case.network(), int(share * tape)
    program = ts.Program(network, budget=budget)
    step, borders = step_of(network, case, program), borders_of(program)
    for _ in range(4):
        step()
    forward = float(borders[-1].sizes.seconds().sum())
    again, least = seconds_again(program, borders[-1]), least_seconds(borders[-1], budget)
    return {
        "network": case.name, "part of the tape": share, "operations": len(borders[-1].record),
        "ms of the operations": milliseconds(forward), "run again": round(again / forward, 3),
        "at least": round(least / forward, 3), "over the least": round(again / least, 3),
        "claim": f"at most {MOST}", "met": yes(again <= MOST * least),
        "ms of a plain step": milliseconds(seconds), "ratio of a step by the plan": round(1 + again / seconds, 3),
        "ratio by the least": round(1 + least / seconds, 3),
    }  # fmt: skip


def borders_of(program: ts.Program) -> list[Borders]:
    """A list to which every later call that looks for a plan adds what it knows of the operations."""
    found, made = list[Borders](), program._borders

    def kept(sweep: Any) -> Borders:
        found.append(made(sweep))
        return found[-1]

    program._borders = kept  # type: ignore[method-assign]
    return found


def seconds_again(program: ts.Program, borders: Borders) -> float:
    """What the plan of the last call runs again."""
    last = program._last
    assert last is not None
    assert last.plan is not None
    return Found(last.plan, last.cuts, last.holding).again(borders)


def least_seconds(borders: Borders, budget: int) -> float:
    """A bound from below for every plan within ``budget`` bytes that moves nothing."""
    record, sizes, n = borders.record, borders.sizes, len(borders.record)
    storage, birth, nbytes = numpy.asarray(record.storage), numpy.asarray(record.birth), sizes.nbytes.copy()
    nbytes[storage[sizes.results]] = 0  # the caller holds them
    maker: dict[int, int] = {}
    for value, one in enumerate(storage.tolist()):
        if not record.storage_external[one]:
            maker[one] = min(int(birth[value]), maker.get(one, n))
    # Columns: storages that are there at the turn; what operations have made inside; operations that run again.
    kept = {one: column for column, one in enumerate(maker)}
    inner, again = len(kept), len(kept) + n
    entries, least = list[tuple[int, int, float]](), list[float]()

    def asks(wanted: float, *terms: tuple[int, float]) -> None:
        entries.extend((len(least), column, factor) for column, factor in terms)
        least.append(wanted)

    for one in {int(one) for one in record.saves if one in maker}:
        asks(1, (kept[one], 1), (again + maker[one], 1))
    for k in range(n):
        if record.inner_nbytes[k]:
            asks(1, (inner + k, 1), (again + k, 1))
        for value in {value for value in record.arguments_of(k) if value >= 0 and storage[value] in maker}:
            asks(0, (kept[int(storage[value])], 1), (again + int(birth[value]), 1), (again + k, -1))
    asks(-budget, *((column, -float(nbytes[one])) for one, column in kept.items()))
    entries += [(len(least) - 1, inner + k, -float(record.inner_nbytes[k])) for k in range(n)]
    rows, columns, factors = zip(*entries, strict=True)
    asked = coo_array((factors, (rows, columns)), shape=(len(least), again + n)).tocsr()
    cost = numpy.concatenate((numpy.zeros(again), sizes.seconds()))
    return float(milp(cost, constraints=LinearConstraint(asked, least, numpy.inf), bounds=Bounds(0, 1)).fun)


if __name__ == "__main__":
    main()
