"""Rows of million_layers beside each other: shallow and deep networks of one kind, and what is claimed."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.common import Row, Settings, write, yes

SECONDS, PEAK = "seconds per layer, of the shallowest's", "process peak, of the shallowest's"
LINK = "step, of max(resident, link)"


def keep_as_they_come(
    rows: Iterable[Row],
    order: Sequence[tuple[str, int]],
    name: str,
    title: str,
    chosen: Settings,
    output: Path,
    **facts: object,
) -> None:
    """Print ``rows``. With ``chosen.save`` each is put in its place in ``output``/NAME.json as it comes, and the other
    rows there stay as they are."""
    file = output / f"{name}.json"
    known = json.loads(file.read_text())["rows"] if chosen.save and file.exists() else []
    for row in rows:
        known = merged(known, row, order)
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if chosen.save:
            write(name, title, chosen, known, output, **facts)


def merged(rows: Sequence[Row], row: Row, order: Sequence[tuple[str, int]]) -> list[Row]:
    """``rows`` with ``row`` in the place of the one for the same run, in ``order`` (network and layers), compared. One
    of saving alone is added to that."""
    places = {key: number for number, key in enumerate(order)}
    found = {(one["network"], one["layers"]): one for one in rows}
    key = row["network"], row["layers"]
    found[key] = row if "plain PyTorch" in row else {**found.get(key, {}), **row}
    ordered = [found[key] for key in sorted(found, key=lambda key: places.get(key, len(places)))]
    return [_judged(_compared(one, ordered)) if "plain PyTorch" in one else one for one in ordered]


def _compared(row: Row, rows: Sequence[Row]) -> Row:
    """With its seconds and its peak as shares of those of the shallowest network of its kind that ran."""
    others = [one for one in rows if one["network"] == row["network"] and "step us/layer" in one]
    shallowest = min(others, key=lambda one: one["layers"], default=row)
    if "failed" in row or shallowest["layers"] >= row["layers"]:
        return row
    return {
        **row,
        SECONDS: round(row["step us/layer"] / shallowest["step us/layer"], 3),
        PEAK: round(row["process peak MiB"] / shallowest["process peak MiB"], 3),
    }


def _judged(row: Row) -> Row:
    """With what is claimed of it, and whether it is so. Claims about depth are those of the deepest of a kind."""
    claims = ["a step where plain PyTorch fails"]
    holds = "failed" not in row and row["plain PyTorch"] != "fits"
    if row["layers"] == 250_002 and SECONDS in row:
        claims.append("per layer at most 1.15 times the seconds of the shallowest")
        holds = holds and row[SECONDS] <= 1.15
    if row["layers"] == 1_000_002 and PEAK in row:
        claims.append("a peak at most 1.10 times that of the shallowest")
        holds = holds and row[PEAK] <= 1.10
    if LINK in row:
        claims.append("at most 1.2 times max(resident, link)")
        holds = holds and row[LINK] <= 1.2
    if row["layers"] == 2502:  # there to be compared with
        return row
    return {**row, "claim": ", ".join(claims), "met": yes(holds)}
