"""Claim: with updates in RAM, a streamed step takes hardly longer than what binds it.

What `tapestream plan` says of fine-tuning GPTs of 1.5 to 70 billion parameters on cards of 12 to 80 GiB, with updates
on the device and in RAM. Simulations, not measurements; every row is one command. ``bound``: the most of computation
with the recomputes that the budget forces, bytes up and down by the link, and updates in RAM, of which those of
``--update step`` can only go on under the next forward.

``python -m benchmarks.streaming_on_paper`` asks, writes the result and draws docs/streaming-on-paper.svg; ``--draw``
draws it from the result that is there.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row, yes
from benchmarks.simulated import asked_and_drawn
from benchmarks.three_tiers import mark
from benchmarks.what_to_expect import said_to

TITLE = "Seconds of a streamed step with updates in RAM, simulated"
PICTURE = Path(__file__).parents[1] / "docs" / "streaming-on-paper.svg"
SOURCE = Path(__file__).parents[1] / "src"
MODELS = {"1.5B": "gpt2-1.5b", "7B": "gpt3-6.7b", "13B": "gpt3-13b", "70B": "gpt --layers 80 --width 8192"}
# Model, card GiB, link GB/s, TFLOP/s, RAM GiB, tokens
MACHINES: tuple[tuple[str, int, int, int, int, int], ...] = (
    *(("1.5B", 12, 12, 40, 32, tokens) for tokens in (512, 2048, 8192)),
    *(("1.5B", 16, 25, 80, 64, tokens) for tokens in (2048, 8192)),
    *(("7B", 16, 25, 80, 128, tokens) for tokens in (2048, 8192)),
    *(("7B", 24, 25, 140, 128, tokens) for tokens in (2048, 4096, 8192, 16384)),
    *(("7B", 24, 50, 600, 128, tokens) for tokens in (4096, 16384)),
    *(("13B", 24, 25, 140, 256, tokens) for tokens in (4096, 16384)),
    *(("13B", 80, 50, 600, 256, tokens) for tokens in (4096, 16384)),
    ("70B", 80, 50, 600, 512, 16384),
    ("70B LoRA", 24, 25, 140, 256, 4096),
    ("70B LoRA", 80, 50, 600, 256, 16384),
)
RATES = (8e9, 2.5e9)


def main() -> None:
    """Ask, write and draw."""
    asked_and_drawn("streaming_on_paper", TITLE, asked, draw, PICTURE)


def asked(quick: bool) -> Iterator[Row]:
    """A row for each machine, moment of updates, and rate of updates in RAM."""
    for machine in MACHINES[1:2] if quick else MACHINES:
        for update in ("backward", "step"):
            for rate in RATES:
                yield _row(*machine, update=update, rate=rate)


def _row(name: str, card: int, link: int, tflops: int, ram: int, tokens: int, *, update: str, rate: float) -> Row:
    model, _, lora = name.partition(" ")
    words = ["plan", *MODELS[model].split(), "--dtype", "bf16", "--batch", str(max(1, tokens // 2048))]
    words += ["--seq", str(min(tokens, 2048)), *f"--budget {card}GiB --gpu {card}GiB --ram {ram}GiB".split()]
    words += [*f"--disk 4TB --disk-read 6GB/s --disk-write 6GB/s --link {link}GB/s --flops {tflops}e12".split()]
    words += ["--update", update, "--host-update", f"{rate:g}", *(["--lora", "16"] if lora else [])]
    said = said_to([*words, "--where", "host"], SOURCE)
    fits = said["fits"]
    before = (
        said["answer"]["seconds_where"]["device"] if fits else _seconds(said_to([*words, "--where", "device"], SOURCE))
    )
    row: Row = {"model": name, "card GiB": card, "link GB/s": link, "TFLOP/s": tflops, "RAM GiB": ram, "tokens": tokens}
    row |= {"update": update, "parameters/s in RAM": rate, "on the device, s": before and round(before, 3)}
    row |= {"in RAM, s": _seconds(said)}
    row |= _bounded(said["answer"], tokens, rate) if fits else {"why": said["reason"]}
    return {**row, "command": shlex.join(["tapestream", *words, "--where", "host"])}


def _seconds(said: dict[str, Any]) -> float | None:
    return round(said["answer"]["seconds_per_step"], 3) if said["fits"] else None


def _bounded(answer: dict[str, Any], tokens: int, rate: float) -> Row:
    seconds, bounds = answer["seconds_per_step"], answer["bounds"]
    what = max(bounds, key=bounds.get)
    over = seconds / bounds[what]
    hidden = bounds.get("updates in RAM", 0.0) <= 0.7 * bounds["computation"]
    most = 1.20 if rate < 8e9 else 1.05 if tokens >= 8192 else 1.10 if tokens >= 2048 and hidden else 1.20
    return {
        "tokens a second": round(answer["tokens_per_second"]), "waiting, s": round(answer["waiting_seconds"], 3),
        "moved GiB": round(answer["moved_nbytes"] / 2**30, 1), "bound, s": round(bounds[what], 3), "binds": what,
        "over bound": round(over, 3), "claim": f"at most {most} times the bound", "met": yes(over <= most),
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds over the bound, on the device and in RAM, into an SVG; its description is the result's `mark`."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, update in zip(figure.subplots(1, 2, sharey=True), ("step", "backward"), strict=True):
        rows = [row for row in result["rows"] if row["update"] == update and row.get("bound, s")]
        rows = [row for row in rows if row["parameters/s in RAM"] == RATES[0]]
        for column, label, colour in (
            ("on the device, s", "on the device", "#9d755d"),
            ("in RAM, s", "in RAM", "#1b9e9e"),
        ):
            pairs = [(k, row[column] / row["bound, s"]) for k, row in enumerate(rows) if row[column] is not None]
            axes.plot(*zip(*pairs, strict=True), "o", color=colour, markersize=4, label=label)
        axes.axhline(1, color="black", linewidth=0.8)
        names = [f"{row['model']}, {row['card GiB']} GiB, {row['tokens']:,}" for row in rows]
        axes.set_xticks(range(len(rows)), names, rotation=90, fontsize=6)
        axes.set(ylabel="seconds over the bound" if update == "step" else "", ylim=(0.9, None))
        axes.set_title(f"updates, --update {update}", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    with matplotlib.rc_context({"svg.hashsalt": "tapestream", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(result)})


if __name__ == "__main__":
    main()
