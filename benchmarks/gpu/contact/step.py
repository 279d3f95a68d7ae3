"""One step, in the process that `benchmarks.gpu.first_contact` starts for it."""

import argparse
import time
from importlib import import_module
from pathlib import Path

from benchmarks.gpu.contact import simulated
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.results import Results


def main() -> None:
    """Import the step's function, run it, and write each of its results as it comes."""
    began = time.monotonic()
    parser = argparse.ArgumentParser()
    parser.add_argument("--step", required=True, help="its name in the results")
    parser.add_argument("--function", required=True, help="module:function, in benchmarks.gpu.contact")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--card", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--part", type=lambda text: tuple(map(int, text.split("/"))))
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    if given.dry:
        simulated.load()
    module, _, function = given.function.partition(":")
    command = command_of(given.step, given.function, given.out, given.card, given.seconds, given.dry)
    chosen = Chosen(given.dry, began + given.seconds, given.out, command, given.part)
    results = Results(given.out, given.card)
    for result in getattr(import_module(f"benchmarks.gpu.contact.{module}"), function)(chosen):
        results.write(given.step, result)
        say(result)


def command_of(step: str, function: str, out: Path, card: str, seconds: float, dry: bool) -> tuple[str, ...]:
    """Its arguments, for `python`."""
    found = ("-m", "benchmarks.gpu.contact.step", "--step", step, "--function", function, "--out", str(out))
    return (*found, "--card", card, "--seconds", str(seconds), *(("--dry",) if dry else ()))


if __name__ == "__main__":
    main()
