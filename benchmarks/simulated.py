"""Benchmarks that ask what the command says, write it and draw it."""

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, Row, Settings, write


def asked_and_drawn(
    name: str,
    title: str,
    asked: Callable[[bool], Iterator[Row]],
    draw: Callable[[dict[str, Any], Path], None],
    picture: Path,
) -> None:
    """The options of such a benchmark: ``asked(quick)`` gives the rows of the result ``name``, which is drawn into
    ``picture``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="a few rows, nothing is written")
    parser.add_argument("--draw", action="store_true", help="only draw, from the result that is there")
    given = parser.parse_args()
    if not given.draw:
        rows = []
        for row in asked(given.quick):
            rows.append(row)
            print("  ".join(f"{key}={value}" for key, value in row.items() if key != "command"), flush=True)
        if given.quick:
            return
        write(name, title, Settings("cpu", given.quick, 1, 1, True, tempfile.gettempdir()), rows)
    draw(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")), picture)
