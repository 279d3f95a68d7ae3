"""`Explanation`: what a program saves for backward and what becomes of it, as a value: rows, text, picture."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tapestream.planning.picture import figure_of, saved, unit_of
from tapestream.units import format_nbytes, format_seconds

Fate = Literal["kept", "restart checkpoint", "moved", "recomputed"]
COLUMNS = ("line", "operation", "shape", "dtype", "bytes", "to compute", "what the plan does")
_WORDS = {
    "kept": "kept in the first run", "restart checkpoint": "restart checkpoint", "moved": "moved away and back",
    "recomputed": "recomputed",
}  # fmt: skip
_SHOWN = 20
_BINS = 2000
_FEW = 60  # lines of full height that leave the curves to be seen


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """One storage that backward needs. ``file``, ``line``: where the program's code called the ``operation`` that made
    it (the innermost line outside torch). ``seconds``: of that operation, the median of its kind and shapes.

    ``fate``: "kept" from the first run on; part of a "restart checkpoint"; "moved", which is one or the other, moved to
    a slower tier and back; or "recomputed": its operation runs again ``times`` times.
    """

    file: str
    line: int
    operation: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    seconds: float
    fate: Fate
    times: int

    @property
    def where(self) -> str:
        """``"net.py:12"``: below the current folder the way from there, else the last two names."""
        path = Path(self.file)
        found = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else Path(*path.parts[-2:])
        return f"{found}:{self.line}"

    @property
    def words(self) -> str:
        """What the plan does with it."""
        times = {0: "", 1: " once", 2: " twice"}.get(self.times, f" {self.times} times")
        return f"{_WORDS[self.fate]}{times}"

    def cells(self) -> tuple[str, ...]:
        """For a table with the columns `COLUMNS`."""
        shape = " x ".join(map(str, self.shape)) or "1 number"
        return (
            self.where, self.operation, shape, self.dtype, format_nbytes(self.nbytes), format_seconds(self.seconds),
            self.words,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a program saves, heaviest first, and the plan for it.

    ``cuts``: the operations at which segments begin, and the end. ``restarts``: those before which the first run keeps
    a restart checkpoint. ``peak_nbytes``: most bytes of the whole plan, backward included, as simulated.
    ``live_nbytes``: bytes while each operation of the first run runs, by the plan; ``stored_nbytes``: the same with
    everything stored.
    """

    rows: tuple[SavedTensor, ...]
    cuts: tuple[int, ...]
    restarts: tuple[int, ...]
    budget_nbytes: int
    peak_nbytes: int
    live_nbytes: tuple[int, ...]
    stored_nbytes: tuple[int, ...]

    @property
    def operations(self) -> int:
        """How many operations the program makes."""
        return self.cuts[-1]

    def sums(self) -> dict[Fate, tuple[int, int]]:
        """For each fate: how many tensors, and their bytes."""
        fates: tuple[Fate, ...] = ("kept", "restart checkpoint", "moved", "recomputed")
        of = {fate: [row.nbytes for row in self.rows if row.fate == fate] for fate in fates}
        return {fate: (len(sizes), sum(sizes)) for fate, sizes in of.items() if sizes or fate != "moved"}

    def summary(self) -> str:
        """The plan in a sentence or two."""
        parts = [f"{_WORDS[fate]}: {count} of {format_nbytes(size)}" for fate, (count, size) in self.sums().items()]
        restarts = "1 restart checkpoint" if len(self.restarts) == 1 else f"{len(self.restarts)} restart checkpoints"
        return (
            f"{self.operations} operations in {len(self.cuts) - 1} segments, {restarts} beside the start; peak "
            f"{format_nbytes(self.peak_nbytes)} of {format_nbytes(self.budget_nbytes)} allowed. Saved tensors "
            f"{'; '.join(parts)}."
        )

    def __str__(self) -> str:
        cells = [COLUMNS, *(row.cells() for row in self.rows[:_SHOWN])]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
        more = [f"and {len(self.rows) - _SHOWN} lighter ones"] if len(self.rows) > _SHOWN else []
        return "\n".join(line.rstrip() for line in (*lines, *more, self.summary()))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw live bytes over the operations of the first run, the segments, the restart checkpoints and the budget.
        The ending of ``path`` says whether as PNG, PDF or SVG.

        Raises InputError if matplotlib is missing or does not know the ending.
        """
        figure = figure_of(12, 5)
        axis = figure.subplots()
        factor, unit = unit_of(max(self.budget_nbytes, *self.stored_nbytes))
        at, live = _thinned(self.live_nbytes)
        axis.fill_between(
            at, [n / factor for n in live], step="post", color="#4c78a8", alpha=0.6, linewidth=0,
            label="first run, by the plan",
        )  # fmt: skip
        at, stored = _thinned(self.stored_nbytes)
        axis.step(at, [n / factor for n in stored], where="post", color="#f58518", label="with everything stored")
        axis.axhline(self.budget_nbytes / factor, color="black", linestyle="--", linewidth=1, label="budget")
        axis.axhline(
            self.peak_nbytes / factor, color="#b279a2", linestyle=":", label="peak of the plan, backward too"
        )  # fmt: skip
        top = 1.12 * max(self.budget_nbytes if self.peak_nbytes * 4 > self.budget_nbytes else 0, self.peak_nbytes,
                         *self.stored_nbytes, 1) / factor  # fmt: skip
        axis.set_ylim(0, top)
        axis.set_xlim(0, self.operations)
        height = top if len(self.cuts) <= _FEW else 0.03 * top
        axis.vlines(self.cuts[1:-1], 0, height, color="#bab0ac", linewidth=0.5, label="segments begin")
        if self.restarts:
            axis.plot(
                self.restarts, [0.97 * top] * len(self.restarts), "v", color="#d62728", label="restart checkpoints"
            )
        axis.set_xlabel("operation")
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axis.set_ylabel(unit)
        axis.set_title(self.summary().split(" Saved")[0], fontsize="medium")
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
        saved(figure, path)


def _thinned(values: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Places and values; of more than can be told apart the highest of each run, the last one to the end."""
    stride = -(-len(values) // _BINS)
    places = list(range(0, len(values), stride))
    found = [max(values[at : at + stride]) for at in places]
    return [*places, len(values)], [*found, found[-1]]
