"""Writes docs/results.md, its summary in README.md, and the table of docs/my-model-does-not-fit.md, from
benchmarks/results/*.json.

``python benchmarks/readme.py [--check]``. Each file is a result:
{"name", "title", "date", "commit", "machine", "versions", "rows": [{column: value}, ..]}. In the rows a column
``claim`` (or ``... claim``) says what is claimed, and ``met`` (``... met``) whether that row meets it.
``--check`` writes nothing and exits 1 where a page is not what the files say.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- results: written by benchmarks/readme.py -->"
END = "<!-- results: end -->"
_FIELDS = {"name", "title", "date", "commit", "machine", "versions", "rows"}
_HEAD = """# Results

Every row as it was measured; `make bench` measures anew and `python benchmarks/readme.py` writes this page.
A ratio is the median over rounds in which both sides ran one right after the other, with its quartiles.
"""
_NONE = "No results have been recorded yet."


def page(results: Iterable[dict[str, Any]]) -> str:
    """The text of docs/results.md: one table a result, ordered by name. Raises ValueError where a field is missing."""
    return "\n\n".join([_HEAD.rstrip(), *map(_table, _ordered(results))]) + "\n"


def summary(results: Iterable[dict[str, Any]]) -> str:
    """The section of README.md: a line for each claim of each result."""
    lines = [line for result in _ordered(results) for line in _summed(result)]
    head = [_row(["measured", "claim", "met", "ratios", "when and where"]), _row(["---"] * 5)]
    return "\n".join([*head, *lines]) if lines else _NONE


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
    found = sorted(results, key=lambda result: str(result.get("name")))
    for result in found:
        missing = _FIELDS - result.keys()
        if missing:
            raise ValueError(f"result {result.get('name')!r} lacks {', '.join(sorted(missing))}")
    return found


def _summed(result: dict[str, Any]) -> list[str]:
    """A line for each kind of claim in the rows; one without counts for a result that claims nothing."""
    rows, link = result["rows"], f"[{result['title']}](docs/results.md#{_anchor(result['title'])})"
    ratios = [row["ratio"] for row in rows if isinstance(row.get("ratio"), (int, float))]
    spread = f"{_cell(min(ratios))} to {_cell(max(ratios))}" if ratios else ""
    where = f"{result['date']}, {result['machine']}"
    kinds = [c.removesuffix("met") for c in _columns(rows) if c == "met" or c.endswith(" met")]
    lines = []
    for kind in kinds:
        judged = [row for row in rows if row.get(f"{kind}met", "") != ""]
        claimed = dict.fromkeys(row[f"{kind}claim"] for row in judged if row.get(f"{kind}claim"))
        claims = kind + " or ".join(map(_cell, claimed))
        met = sum(row[f"{kind}met"] == "yes" for row in judged)
        lines.append(_row([link, claims, f"{met} of {len(judged)}", "" if kind else spread, where]))
    return lines or [_row([link, "", "", spread, where])]


def _anchor(title: str) -> str:
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
    sections = {ROOT / "README.md": summary(results), ROOT / "docs" / "my-model-does-not-fit.md": expectations(results)}
    wanted = {path: rewritten(path.read_text(encoding="utf-8"), section) for path, section in sections.items()}
    wanted[ROOT / "docs" / "results.md"] = page(results)
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.name} does not show benchmarks/results; run: python benchmarks/readme.py", file=sys.stderr)
        return int(bool(stale))
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
