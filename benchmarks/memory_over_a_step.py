"""Claim: a step of training within a fifth of the bytes that plain PyTorch takes, with the same bits.

Live bytes of tensors over one step of a GPT with AdamW: parameters, gradients, optimizer state and tape. Plain PyTorch
keeps all of it in memory; ``ts.stream`` keeps blocks on the disk. Both start from the same weights; losses and weights
are compared after four steps, and the fourth is the one whose bytes are kept (``curves``: seconds and MiB).

``python -m benchmarks.memory_over_a_step`` measures, writes the result and draws docs/memory-over-a-step.svg;
``--draw`` draws it from the result that is there.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tapestream as ts
from benchmarks.common import RESULTS, Row, Settings, mebibytes, same_bits, write, yes
from tapestream.cli.loop import held_nbytes
from tapestream.models import GPT, Batches, GPTConfig, standard_library_bytes

TITLE = "Memory over a step, plain PyTorch against tapestream"
PICTURE = Path(__file__).parents[1] / "docs" / "memory-over-a-step.svg"
STEPS = 4
_MOST = 0.2
_SHOWN = 600  # points of a curve
Curve = list[tuple[float, float]]
Trained = tuple[Curve, int, list[torch.Tensor], list[torch.Tensor]]  # curve, peak, losses, weights


def main() -> None:
    """Measure, write and draw."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing is written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of PyTorch")
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the disk is that is streamed from")
    parser.add_argument("--draw", action="store_true", help="only draw, from the result that is there")
    given = parser.parse_args()
    if not given.draw:
        torch.set_num_threads(given.threads)
        chosen = Settings("cpu", given.quick, 1, given.threads, not given.quick, given.folder)
        rows, curves = measured(chosen)
        for row in rows:
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if given.quick:
            return
        write("memory_over_a_step", TITLE, chosen, rows, optimizer="AdamW", curves=curves)
    draw(json.loads((RESULTS / "memory_over_a_step.json").read_text(encoding="utf-8")), PICTURE)


def measured(chosen: Settings) -> tuple[list[Row], dict[str, Curve]]:
    """A row for each side, and the bytes of both over their last step."""
    layers, width, tokens, budget = (2, 64, 32, 2) if chosen.quick else (12, 512, 256, 96)
    config = GPTConfig(layers, width, width // 64, vocabulary=256, context=tokens)
    batches = [pair for pair, _ in zip(Batches(standard_library_bytes(), 2, tokens), range(STEPS), strict=False)]
    torch.manual_seed(0)
    start = {name: value.clone() for name, value in GPT(config).state_dict().items()}

    plain = _plain(config, start, batches)
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        ours = _streamed(config, start, batches, budget << 20, folder)
    share = ours[1] / plain[1]
    common = {"network": f"GPT, {layers} blocks of width {width}, 2 x {tokens} tokens, AdamW"}
    rows: list[Row] = [
        {**common, "side": "plain PyTorch", "peak MiB": mebibytes(plain[1])},
        {
            **common, "side": f"ts.stream, budget {budget} MiB, home on disk", "peak MiB": mebibytes(ours[1]),
            "of plain's peak": round(share, 4), "claim": f"at most {_MOST}",
            "met": yes(share <= _MOST),
            "same losses and weights": yes(same_bits(plain[2], ours[2]) and same_bits(plain[3], ours[3])),
        },
    ]  # fmt: skip
    return rows, {"plain PyTorch": plain[0], "tapestream": ours[0]}


def _plain(config: GPTConfig, start: dict[str, torch.Tensor], batches: Sequence[Any]) -> Trained:
    model = GPT(config)
    model.load_state_dict(start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    return _train(model, optimizer, batches, lambda: _nbytes([*model.parameters(), *_state(optimizer)]))


def _streamed(
    config: GPTConfig, start: dict[str, torch.Tensor], batches: Sequence[Any], budget: int, folder: str
) -> Trained:
    model = GPT(config)
    model.load_state_dict(start)
    ts.stream(model, device="cpu", budget=budget, folder=folder)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=3e-4, update="backward")
    trained = _train(model, optimizer, batches, lambda: held_nbytes(model))
    ts.unstream(model)
    return trained


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[Any], held: Callable[[], int]
) -> Trained:
    losses: list[torch.Tensor] = []

    def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
        loss = model(tokens, targets)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()

    *first, before_last, last = batches
    for pair in first:
        step(*pair)
    gc.collect()
    with ts.track_memory():  # what the last step frees is seen only if the one that made it was measured, too
        step(*before_last)
    before = held()
    with ts.track_memory() as meter:
        step(*last)
    curve = [(seconds, mebibytes(before + nbytes)) for seconds, nbytes in meter.samples]
    return thinned(curve), before + meter.peak_nbytes, losses, [p.detach().clone() for p in model.parameters()]


def _state(optimizer: torch.optim.Optimizer) -> Iterable[torch.Tensor]:
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor))


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def thinned(curve: Curve) -> Curve:
    """At most so many points as can be told apart: of each stretch of time the highest."""
    last, kept = curve[-1][0], dict[int, tuple[float, float]]()
    for seconds, mebi in curve:
        place = int(seconds / last * (_SHOWN - 1)) if last else 0
        if place not in kept or mebi > kept[place][1]:
            kept[place] = round(seconds, 4), round(mebi, 2)
    return [*kept.values(), (round(last, 4), round(curve[-1][1], 2))]


def draw(result: dict[str, Any], path: Path) -> None:
    """Both curves into an SVG, over the share of the step that has passed: under the meter seconds mean nothing. Its
    description is the result's `mark`."""
    import matplotlib
    from matplotlib.figure import Figure

    rows, curves = result["rows"], result["settings"]["curves"]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    axes = figure.subplots()
    for row, (name, curve), colour in zip(rows, curves.items(), ("#9d755d", "#1b9e9e"), strict=True):
        seconds = [at for at, _ in curve]
        share = [100 * at / seconds[-1] for at in seconds]
        axes.step(share, [mebi for _, mebi in curve], where="post", color=colour, linewidth=1.2)
        axes.fill_between(share, [mebi for _, mebi in curve], step="post", color=colour, alpha=0.15)
        axes.annotate(
            f"{name}: {row['peak MiB']:.0f} MiB", (2, row["peak MiB"]), color=colour, va="bottom", fontsize=10
        )
    axes.set(
        xlim=(0, 100), ylim=(0, 1.15 * max(row["peak MiB"] for row in rows)), xlabel="% of one training step",
        ylabel="live tensors, MiB",
    )  # fmt: skip
    axes.set_title(rows[0]["network"] + ": the same losses and weights, bit for bit", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "tapestream", "svg.fonttype": "none"}):
        figure.savefig(path, format="svg", metadata={"Date": None, "Description": mark(result)})


def mark(result: dict[str, Any]) -> str:
    """What tells whether a picture is that of a result."""
    peaks = ", ".join(f"{row['side']} {row['peak MiB']} MiB" for row in result["rows"])
    return f"{result['date']}, {result['machine']}, commit {result['commit']}: {peaks}"


if __name__ == "__main__":
    main()
