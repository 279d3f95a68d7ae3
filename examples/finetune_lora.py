"""LoRA adapters (peft) on a frozen base that does not fit: the base streams from disk, the adapters learn exactly.

    python examples/finetune_lora.py
    python examples/finetune_lora.py --weights FOLDER    # a base that save_pretrained wrote

Frozen weights are only ever read, those of layers with adapters too; what is written each step is the adapters.
Text is taken as bytes of Python's standard library; nothing is downloaded. Needs tapestream[transformers].
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import tapestream as ts
from tapestream.models import Batches, standard_library_bytes

TO_DISK, FROM_DISK = (ts.Tier.DEVICE, ts.Tier.DISK), (ts.Tier.DISK, ts.Tier.DEVICE)


def main(arguments: list[str] | None = None) -> tuple[list[float], dict[tuple[ts.Tier, ts.Tier], int]]:
    """Train as the command line says; returns the losses, and the bytes moved in the last step."""
    given = parser().parse_args(arguments)
    model = adapted(given)
    base = sum(p.nbytes for p in model.parameters() if not p.requires_grad)
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    ts.stream(model, device="cpu", budget=given.budget, folder=given.out / "home")
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=given.lr)  # takes the parameters that require gradients

    losses: list[float] = []
    moved: dict[tuple[ts.Tier, ts.Tier], int] = {}
    for step, (tokens, _) in zip(range(given.steps), batches(given), strict=False):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        moved = ts.report(model).bytes_moved  # since the last report
        print(f"step {step + 1}/{given.steps}  loss {losses[-1]:.3f}", flush=True)

    print(f"\n{'frozen base':<30}{base / 2**20:10.2f} MiB")
    print(f"{'adapters':<30}{adapters / 2**20:10.2f} MiB")
    print(f"{'budget':<30}{given.budget:>13}")
    print(f"{'peak, planned':<30}{ts.report(model).plan.peak_nbytes / 2**20:10.2f} MiB")
    print(f"{'read from disk a step':<30}{moved.get(FROM_DISK, 0) / 2**20:10.2f} MiB")
    print(f"{'written to disk a step':<30}{moved.get(TO_DISK, 0) / 2**20:10.2f} MiB")
    model.save_pretrained(str(given.out / "adapter"))  # the adapters alone
    ts.unstream(model)
    return losses, moved


def adapted(given: argparse.Namespace) -> PeftModel:
    """The base with fresh adapters on its last layers."""
    torch.manual_seed(0)
    base: Any
    if given.weights is not None:
        base = AutoModelForCausalLM.from_pretrained(given.weights)
    else:
        config = LlamaConfig(
            vocab_size=256,
            hidden_size=given.width,
            intermediate_size=2 * given.width,
            num_hidden_layers=given.layers,
            num_attention_heads=max(1, given.width // 64),
            max_position_embeddings=given.seq,
        )
        base = LlamaForCausalLM(config)
    count = base.config.num_hidden_layers
    chosen = list(range(count - min(given.adapted, count), count))
    lora = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], layers_to_transform=chosen, task_type="CAUSAL_LM")
    return get_peft_model(base, lora).train()


def batches(given: argparse.Namespace) -> Batches:
    """The text; its targets are not needed, models shift labels by themselves."""
    return Batches(standard_library_bytes(), 2, given.seq)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--weights", type=Path, help="a folder with config.json and safetensors files (a Llama)")
    made.add_argument("--out", type=Path, default=Path("runs/lora"), help="blocks live and adapters are saved here")
    made.add_argument("--budget", default="14MiB", help="bytes of RAM (%(default)s)")
    made.add_argument("--adapted", type=int, default=2, help="layers with adapters, from the last on (%(default)s)")
    for name, value in {"layers": 6, "width": 256, "seq": 128, "steps": 20}.items():
        made.add_argument(f"--{name}", type=int, default=value, help="%(default)s")
    made.add_argument("--lr", type=float, default=1e-3, help="%(default)s")
    return made


if __name__ == "__main__":
    main()
