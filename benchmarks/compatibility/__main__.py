"""``python -m benchmarks.compatibility [KIND ...]``: runs every case in a child of its own, and writes what was found.

Kinds: transformers, timm, peft, science, libraries, trainers, and packages of optimizers: torch.optim,
pytorch_optimizer, timm.optim, bitsandbytes.optim, torchao.optim. Packages that are not installed are left as they are
in benchmarks/results/compatibility; of "science", "libraries" and "trainers", they have no rows.
"""

import argparse
import datetime
import importlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection

import torch

from benchmarks.common import RESULTS, Row, commit, machine_name
from benchmarks.compatibility import families, libraries, methods, science, trainers
from benchmarks.compatibility.called import CallCase, tried_call
from benchmarks.compatibility.trial import Subject, tried

KINDS: dict[str, Callable[[], Iterator[Subject | CallCase]]] = {
    "transformers": families.cases,
    "peft": methods.peft_methods,
    **{package: partial(methods.optimizers_of, package) for package in methods.OF_OPTIMIZERS},
    "timm": methods.timm_models,
    "science": science.cases,
    "libraries": libraries.cases,
    "trainers": trainers.cases,
}
_PACKAGES: dict[str, tuple[str, ...]] = {
    "science": science.PACKAGES, "libraries": libraries.PACKAGES, "trainers": trainers.PACKAGES,
}  # fmt: skip


def main() -> int:
    """How many rows are neither exact nor refused nor not run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(KINDS), help="which (all)")
    parser.add_argument("--only", default="", help="names that hold this; nothing is written")
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for one case")
    given = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for kind in given.kinds:
        chosen = [case for case in KINDS[kind]() if given.only in case.name]
        rows = []
        for case in chosen:
            row = _in_child(case, given.limit)
            rows.append(row)
            bad += row["outcome"] not in ("exact", "refused", "not run")
            print(kind, *(f"{value}" for value in row.values()), sep=" | ", flush=True)
        if rows and not given.only:
            _write(kind, rows)
    return bad


def _in_child(case: Subject | CallCase, limit: float) -> Row:
    """Nothing of one case is left for the next; what ends or hangs is a row."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(case, sender))
    child.start()
    sender.close()
    try:
        found: Row = receiver.recv() if receiver.poll(limit) else {"outcome": "not run", "why": f"over {limit:.0f} s"}
    except EOFError:
        found = {"outcome": "raw error", "why": "the process ended"}
    finally:
        child.kill()
        child.join()
    return {"name": case.name, **found}


def _send(case: Subject | CallCase, sender: Connection) -> None:
    warnings.simplefilter("ignore")
    sender.send(tried_call(case) if isinstance(case, CallCase) else tried(case))


def _write(kind: str, rows: list[Row]) -> None:
    named = _PACKAGES.get(kind, (kind.split(".")[0],))
    packages = [name for name in named if importlib.util.find_spec(name) is not None]
    versions = {name: _version(name) for name in dict.fromkeys(("torch", *packages))}
    result = {
        "name": kind, "date": datetime.date.today().isoformat(), "commit": commit(), "machine": machine_name("cpu"),
        "versions": versions, "rows": rows,
    }  # fmt: skip
    folder = RESULTS / "compatibility"
    folder.mkdir(exist_ok=True)
    path = folder / f"{kind}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _version(package: str) -> str:
    """Of one that lies on the path without having been installed, what it says itself."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return str(importlib.import_module(package).__version__)


if __name__ == "__main__":
    sys.exit(main())
