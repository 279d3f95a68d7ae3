"""Train a Hugging Face model in a loop of your own, in less memory than its parameters and AdamW's state take.

    python examples/finetune_own_loop.py                        # a small Llama with random weights
    python examples/finetune_own_loop.py --weights FOLDER       # goes on with what save_pretrained wrote

Text is taken as bytes: Python's standard library, or --data. Nothing is downloaded. Needs tapestream[transformers].
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

import tapestream as ts
from tapestream.models import Batches, load_bytes, standard_library_bytes


def main(arguments: list[str] | None = None) -> list[float]:
    """Train as the command line says; returns the losses."""
    given = parser().parse_args(arguments)
    torch.manual_seed(0)
    with torch.device("meta"):  # nothing is allocated here
        model: Any = AutoModelForCausalLM.from_config(config_of(given))  # type: ignore[no-untyped-call]
    if given.weights is None:  # weights are to be drawn anew, of which stream() warns
        warnings.filterwarnings("ignore", "this .* lay on the meta device")
    numbers = sum(p.numel() for p in model.parameters())
    model = ts.stream(
        model, device=given.device, budget=given.budget, folder=given.out / "home", weights=given.weights, progress=show
    )
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=given.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)

    text = standard_library_bytes() if given.data is None else load_bytes(given.data)
    losses: list[float] = []
    begin = time.perf_counter()
    for step, (tokens, _) in zip(range(given.steps), Batches(text, given.batch, given.seq), strict=False):
        tokens = tokens.to(given.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}/{given.steps}  loss {losses[-1]:.3f}", flush=True)

    seconds = (time.perf_counter() - begin) / given.steps
    report = ts.report(model)
    moved = sum(report.bytes_moved.values()) / given.steps
    print(f"\n{'parameters':<36}{numbers / 1e6:10.1f} million")
    print(f"{'they, gradients and AdamW state take':<36}{16 * numbers / 2**20:10.1f} MiB, activations not counted")
    print(f"{'budget':<36}{given.budget:>13}")
    print(f"{'peak, planned':<36}{report.plan.peak_nbytes / 2**20:10.1f} MiB")
    print(f"{'moved a step':<36}{moved / 2**20:10.1f} MiB")
    print(f"{'a step':<36}{seconds:10.3f} s, {report.wait_seconds / given.steps:.3f} s of it waiting for the disk")
    print(f"{'loss':<36}{losses[0]:10.3f} -> {losses[-1]:.3f}")
    model.save_pretrained(given.out / "model")
    print(f"{'saved':<36}{given.out / 'model'}")
    ts.unstream(model)  # removes the files in home; needs room for the whole model, so leave it out if there is none
    return losses


def config_of(given: argparse.Namespace) -> Any:
    """That of the weights, or of a small Llama."""
    if given.weights is not None:
        return AutoConfig.from_pretrained(given.weights)
    return LlamaConfig(
        vocab_size=256,
        hidden_size=given.width,
        intermediate_size=2 * given.width,
        num_hidden_layers=given.layers,
        num_attention_heads=max(1, given.width // 64),
        max_position_embeddings=given.seq,
    )


def show(what: str, done: int, of: int) -> None:
    """What `stream` says before the first step."""
    if done == of:
        print(f"{what}: {of} blocks", flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--weights", type=Path, help="a folder with config.json and safetensors files")
    made.add_argument("--data", type=Path, help="a text file, or a folder of them")
    made.add_argument("--out", type=Path, default=Path("runs/own_loop"), help="blocks live and the model is saved here")
    made.add_argument("--budget", default="32MiB", help="bytes of the device, such as 8GiB (%(default)s)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    for name, value in {"layers": 6, "width": 256, "batch": 2, "seq": 128, "steps": 20}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    made.add_argument("--lr", type=float, default=1e-3, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
