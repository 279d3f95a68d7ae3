"""The example for torchrun has the bits of one process that runs everybody's batches, also where it goes on."""

from pathlib import Path

import finetune_own_loop
import pytest
import torch
from safetensors.torch import load_file
from torchrun import in_two_processes
from transformers import AutoModelForCausalLM

from tapestream.models import Batches, standard_library_bytes

SCRIPT = Path(__file__).parents[2] / "examples" / "finetune_torchrun.py"
SIZES = ["--layers", "3", "--width", "64", "--seq", "32"]


@pytest.mark.full
@pytest.mark.on_cpu("c10d knows no simulated GPU")
def test_goes_on_with_the_bits_of_one_process(tmp_path: Path) -> None:
    weights, out = tmp_path / "weights", tmp_path / "out"
    drawn = AutoModelForCausalLM.from_config(finetune_own_loop.config_of(finetune_own_loop.parser().parse_args(SIZES)))
    drawn.save_pretrained(weights)
    options = ["--budget", "1900KiB", "--steps", "2", "--lr", "0.01", "--weights", str(weights), "--out", str(out)]
    said = in_two_processes(SCRIPT, *SIZES, *options)
    assert not any((out / "home").glob("*"))
    said += in_two_processes(SCRIPT, *SIZES, *options, "--resume")

    model = AutoModelForCausalLM.from_pretrained(weights).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ranks = [Batches(standard_library_bytes(), 2, 32, seed=rank) for rank in range(2)]
    for step in range(4):
        losses = []
        for batches in ranks:
            tokens, _ = next(batches)
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / 2).backward()
            losses.append(loss.detach() / 2)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert f"step {step + 1}/{2 if step < 2 else 4}  loss {sum(losses):.3f}, mean of 2 processes" in said
    trained, before = (load_file(path / "model.safetensors") for path in (out / "state" / "000002" / "model", weights))
    own = dict(model.named_parameters())
    assert trained.keys() == before.keys()
    assert [name for name, found in trained.items() if not torch.equal(found, own[name])] == []
    assert not any(torch.equal(trained[name], before[name]) for name in trained)
