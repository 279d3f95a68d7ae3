"""Results as lines of JSON, each on the disk before the next is measured."""

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = "results.jsonl"
MOST_STATUS = 100


@dataclass(frozen=True, slots=True)
class Result:
    """What one measurement gave. ``verdict``: whether ``claim`` holds; None where nothing is claimed.

    Numbers have their unit in their name: ``_seconds``, ``_bytes``, ``_bytes_per_second`` ...
    """

    name: str
    claim: str = ""
    verdict: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        word = {True: "true", False: "FALSE", None: "-"}[self.verdict]
        numbers = "  ".join(f"{key}={_short(value)}" for key, value in self.numbers.items())
        return "  ".join(text for text in (f"{word:5s} {self.name}", self.claim and f"[{self.claim}]", numbers) if text)


@dataclass(frozen=True, slots=True)
class Results:
    """The file ``folder``/results.jsonl. Processes append to it in turn, whole lines each."""

    folder: Path
    card: str

    @property
    def path(self) -> Path:
        """Where the lines are."""
        return self.folder / NAME

    def write(self, step: str, result: Result) -> None:
        """One line more, which is on the disk when this returns."""
        line = {
            "step": step, "result": result.name, "verdict": result.verdict, "claim": result.claim, "card": self.card,
            "at": datetime.datetime.now().isoformat(timespec="seconds"), **result.numbers,
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(file, (json.dumps(line) + "\n").encode())
            os.fsync(file)
        finally:
            os.close(file)

    def read(self) -> list[dict[str, Any]]:
        """All lines so far; a last one that was cut off is left out."""
        text = self.path.read_text() if self.path.exists() else ""
        whole, _, _ = text.rpartition("\n")
        return [json.loads(line) for line in whole.splitlines()]

    def status(self, before: int) -> int:
        """Say how many lines came after the first ``before``, and which verdicts among them are false; the exit status:
        how many these are, at most `MOST_STATUS`."""
        found = self.read()[before:]
        wrong = [line for line in found if line["verdict"] is False]
        print(f"{len(found)} results, {len(wrong)} false, in {self.path}")
        for line in wrong:
            print(f"  {line['step']}: {line['result']}: {line.get('error') or line['claim']}")
        return min(MOST_STATUS, len(wrong))


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
