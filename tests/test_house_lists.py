"""Rules of the house that are not kept everywhere yet: lists of exceptions, which may only become shorter."""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
PUBLIC = {"tapestream", "tapestream.errors", "tapestream.units"}

INSIDE: dict[str, set[str]] = {
    "cli": {
        "accelerator.device", "accelerator.memory", "costs", "costs.machine", "costs.rates",
        "frontends.available", "frontends.loss", "frontends.module.blocks", "frontends.module.plans.divide",
        "frontends.module.plans.prepare", "frontends.module.stream", "frontends.outlines.answer",
        "frontends.outlines.fake", "frontends.outlines.lengthened", "frontends.outlines.optimizers",
        "frontends.outlines.outline", "frontends.outlines.outlining", "frontends.outlines.question",
        "frontends.program.explanation", "frontends.program.program", "frontends.saving.folder",
        "frontends.saving.manifest", "frontends.saving.save", "ir.actions", "planners", "planning.auto",
        "planning.compare", "planning.measure", "planning.plan_file", "planning.remedy", "planning.tradeoff",
        "planning.where", "storage.disk", "storage.locked", "storage.meter", "system.collector", "system.files",
        "system.limits", "system.locks", "system.signals",
    },
    "models": {
        "frontends.saving.state", "late", "system.signals",
    },
}  # fmt: skip
"""By package: modules from inside that it imports beside what users have."""
IN_CYCLES: list[set[str]] = [
    {
        "executor.program.noting.along", "executor.program.noting.following", "executor.program.noting.noting",
        "executor.program.noting.numbering", "executor.program.noting.outsiders", "executor.program.noting.packs",
        "executor.program.noting.trials",
    },
    {
        "executor.program.record.record", "executor.program.record.settled", "executor.program.record.unread",
    },
    {
        "frontends.chain", "frontends.chain_call",
    },
    {
        "frontends.module.accumulating.accumulation", "frontends.module.accumulating.joint_call",
        "frontends.module.accumulating.micro", "frontends.module.allocator", "frontends.module.calls.beside",
        "frontends.module.calls.call", "frontends.module.calls.forward_only", "frontends.module.calls.gathering",
        "frontends.module.calls.live", "frontends.module.calls.longest", "frontends.module.calls.measured",
        "frontends.module.calls.node", "frontends.module.calls.profiling", "frontends.module.calls.ready",
        "frontends.module.calls.refused", "frontends.module.calls.second_order", "frontends.module.calls.stepping",
        "frontends.module.one_plan", "frontends.module.plans.at_once", "frontends.module.plans.batch",
        "frontends.module.plans.prepare", "frontends.module.ranks", "frontends.module.streamed",
    },
    {
        "frontends.program.call", "frontends.program.live", "frontends.program.plans", "frontends.program.unreached",
        "frontends.program.waiting",
    },
    {
        "simulate.ending", "simulate.judge",
    },
    {
        "simulate.places", "simulate.shards",
    },
    {
        "storage.disk", "storage.mapped",
    },
]  # fmt: skip
"""Modules that import each other, at least in annotations or inside of functions; below ``tapestream``."""


@cache
def imported() -> dict[str, set[str]]:
    """By module of the package, which others it names in imports, wherever they are."""
    files = {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (SOURCE / "tapestream").rglob("*.py")
    }
    found = {}
    for name, path in files.items():
        named = set(_named(ast.parse(path.read_text()), files))
        found[name] = named - {name}
    return found


def _named(tree: ast.Module, files: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name for one in node.names if one.name in files)
        elif isinstance(node, ast.ImportFrom) and node.module in files:
            whole = {f"{node.module}.{one.name}" for one in node.names}
            yield from whole & files.keys()
            if not whole <= files.keys():
                yield node.module


def cycles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Sets of several modules that all lead to each other."""
    leads = {name: _reached(name, graph) for name in graph}
    found: list[set[str]] = []
    for name in sorted(graph):
        circle = {other for other in leads[name] if name in leads[other]}
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def _reached(name: str, graph: dict[str, set[str]]) -> set[str]:
    reached, ahead = set[str](), [name]
    while ahead:
        new = graph[ahead.pop()] - reached
        reached |= new
        ahead += new
    return reached


def test_no_more_modules_import_each_other() -> None:
    found = [{name.removeprefix("tapestream.") for name in circle} for circle in cycles(imported())]
    assert sorted(map(sorted, found)) == sorted(map(sorted, IN_CYCLES))


def test_command_and_models_take_no_more_from_inside() -> None:
    """The command may use the models."""
    graph = imported()
    for package, inside in INSIDE.items():
        own = (f"tapestream.{package}", *(["tapestream.models"] if package == "cli" else []))
        named = set[str]().union(*(names for name, names in graph.items() if name.startswith(own[0])))
        found = {name.removeprefix("tapestream.") for name in named - PUBLIC if not name.startswith(own)}
        assert found == inside, package


def test_files_that_may_be_complex_are() -> None:
    """Else they are to be taken from the list in pyproject.toml."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]
    most, listed = settings["mccabe"]["max-complexity"], settings["per-file-ignores"]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "C901"]
    command += ["--config", f"lint.mccabe.max-complexity={most}", "--output-format", "json", "--exit-zero", *listed]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    complex_ones = {str(Path(one["filename"]).relative_to(ROOT)) for one in json.loads(done.stdout)}
    assert complex_ones == set(listed)
