"""What torchrun starts in `test_trainer_in_ranks`: Hugging Face's Trainer, with its own ways or on a streamed model:
``trained_together.py FOLDER plain divided ..``, one after the other."""

import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import tapestream as ts

OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.0, "foreach": False}


def main(said: str, *ways: str) -> None:
    torch.set_num_threads(1)
    for how in ways:
        train(how, said)


def train(how: str, said: str) -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=64, n_head=4, vocab_size=300, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model: Any = GPT2LMHeadModel(config)
    drawn = torch.Generator().manual_seed(1)
    tokens = [torch.randint(300, (32,), generator=drawn) for _ in range(32)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, max_steps=5, max_grad_norm=0.5, logging_steps=1,
            report_to=[], use_cpu=True, save_strategy="no", ddp_backend="gloo", disable_tqdm=True, seed=3,
        )  # fmt: skip
        if how != "plain":
            peers = ts.Peers(shard=how == "divided")
            model = ts.stream(model, budget="4MiB", device="cpu", home="disk", folder=folder, peers=peers)
            optimizer: Any = ts.optimizer(model, torch.optim.AdamW, **OPTIONS)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), **OPTIONS)
        data: Any = [{"input_ids": one, "labels": one} for one in tokens]
        trainer = Trainer(model=model, args=arguments, train_dataset=data, optimizers=(optimizer, None))
        trainer.train()
        if how != "plain":
            ts.unstream(model)
    steps = [(one["loss"], one["grad_norm"]) for one in trainer.state.log_history if "loss" in one]
    weights = hashlib.sha1(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    Path(said, f"{how}{os.environ['RANK']}.json").write_text(json.dumps([steps, weights]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
