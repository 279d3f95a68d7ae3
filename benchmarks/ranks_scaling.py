"""What `tapestream plan` says of one model on 1 to 64 GPUs that divide its blocks among them.

Simulations, not measurements; every row is one command, which the row holds. Each GPU has four samples of 2,048 tokens,
so more GPUs take larger steps. ``alone``: one GPU with as much RAM as the model needs.

``python -m benchmarks.ranks_scaling`` asks, writes the result and draws docs/ranks.svg; ``--draw`` draws it from the
result that is there.
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import Row
from benchmarks.simulated import asked_and_drawn
from benchmarks.three_tiers import mark
from benchmarks.what_to_expect import said_to

TITLE = "One model on many GPUs, simulated"
PICTURE = Path(__file__).parents[1] / "docs" / "ranks.svg"
STEP = "--dtype bf16 --update backward --batch 4 --seq 2048 --disk 8TB"
MODELS = {
    "gpt3-13b": "--budget 20GiB --gpu 24GiB --flops 80e12 --link 25GB/s --memory-rate 900GB/s",
    "gpt3-175b": "--budget 70GiB --gpu 80GiB --flops 400e12 --link 50GB/s --memory-rate 3TB/s",
}
BETWEEN = {"gpt3-13b": {"PCIe": "8GB/s", "NVLink": "250GB/s"}, "gpt3-175b": {"NVLink": "350GB/s"}}
RAM = "4TiB"
IN_ONE = (1, 2, 4, 8)
MANY, MACHINES = 64, 8
NETWORKS = {"100 Gb/s": "12.5GB/s", "400 Gb/s": "50GB/s"}


def main() -> None:
    """Ask, write and draw."""
    asked_and_drawn("ranks_scaling", TITLE, asked, draw, PICTURE)


def asked(quick: bool) -> Iterator[Row]:
    """A row for each model and set of GPUs."""
    for model in list(MODELS)[:1] if quick else MODELS:
        alone: float | None = None
        for between, ranks, network, replicate in _sets(model, quick):
            row = _row(model, between, ranks, network, replicate)
            alone = alone or row["tokens per second"]
            yield row | {"times one GPU": None if alone is None else round(row["tokens per second"] / alone, 2)}


def _sets(model: str, quick: bool) -> Iterator[tuple[str, int, str, bool]]:
    """What joins the GPUs of a machine, their number, what joins machines, and whether these replicate."""
    for number, between in enumerate(BETWEEN[model]):
        for ranks in IN_ONE[:2] if quick else IN_ONE:
            if ranks > 1 or number == 0:
                yield between if ranks > 1 else "", ranks, "", False
    for network in () if quick else NETWORKS:
        for replicate in (False, True):
            yield list(BETWEEN[model])[-1], MANY, network, replicate


def _row(model: str, between: str, ranks: int, network: str, replicate: bool) -> Row:
    words = f"plan {model} {STEP} --ram {RAM} {MODELS[model]}".split()
    if ranks > 1:
        words += ["--ranks", str(ranks), "--peers", BETWEEN[model][between]]
    if network:
        words += ["--machines", str(MACHINES), "--network", NETWORKS[network], *(["--replicate"] if replicate else [])]
    said = said_to(words)
    answer: dict[str, Any] = said["answer"]
    in_one = answer["ranks_in_a_machine"]
    return {
        "model": model, "GPUs": ranks, "between them": between, "between machines": network,
        "divided among": answer["shards"], "s per step": round(answer["seconds_per_step"], 2),
        "of it waiting": round(answer["waiting_seconds"], 2),
        "tokens per second": round(answer["tokens_per_second"], 1),
        "binds": max(answer["bounds"].items(), key=lambda one: one[1])[0],
        "RAM of a machine GiB": round(answer["tiers"]["host"]["peak_nbytes"] * in_one / 2**30, 1),
        "command": shlex.join(["tapestream", *words]),
    }  # fmt: skip


def draw(result: dict[str, Any], path: Path) -> None:
    """Tokens a second against the number of GPUs into an SVG; its description is the result's `mark`."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    for axes, model in zip(figure.subplots(1, len(MODELS)), MODELS, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model]
        one = rows[0]["tokens per second"]
        axes.plot([1, MANY], [one, MANY * one], color="#bab0ac", linestyle="--", linewidth=1, label="as many times one")
        for between, colour in zip(BETWEEN[model], ("#9d755d", "#1b9e9e"), strict=False):
            inside = [row for row in rows if not row["between machines"] and row["between them"] in ("", between)]
            pairs = [(row["GPUs"], row["tokens per second"]) for row in inside]
            axes.plot(
                *zip(*pairs, strict=True), color=colour, linewidth=1.4, marker=".", label=f"one machine, {between}"
            )
        for row, marker in zip((row for row in rows if row["between machines"]), "vo^s", strict=True):
            way = "each machine all" if row["divided among"] < MANY else "all share one"
            axes.plot(
                row["GPUs"], row["tokens per second"], marker, label=f"8 machines, {row['between machines']}, {way}"
            )
        axes.set(xlabel="GPUs", ylabel="tokens a second", xscale="log", yscale="log", title=model)
        axes.set_xticks([*IN_ONE, MANY], [str(n) for n in (*IN_ONE, MANY)])
        axes.minorticks_off()
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=6)
    with matplotlib.rc_context({"svg.hashsalt": "tapestream", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(result)})


if __name__ == "__main__":
    main()
