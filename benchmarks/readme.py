"""Writes docs/results.md, the first lines of it in README.md, the table of docs/my-model-does-not-fit.md, and
docs/compatibility.md, from benchmarks/results.

``python -m benchmarks.readme [--check]``. Each file is a result:
{"name", "title", "date", "commit", "machine", "versions", "rows": [{column: value}, ..]}. In the rows a column
``claim`` (or ``... claim``) says what is claimed, and ``met`` (``... met``) whether that row meets it.
``--check`` writes nothing and exits 1 where a page is not what the files say.
"""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.compatibility.page import page as compatibility
from benchmarks.headlines import FIRST, HEADLINES

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- results: written by benchmarks/readme.py -->"
END = "<!-- results: end -->"
_FIELDS = {"name", "title", "date", "commit", "machine", "versions", "rows"}
_HEAD = """# Results

One line for each benchmark, then what was missed, then every row as it was measured. A *ratio* below 1 means less
time, memory or work than what it is measured against. It is the median over rounds in which both sides ran one right
after the other. A line of the first table gives the median over its rows, with the least and the most of them (of one
row: its quartiles). *Met* counts rows. `make bench` measures anew, `python -m benchmarks.readme` writes this page. No
number here is of a GPU.
"""
_COLUMNS = ("measured", "against", "ratio", "claim", "met", "when and where")
_RATIOS = {
    "ratio",
    "of plain's peak",
    "ratio to the shorter",
    "over the least",
    "over the better of Revolve and offload",
    "seconds per layer, of the shallowest's",
}
"""Columns whose figures may be shown together."""
_NONE = "No results have been recorded yet."


def page(results: Iterable[dict[str, Any]]) -> str:
    """The text of docs/results.md: a line each, what was missed, and one table a result. Raises ValueError where a
    field is missing, or a result has no headline."""
    found = _ordered(results)
    missed = [line for result in found for line in _missed(result)]
    parts = [
        _HEAD.rstrip(),
        "## Each benchmark in a line",
        headlines(found),
        "## Claims that were missed",
        "\n".join([*_head("measured", "row", "figure", "claim"), *missed]) if missed else "None.",
        "Rows that have no claim are not listed; their figures are in the tables below.",
        *map(_table, found),
    ]
    return "\n\n".join(parts) + "\n"


def headlines(results: Iterable[dict[str, Any]], only: Sequence[str] = (), page: str = "") -> str:
    """A line for each result, or for ``only`` those; links lead to the tables of ``page``."""
    found = {result["name"]: result for result in _ordered(results)}
    chosen = [found[name] for name in only or found if name in found]
    lines = [_headline(result, page) for result in chosen]
    return "\n".join([*_head(*_COLUMNS), *lines]) if lines else _NONE


def expectations(results: Iterable[dict[str, Any]]) -> str:
    """The table of the guide: a line for each model, a column for each GPU; from the result ``what_to_expect``."""
    rows = [row for result in results if result.get("name") == "what_to_expect" for row in result["rows"]]
    gpus = sorted({row["GPU GiB"] for row in rows})
    lines: dict[tuple[object, ...], dict[int, str]] = {}
    for row in rows:
        kind = (row["model"], row["dtype"], row["tokens"], row["RAM GiB"])
        lines.setdefault(kind, {})[row["GPU GiB"]] = _expected(row)
    head = [_row(["a step of", "dtype", "tokens", "RAM", *(f"GPU of {gpu} GiB" for gpu in gpus)])]
    head.append(_row(["---"] * (4 + len(gpus))))
    made = [
        _row([str(model), str(dtype), str(tokens), f"{ram} GiB", *(cells.get(gpu, "") for gpu in gpus)])
        for (model, dtype, tokens, ram), cells in lines.items()
    ]
    return "\n".join([*head, *made]) if made else _NONE


def _expected(row: dict[str, Any]) -> str:
    if row["fits"] != "yes":
        return f"no: {_cell(row['least GiB'])} GiB needed"
    places = [f"{_cell(row[f'{where} GiB'])} GiB {where}" for where in ("in RAM", "on disk") if row[f"{where} GiB"]]
    return ", ".join([f"{_cell(row['s per step'])} s", *places])


def rewritten(text: str, section: str) -> str:
    """``text`` with its section made anew. Raises ValueError where the marks are not there once each, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"the page needs the lines {BEGIN} and {END} once each, in this order")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{section}\n\n{END}{rest.partition(END)[2]}"


def load(folder: Path) -> list[dict[str, Any]]:
    """Every result in ``folder``."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _ordered(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    found = list(results)
    for result in found:
        missing = _FIELDS - result.keys()
        if missing:
            raise ValueError(f"result {result.get('name')!r} lacks {', '.join(sorted(missing))}")
        if result["name"] not in HEADLINES:
            raise ValueError(f"result {result['name']!r} has no line in benchmarks/headlines.py")
    order = list(HEADLINES)
    return sorted(found, key=lambda result: order.index(result["name"]))


def _headline(result: dict[str, Any], page: str) -> str:
    line, rows = HEADLINES[result["name"]], result["rows"]
    claims = [line.claim, *line.others.values()] if line.claim else ["none"]
    met = [f"{sum(row[f'{kind}met'] == 'yes' for row in judged)} of {len(judged)}" for kind, judged in _judged(rows)]
    return _row([
        f"[{line.what}]({page}#{anchor(result['title'])})", line.against,
        _spread(rows, line.figures.get("", "")) if line.figures.get("") in _RATIOS else "", "; ".join(claims),
        "; ".join(met), f"{result['date']}, {result['machine']}",
    ])  # fmt: skip


def _judged(rows: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """Rows by the kind of their claim: what stands before ``claim`` and ``met``."""
    kinds = [column.removesuffix("met") for column in _columns(rows) if column == "met" or column.endswith(" met")]
    return [(kind, [row for row in rows if row.get(f"{kind}met", "") != ""]) for kind in sorted(kinds)]


def _spread(rows: Sequence[dict[str, Any]], column: str) -> str:
    """The median over the rows that a claim is about, or all where there is none, with the least and the most."""
    found = [row for row in rows if isinstance(row.get(column), (int, float))]
    found = [row for row in found if row.get("met", "") != ""] or found
    if not found:
        return ""
    ratios = [float(row[column]) for row in found]
    if len(ratios) == 1:
        around = found[0].get("quartiles", "")
        return f"{_cell(ratios[0])} ({around})" if around and column == "ratio" else _cell(ratios[0])
    return f"{_cell(median(ratios))} ({_cell(min(ratios))} to {_cell(max(ratios))})"


def _missed(result: dict[str, Any]) -> list[str]:
    line = HEADLINES[result["name"]]
    lines = []
    for kind, judged in _judged(result["rows"]):
        for row in [row for row in judged if row[f"{kind}met"] != "yes"]:
            which = ", ".join(_cell(row[column]) for column in line.rows if row.get(column, "") != "")
            column = line.figures.get(kind, "")
            figure = f"{column} {_cell(row[column])}" if column in row else str(row.get("plan", ""))
            claim = f"{kind}{row.get(f'{kind}claim') or line.others.get(kind, line.claim)}"
            lines.append(_row([f"[{line.what}](#{anchor(result['title'])})", which, figure, claim]))
    return lines


def _head(*columns: str) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns))]


def anchor(title: str) -> str:
    """What a heading is linked by: small letters, spaces as hyphens, nothing else but letters, digits and hyphens."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows for column in row))


def _table(result: dict[str, Any]) -> str:
    columns, versions = _columns(result["rows"]), result["versions"]
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"## {result['title']}",
        "",
        f"{result['date']}, {result['machine']}, {versions}, commit {result['commit']}",
        "",
        _row(columns),
        _row(["---"] * len(columns)),
        *(_row([_cell(row.get(column, "")) for column in columns]) for row in result["rows"]),
    ]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    """Floats with three significant digits, written out; a bar would end the cell."""
    if isinstance(value, float):
        value = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write all pages, or with ``--check`` only compare."""
    results = load(ROOT / "benchmarks" / "results")
    sections = {
        ROOT / "README.md": headlines(results, FIRST, "docs/results.md"),
        ROOT / "docs" / "my-model-does-not-fit.md": expectations(results),
    }
    wanted = {path: rewritten(path.read_text(encoding="utf-8"), section) for path, section in sections.items()}
    wanted[ROOT / "docs" / "results.md"] = page(results)
    wanted[ROOT / "docs" / "compatibility.md"] = compatibility(ROOT / "benchmarks" / "results" / "compatibility")
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} does not show benchmarks/results; run: python -m benchmarks.readme", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
