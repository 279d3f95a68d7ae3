"""What does it cost? Rows of `benchmarks.everything_fits` and `benchmarks.kept_attention`, on this card."""

import tempfile
from collections.abc import Iterator
from typing import Any

from benchmarks import everything_fits, kept_attention
from benchmarks.common import Row, Settings
from benchmarks.gpu.contact.chosen import Chosen
from benchmarks.gpu.contact.results import Result
from benchmarks.networks import gpt, resnet, tiny_mlp


def rows(chosen: Chosen) -> Iterator[Result]:
    """Networks that keep the card busy first; those of which the host is the slower part last."""
    device = chosen.device
    settings = Settings(device, chosen.dry, chosen.size(7, 2), 1, False, tempfile.gettempdir())
    large, long = gpt(12, 1024, 8, 1024, device), [gpt(6, 1024, 2, 4096, device), gpt(6, 1024, 1, 8192, device)]
    small = [(resnet(18, 512, device), 1), (tiny_mlp(100, 32, device), 5)]
    if chosen.dry:
        large, long, small = gpt(2, 64, 2, 32, device), [gpt(4, 64, 2, 64, device)], [(tiny_mlp(10, 8, device), 2)]
    for row in everything_fits.measure(large, 1, settings):
        yield _result("everything_fits", row, chosen)
    for case in long:
        row = kept_attention.measure(case, settings)
        taken = {"allocated_peak_bytes": row["MiB"] * 2**20, "budget_bytes": row["budget MiB"] * 2**20}
        within = taken["allocated_peak_bytes"] <= taken["budget_bytes"]
        yield Result(f"kept_attention: {case.name}, memory", "at most the budget", within, taken)
        yield _result("kept_attention", row, chosen)
    for case, repeat in small:
        for row in everything_fits.measure(case, repeat, settings):
            yield _result("everything_fits", row, chosen)


def _result(benchmark: str, row: Row, chosen: Chosen) -> Result:
    """A row in this file's words: verdicts are true, false or null, and units those of SI. Bits count in a dry run."""
    same = row["same bits"] == "yes"
    met = chosen.of_speed(row["met"] == "yes" and same)
    name = ", ".join(str(row[key]) for key in ("with", "network") if key in row)
    claim = f"the same bits, and seconds over the other's {row['claim']}"
    return Result(f"{benchmark}: {name}", claim, met if same else False, dict(map(_in_units, row.items())))


def _in_units(item: tuple[str, Any]) -> tuple[str, Any]:
    key, value = item
    for unit, name, factor in (("ms", "seconds", 1e-3), ("MiB", "bytes", 2**20)):
        words = key.split(" ")
        if unit in words:
            return "_".join([*(word for word in words if word != unit), name]), value * factor
    return key.replace(" ", "_").replace(",", ""), value
