"""docs/compatibility.md, from benchmarks/results/compatibility/*.json."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

_ORDER = (
    "transformers", "timm", "peft", "torch.optim", "pytorch_optimizer", "timm.optim", "bitsandbytes.optim",
    "torchao.optim", "trainers", "science", "libraries",
)  # fmt: skip
_HEAD = """# Compatibility

What was trained with `ts.stream` and `ts.optimizer`, and how it went. Every row was run for this page: three steps by
plain PyTorch and by tapestream with all the room there is, then on disk in the least budget that the errors name.
*Exact* means that every loss, weight and buffer has the bits of plain PyTorch. *Refused* means an error that says what
to write instead, before anything was wrong. `python -m benchmarks.compatibility` runs all of it anew, and
`python -m benchmarks.readme` writes this page.

Models are tiny (a hidden size of 32, three or four layers) and have random weights: what is tried is the code. A ratio
of times is that of steps of a few milliseconds, in which Python is most of the work. [Results](results.md) has those of
usual sizes. `ts.Program` and `ts.Loop` take some of what is refused here: see [limits](limits.md).
Matrices that optimizers of `bitsandbytes` and `torchao` get have 4,096 elements, from which on these keep fewer bits.

Trainers take eight steps, and train on batches that differ; `Trainer` is that of `transformers`. All that they log is
compared, too: losses, norms of gradients, learning rates, what evaluation finds. *Resuming*: steps that go on from a
checkpoint are compared, too.

Spiking neurons, differential equations and libraries for science are called through `ts.Loop` or `ts.Program` instead,
with all the room there is, then in twice the least budget that the errors name. Gradients and random generators are
compared, too.
"""
_WHAT = {
    "transformers": "Families of `transformers`",
    "timm": "Models of `timm`",
    "peft": "Methods of `peft`",
    "torch.optim": "Optimizers of `torch.optim`",
    "pytorch_optimizer": "Optimizers of `pytorch_optimizer`",
    "timm.optim": "Optimizers of `timm`",
    "bitsandbytes.optim": "Optimizers of `bitsandbytes`",
    "torchao.optim": "Optimizers of `torchao`",
    "trainers": "Trainers",
    "science": "Spiking neurons and differential equations",
    "libraries": "Libraries for science",
}
_GOOD = ("exact", "refused", "not run")


def page(folder: Path) -> str:
    """The text."""
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}
    kinds = [kind for kind in _ORDER if kind in found] + [kind for kind in found if kind not in _ORDER]
    parts = [_HEAD.rstrip(), _summary([found[kind] for kind in kinds]), *(_section(found[kind]) for kind in kinds)]
    return "\n\n".join(parts) + "\n"


def _summary(results: Sequence[dict[str, Any]]) -> str:
    lines = ["| | run | exact | refused | otherwise | time, of plain's |", "| --- | --- | --- | --- | --- | --- |"]
    for result in results:
        rows = [row for row in result["rows"] if row["outcome"] != "not run"]
        exact, refused = (sum(row["outcome"] == one for row in rows) for one in ("exact", "refused"))
        ratios = [row["ratio"] for row in rows if "ratio" in row]
        time = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else ""
        what = _WHAT.get(result["name"], result["name"])
        lines.append(f"| {what} | {len(rows)} | {exact} | {refused} | {len(rows) - exact - refused} | {time} |")
    return "\n".join(lines)


def _section(result: dict[str, Any]) -> str:
    rows, versions = result["rows"], ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    parts = [f"## {_WHAT.get(result['name'], result['name'])}", f"{result['date']}, {result['machine']}, {versions}."]
    parts += [result["note"]] if "note" in result else []
    named = {one: [row["name"] for row in rows if row["outcome"] == one] for one in _GOOD}
    if any("way" in row for row in rows):
        parts.append(_ways(rows))
    elif named["exact"]:
        parts.append(f"**Exact** ({len(named['exact'])}): {', '.join(named['exact'])}.")
    others = [row for row in rows if row["outcome"] not in ("exact", "not run")]
    if others:
        head = ["| | | what it says |", "| --- | --- | --- |"]
        lines = [f"| {_named(row)} | {row['outcome']} | {_cell(row['why'])} |" for row in others]
        parts.append("\n".join([*head, *lines]))
    if named["not run"]:
        parts.append(
            f"**Not run** ({len(named['not run'])}), as plain PyTorch could not be run with what is used here, "
            f"or did not repeat its own bits, or all tries took longer than is given: {', '.join(named['not run'])}."
        )
    return "\n\n".join(parts)


def _ways(rows: Sequence[dict[str, Any]]) -> str:
    """Those that are exact, with the way and the time of each."""
    lines = ["| exact | through | time, of plain's | tight budget |", "| --- | --- | --- | --- |"]
    for row in rows:
        if row["outcome"] == "exact":
            tight = "exact" if row.get("tight", "yes") == "yes" else "not tried"
            lines.append(f"| {row['name']} | `{row.get('way', 'ts.stream')}` | {row['ratio']:.2f} | {tight} |")
    return "\n".join(lines)


def _named(row: dict[str, Any]) -> str:
    return f"{row['name']} (`{row['way']}`)" if "way" in row else str(row["name"])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
