"""Claim: a step costs what finds no room in RAM, not what the model weighs.

What `tapestream plan` says of one model while RAM and the card grow, and of a larger one: seconds of a step, gibibytes
that pass the disk, and how often blocks run. Simulations, not measurements; every row is one command, which the row
holds. ``before``: the same by another revision of this repository.

``python -m benchmarks.three_tiers [--before REVISION]`` asks, writes the result and draws docs/three-tiers.svg;
``--draw`` draws it from the result that is there.
"""

import argparse
import json
import shlex
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.against import revision_of, sources_in
from benchmarks.common import RESULTS, Row, Settings, write, yes
from benchmarks.what_to_expect import said_to

TITLE = "Seconds of a step as RAM and the card grow, simulated"
PICTURE = Path(__file__).parents[1] / "docs" / "three-tiers.svg"
BEFORE = "f744ccf"
STEP = "--link 25GB/s --batch 4 --seq 2048 --flops 140e12 --update backward"
RAM = (16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64, 66, 68, 70, 72, 76, 80, 88, 96, 104, 112, 128)
CARDS = (8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 40, 48)
CLAIMS = {
    ("gpt3-6.7b", 24, 70): 5.5,
    ("gpt3-6.7b", 24, 64): 7.5,
    ("gpt3-6.7b", 24, 32): 24.0,
    ("gpt3-13b", 12, 64): 60.0,
}
"""Seconds, at most."""


def main() -> None:
    """Ask, write and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="two rows, nothing is written")
    parser.add_argument("--before", default=BEFORE, help="revision to compare with (%(default)s)")
    parser.add_argument("--draw", action="store_true", help="only draw, from the result that is there")
    given = parser.parse_args()
    if not given.draw:
        chosen = Settings("cpu", given.quick, 1, 1, not given.quick, tempfile.gettempdir())
        revision = revision_of(given.before)
        rows = []
        with tempfile.TemporaryDirectory(prefix="three-tiers-") as folder:
            for row in asked(given.quick, sources_in(Path(folder), revision)):
                rows.append(row)
                print("  ".join(f"{key}={value}" for key, value in row.items() if key != "command"), flush=True)
        if given.quick:
            return
        write("three_tiers", TITLE, chosen, rows, before=revision)
    draw(json.loads((RESULTS / "three_tiers.json").read_text(encoding="utf-8")), PICTURE)


def asked(quick: bool, sources: tuple[Path, Path]) -> Iterator[Row]:
    """A row for each machine; ``sources``: now and before."""
    machines = [("gpt3-6.7b", 24, ram) for ram in RAM] + [("gpt3-6.7b", card, 64) for card in CARDS if card != 24]
    for model, card, ram in machines[13:15] if quick else [*machines, ("gpt3-13b", 12, 64)]:
        allowed = f"--budget {card}GiB --gpu {card}GiB --ram {ram}GiB --disk 4TB"
        words = f"plan {model} --dtype bf16 {allowed} {STEP}".split()
        now, before = (_answer(source, words) for source in sources)
        row: Row = {"model": model, "card GiB": card, "RAM GiB": ram}
        row |= {"s per step": _rounded(now, "seconds_per_step"), "before, s": _rounded(before, "seconds_per_step")}
        written = [_rounded(one, "disk_written_nbytes_per_step", 2**30) for one in (now, before)]
        row |= {"written GiB": written[0], "before, written GiB": written[1]}
        row |= {"forwards": None if now is None else now["forwards"]}
        most = CLAIMS.get((model, card, ram))
        if most is not None:
            row |= {"claim": f"at most {most} s", "met": yes(now is not None and now["seconds_per_step"] <= most)}
        yield {**row, "command": shlex.join(["tapestream", *words])}


def _answer(source: Path, words: list[str]) -> dict[str, Any] | None:
    said = said_to(words, source)
    answer: dict[str, Any] | None = said["answer"] if said["fits"] else None
    return answer


def _rounded(answer: dict[str, Any] | None, name: str, unit: int = 1) -> float | None:
    return None if answer is None else round(answer[name] / unit, 3)


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds against RAM and against the card into an SVG; its description is the result's `mark`."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    rows = [row for row in result["rows"] if row["model"] == "gpt3-6.7b"]
    panels = (("RAM GiB", "card GiB", 24, "RAM"), ("card GiB", "RAM GiB", 64, "the card's memory"))
    for axes, (varied, fixed, at, name) in zip(figure.subplots(1, 2), panels, strict=True):
        those = sorted((row for row in rows if row[fixed] == at), key=lambda row: row[varied])
        for column, label, colour in (("before, s", "before", "#9d755d"), ("s per step", "now", "#1b9e9e")):
            pairs = [(row[varied], row[column]) for row in those if row[column] is not None]
            axes.plot(*zip(*pairs, strict=True), color=colour, linewidth=1.4, marker=".", label=label)
        axes.set(xlabel=f"{name}, GiB", ylabel="seconds of a step", ylim=(0, None))
        axes.set_title(f"GPT-3 6.7B, {fixed.removesuffix(' GiB')} of {at} GiB", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "tapestream", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(result)})


def mark(result: dict[str, Any]) -> str:
    """What tells whether a picture is that of a result."""
    return f"{result['date']}, commit {result['commit']}: {len(result['rows'])} rows"


if __name__ == "__main__":
    main()
