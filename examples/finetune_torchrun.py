"""Train a Hugging Face model in several processes, each within the same budget, on batches of its own.

    torchrun --nproc_per_node 2 examples/finetune_torchrun.py                     # a small Llama with random weights
    torchrun --nproc_per_node 2 examples/finetune_torchrun.py --weights FOLDER    # what save_pretrained wrote
    torchrun --nproc_per_node 2 examples/finetune_torchrun.py --shard             # one copy, divided among all
    torchrun --nproc_per_node 4 examples/finetune_torchrun.py --shard --resume    # goes on where the last run ended

`python -m torch.distributed.run` is torchrun where that is not on the path; slurm.sbatch starts this under SLURM. A
gradient is the mean over all processes; the weights of all are the same, bit for bit, after every step. SIGTERM ends
the run after the step that is under way, with a save. Text is taken as bytes: Python's standard library, or --data.
Nothing is downloaded. Needs tapestream[transformers].
"""

import argparse
import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from finetune_own_loop import config_of, show
from finetune_own_loop import parser as parser_of_one
from torch import distributed
from transformers import AutoModelForCausalLM

import tapestream as ts
from tapestream.models import Batches, load_bytes, standard_library_bytes

ENDING = threading.Event()
"""Set when this process has been asked to end."""


def main(arguments: list[str] | None = None) -> list[float]:
    """Train as the command line says; returns the losses of this process."""
    given = parser().parse_args(arguments)
    if "RANK" not in os.environ:
        parser().error("start it with torchrun: torchrun --nproc_per_node 2 examples/finetune_torchrun.py")
    signal.signal(signal.SIGTERM, lambda *_: ENDING.set())
    on_gpu = torch.device(given.device).type == "cuda"
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    try:
        return train(given, distributed.get_rank(), distributed.get_world_size())
    finally:
        distributed.destroy_process_group()


def train(given: argparse.Namespace, rank: int, ranks: int) -> list[float]:
    """One of ``ranks`` processes. What it says, only the first says."""
    if torch.device(given.device).type == "cuda":
        torch.cuda.set_device(distributed.get_node_local_rank())
    torch.manual_seed(0)  # a model that is drawn is that of the first process, whatever the others draw
    with torch.device("meta"):  # nothing is allocated here
        model: Any = AutoModelForCausalLM.from_config(config_of(given))  # type: ignore[no-untyped-call]
    if given.weights is None:  # weights are to be drawn anew, of which stream() warns
        warnings.filterwarnings("ignore", "this .* lay on the meta device")
    model = ts.stream(
        model,
        device=given.device,
        budget=given.budget,
        folder=given.out / "home",
        weights=given.weights,
        progress=show if rank == 0 else None,
        peers=ts.Peers(shard=given.shard),
    )
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=given.lr)
    text = standard_library_bytes() if given.data is None else load_bytes(given.data)
    batches = Batches(text, given.batch, given.seq, seed=rank)
    saved, done = given.out / "state", 0
    if given.resume:
        done = ts.load(saved, model=model, optimizer=optimizer)["done"]
        batches.load_state_dict({**batches.state_dict(), "drawn": done})
    torch.manual_seed(ranks * done + rank)  # dropout of its own; a save has the generators of the first process

    losses: list[float] = []
    begin, last = time.perf_counter(), done + given.steps if given.until is None else given.until
    for step, (tokens, _) in zip(range(done, last), batches, strict=False):
        tokens = tokens.to(given.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()  # .grad has the mean over processes now
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        told = torch.tensor([losses[-1] / ranks, float(ENDING.is_set())], dtype=torch.float64, device=given.device)
        distributed.all_reduce(told)
        if rank == 0:
            print(f"step {step + 1}/{last}  loss {told[0]:.3f}, mean of {ranks} processes", flush=True)
        if told[1]:  # some process was asked to end: all do, after the same step
            break

    seconds = (time.perf_counter() - begin) / max(1, len(losses))
    made = None
    if given.shard or rank == 0:  # what all have divided all save together
        made = ts.save(saved, model=model, optimizer=optimizer, done=done + len(losses))
    if rank == 0:
        print(f"\n{'a step':<36}{seconds:10.3f} s")
        if losses:
            print(f"{'peak, planned':<36}{ts.report(model).plan.peak_nbytes / 2**20:10.1f} MiB in each process")
        print(f"{'saved, as from_pretrained reads it':<36}{made}/model")
    distributed.barrier()  # nobody goes while the first one writes
    ts.unstream(model)
    return losses


def parser() -> argparse.ArgumentParser:
    """The command line: that of `finetune_own_loop`, and three options."""
    made = parser_of_one()
    made.description = __doc__
    made.set_defaults(out=Path("runs/torchrun"))
    made.add_argument("--resume", action="store_true", help="go on from what was saved in --out")
    made.add_argument("--until", type=int, help="end after this step, counted over all runs; --steps says nothing then")
    made.add_argument("--shard", action="store_true", help="divide one copy of the model among all processes")
    return made


if __name__ == "__main__":
    main()
