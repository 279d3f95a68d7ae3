"""Claim: beside the Trainer of Hugging Face with ``gradient_checkpointing=True``, ours takes no more memory and no more
time, and logs the same losses.

Both sides are the stock Trainer on one Llama with the same AdamW and batches; ours has its model streamed, as in
``examples/finetune_trainer.py``, and checkpointing off. The budget of ours is the measured peak of theirs: parameters,
gradients, AdamW state, tape and logits. Ours may use a disk beside, or RAM alone as theirs; there also with its loss
made by chunks of rows, which adds up in another order (losses are then compared with those of theirs to six digits).
Peaks are those of one Trainer step, from its beginning to its end, by the allocator's own count. The Trainer
clips gradients, or measures their norm, so that ``update="backward"`` cannot be used. Needs tapestream[transformers].
"""

import contextlib
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import version
from math import isclose
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import tapestream as ts
from benchmarks.common import Row, Settings, alternate, mebibytes, milliseconds, same_bits, save, settings, yes
from tapestream.cli.loop import held_nbytes

TITLE = "Beside the Trainer of Hugging Face with gradient checkpointing, at no more memory than it takes"
STEPS = 8  # in one call of train(): after the other side's turn the first reads from a disk what is in its cache later
_METERED = (1, 2)  # what a step frees is seen only if the step that made it was metered too


@dataclass(frozen=True, slots=True)
class Sizes:
    """One Llama and its batch."""

    layers: int
    width: int
    batch: int
    sequence: int
    vocabulary: int = 2048

    @property
    def name(self) -> str:
        """For the table."""
        return f"Llama, {self.layers} layers of width {self.width}, {self.batch} x {self.sequence} tokens"

    def model(self) -> nn.Module:
        """A new one; every one has the same bits."""
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=self.vocabulary, hidden_size=self.width, intermediate_size=4 * self.width,
            num_hidden_layers=self.layers, num_attention_heads=max(1, self.width // 64),
            max_position_embeddings=self.sequence,
        )  # fmt: skip
        return LlamaForCausalLM(config)


class RandomTokens(Dataset[dict[str, torch.Tensor]]):
    """The same tokens each time they are asked for."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pieces = torch.randint(sizes.vocabulary, (count, sizes.sequence), generator=generator)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.pieces[number], "labels": self.pieces[number]}


class Peak(TrainerCallback):
    """Bytes at the peak of the last metered step: what is held when it begins, and what it adds."""

    def __init__(self, side: "Side") -> None:
        self.side, self.nbytes, self.open = side, 0, contextlib.ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the meter."""
        if state.global_step in _METERED:
            self.held = self.side.held_nbytes()
            self.meter = self.open.enter_context(ts.track_memory("cpu"))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read it; the Trainer has counted the step by now."""
        if state.global_step - 1 in _METERED:
            self.open.close()
            self.nbytes = self.held + self.meter.peak_nbytes


@dataclass(slots=True)
class Side:
    """A model with its optimizer, trained by the Trainer ``STEPS`` steps at a time."""

    sizes: Sizes
    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: str
    stock: bool = False
    losses: list[float] = field(default_factory=list)

    def train(self, *callbacks: TrainerCallback) -> None:
        """One call of ``Trainer.train``."""
        arguments = TrainingArguments(
            self.folder, max_steps=STEPS, per_device_train_batch_size=self.sizes.batch,
            lr_scheduler_type="constant", logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
            use_cpu=True, dataloader_pin_memory=False, **({"gradient_checkpointing": True} if self.stock else {}),
        )  # fmt: skip
        data = RandomTokens(self.sizes, STEPS * self.sizes.batch)
        trainer = Trainer(
            self.model, arguments, train_dataset=data, optimizers=(self.optimizer, None), callbacks=list(callbacks)
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        self.losses += [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    def peak_nbytes(self) -> int:
        """Measured over a call of `train`."""
        peak = Peak(self)
        self.train(peak)
        return peak.nbytes

    def held_nbytes(self) -> int:
        """Bytes held between steps: parameters, optimizer state, buffers."""
        if not self.stock:
            return held_nbytes(self.model)
        state = [t for entry in self.optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
        return sum(t.nbytes for t in (*self.model.parameters(), *self.model.buffers(), *state))


def main() -> None:
    """Measure all sizes, with a disk and without."""
    chosen = settings("cpu", rounds=5)
    ways = ("disk", None), ("device", None), ("device", "auto")
    rows = (measure(sizes, *way, chosen) for sizes in _sizes(chosen.quick) for way in ways)
    save("beside_trainer", TITLE, chosen, rows, transformers=version("transformers"), optimizer="AdamW (fused)",
         steps_a_round=STEPS)  # fmt: skip


def _sizes(quick: bool) -> list[Sizes]:
    if quick:
        return [Sizes(4, 64, 2, 32, vocabulary=256)]
    return [Sizes(8, 512, 4, 128), Sizes(8, 256, 8, 512)]


def measure(sizes: Sizes, home: str, chunks: str | None, chosen: Settings) -> Row:
    """One row: both sides get the same number of steps, so that losses and parameters can be compared at the end."""
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        stock, model = sizes.model(), sizes.model()
        theirs = Side(sizes, stock, torch.optim.AdamW(stock.parameters(), lr=1e-3, fused=True), folder, stock=True)
        theirs.train()
        budget = theirs.peak_nbytes()
        row: Row = {
            "network": sizes.name, "blocks live in": "RAM" if home == "device" else "RAM and disk",
            "loss": "by chunks" if chunks else "as theirs", "its MiB": mebibytes(budget),
        }  # fmt: skip
        below = {"home": home, "folder": folder if home == "disk" else None}
        ts.stream(model, device="cpu", budget=budget, loss_chunks=chunks, **below)
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, fused=True)
        ours = Side(sizes, model, optimizer, folder)
        try:
            ours.train()
        except ts.BudgetError as error:
            return {**row, "MiB": f"needs {mebibytes(error.least_nbytes or 0)}", "claim": "at most 1.00", "met": "no"}
        peak = ours.peak_nbytes()
        ts.report(model)  # counts from here
        timings = alternate({"Trainer": theirs.train, "ours": ours.train}, chosen.rounds, "cpu")
        report = ts.report(model)
        ts.unstream(model)
    found = timings.ratio("ours", "Trainer")
    steps = STEPS * (chosen.rounds + 1)
    return {
        **row, "MiB": mebibytes(peak), "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards",
        "its ms a step": milliseconds(timings.seconds("Trainer") / STEPS),
        "ms a step": milliseconds(timings.seconds("ours") / STEPS), **found,
        "claim": "at most 1.00", "met": yes(found["ratio"] <= 1.0 and peak <= budget),
        "moved MiB a step": mebibytes(sum(report.bytes_moved.values()) // steps),
        "same losses": yes(_same(ours.losses, theirs.losses, exactly=chunks is None)),
        "same bits": "" if chunks else yes(same_bits(list(stock.parameters()), list(model.parameters()))),
    }  # fmt: skip


def _same(ours: list[float], theirs: list[float], *, exactly: bool) -> bool:
    return ours == theirs if exactly else all(isclose(*pair, rel_tol=1e-6) for pair in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
