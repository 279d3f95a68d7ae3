"""Writes the results section of README.md from benchmarks/results/*.json: ``python benchmarks/readme.py [--check]``.

Each file holds one claim: {"name", "title", "date", "commit", "machine", "versions", "rows": [{column: value}, ..]}.
``--check`` writes nothing and exits 1 where the section is not what the files say.
"""

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN = "<!-- results: written by benchmarks/readme.py -->"
END = "<!-- results: end -->"
_FIELDS = {"name", "title", "date", "commit", "machine", "versions", "rows"}


def section(results: Iterable[dict[str, Any]]) -> str:
    """The text between the marks: one table a result, ordered by name. Raises ValueError where a field is missing."""
    parts = [_table(result) for result in sorted(results, key=lambda result: str(result.get("name")))]
    return "\n\n".join(parts) or "No results have been recorded yet."


def rewritten(readme: str, results: Iterable[dict[str, Any]]) -> str:
    """``readme`` with its section made anew. Raises ValueError where the marks are not there once each, in order."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1 or readme.index(BEGIN) > readme.index(END):
        raise ValueError(f"README.md needs the lines {BEGIN} and {END} once each, in this order")
    before, _, rest = readme.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{section(results)}\n\n{END}{rest.partition(END)[2]}"


def load(folder: Path) -> list[dict[str, Any]]:
    """Every result in ``folder``."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _table(result: dict[str, Any]) -> str:
    missing = _FIELDS - result.keys()
    if missing:
        raise ValueError(f"result {result.get('name')!r} lacks {', '.join(sorted(missing))}")
    columns = list(dict.fromkeys(column for row in result["rows"] for column in row))
    versions = result["versions"]
    if isinstance(versions, dict):
        versions = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"### {result['title']}",
        "",
        f"{result['date']}, {result['machine']}, {versions}, commit {str(result['commit'])[:12]}",
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
    """Write README.md, or with ``--check`` only compare."""
    path = ROOT / "README.md"
    before = path.read_text(encoding="utf-8")
    after = rewritten(before, load(ROOT / "benchmarks" / "results"))
    if "--check" in arguments:
        if after != before:
            print("README.md does not show benchmarks/results; run: python benchmarks/readme.py", file=sys.stderr)
        return int(after != before)
    path.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
