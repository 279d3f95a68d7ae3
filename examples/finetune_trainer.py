"""The Trainer of Hugging Face on a streamed model: three lines differ from the stock script, and no logged loss does.

    python examples/finetune_trainer.py                                        # streamed
    python examples/finetune_trainer.py --stock --out runs/stock               # the same without tapestream
    python examples/finetune_trainer.py --resume runs/trainer/checkpoint-10    # goes on from there

Gradients are accumulated and clipped, evaluation runs and checkpoints are written on the way. Nothing is downloaded:
text is taken as bytes of Python's standard library. Needs tapestream[transformers].
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tapestream as ts
from tapestream.models import standard_library_bytes


class Text(Dataset[dict[str, torch.Tensor]]):
    """Successive pieces of ``length`` bytes; every byte is its own label (models shift by themselves)."""

    def __init__(self, data: torch.Tensor, length: int) -> None:
        self.pieces = data[: len(data) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.pieces)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        tokens = self.pieces[number].long()
        return {"input_ids": tokens, "labels": tokens}


def main(arguments: list[str] | None = None, kind: type[Trainer] = Trainer) -> list[dict[str, Any]]:
    """Train as the command line says, with this ``kind`` of Trainer; returns all that it has logged."""
    given = parser().parse_args(arguments)
    data = standard_library_bytes()
    training, test = Text(data[:2_000_000], given.seq), Text(data[-16 * given.seq :], given.seq)
    settings = TrainingArguments(
        str(given.out),
        max_steps=given.steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=given.accumulate,
        max_grad_norm=0.5,
        learning_rate=1e-3,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="steps",
        eval_steps=given.steps // 2,
        save_steps=given.steps // 2,
        use_cpu=given.device == "cpu",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(0)
    model, optimizer = LlamaForCausalLM(config_of(given)), None
    if not given.stock:
        # The Trainer's own default optimizer, weight_decay=0 included; it makes the learning-rate schedule itself.
        ts.stream(model, device=given.device, budget=given.budget, folder=given.out / "home")  # 1
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True)  # 2
    trainer = kind(
        model,
        settings,
        train_dataset=training,
        eval_dataset=test,
        optimizers=(optimizer, None),  # 3
    )
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(str(given.out / "model"))
    if not given.stock:
        print(ts.report(model))
        ts.unstream(model)
    logged: list[dict[str, Any]] = trainer.state.log_history
    return logged


def config_of(given: argparse.Namespace) -> LlamaConfig:
    """A small Llama over bytes; dropout shows that random numbers are drawn as in the stock run, and after resuming."""
    return LlamaConfig(
        vocab_size=256,
        hidden_size=given.width,
        intermediate_size=2 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.width // 64),
        max_position_embeddings=given.seq,
        attention_dropout=0.1,
    )


def parser(description: str | None = __doc__) -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--stock", action="store_true", help="plain PyTorch: the three lines left out")
    made.add_argument("--resume", help="a folder checkpoint-N of an earlier run with the same numbers")
    made.add_argument("--out", type=Path, default=Path("runs/trainer"), help="checkpoints are written here")
    made.add_argument("--budget", default="32MiB", help="bytes of the device, such as 8GiB (%(default)s)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    for name, value in {"layers": 6, "width": 256, "seq": 128, "steps": 20, "accumulate": 2}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
