"""The examples train as plain PyTorch does, bit for bit, and say what they can do."""

from pathlib import Path
from types import ModuleType
from typing import Any

import finetune_accumulate
import finetune_lora
import finetune_own_loop
import finetune_torchrun
import finetune_trainer
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import tapestream as ts
from tapestream.ir.actions import Offload, Prefetch
from tapestream.models import Batches, standard_library_bytes

SIZES = ["--layers", "3", "--width", "64", "--seq", "32"]
STATE_NBYTES = 2_000_000
"""Less than parameters, gradients and AdamW state of these sizes take."""

# peft asks transformers for a property by its old name
old_name = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def assert_same_tensors(one: Path, other: Path) -> None:
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize(
    "example", [finetune_own_loop, finetune_trainer, finetune_accumulate, finetune_lora, finetune_torchrun]
)
def test_help(example: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        example.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    assert example.__doc__ is not None
    assert example.__doc__.splitlines()[0] in said
    assert "--budget" in said


def test_own_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = [*SIZES, "--budget", "1400KiB", "--steps", "3", "--out"]
    finetune_own_loop.main([*options, str(tmp_path / "first")])
    saved = tmp_path / "first" / "model"
    ours = finetune_own_loop.main([*options, str(tmp_path / "second"), "--weights", str(saved)])
    assert "saved" in capsys.readouterr().out
    assert not any((tmp_path / "second" / "home").glob("*"))

    model = AutoModelForCausalLM.from_pretrained(saved).train()
    assert 16 * sum(p.numel() for p in model.parameters()) > STATE_NBYTES
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=5)
    theirs = []
    for _, (tokens, _) in zip(range(3), Batches(standard_library_bytes(), 2, 32), strict=False):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == theirs
    model.save_pretrained(tmp_path / "plain")
    assert_same_tensors(tmp_path / "plain" / "model.safetensors", tmp_path / "second" / "model" / "model.safetensors")


def logged(out: Path, *options: str, run: Any = finetune_trainer.main) -> list[dict[str, Any]]:
    """What the Trainer logs, without clocks."""
    found = run([*SIZES, "--budget", "1400KiB", "--steps", "4", "--out", str(out), *options])
    kept = [{k: v for k, v in entry.items() if "runtime" not in k and "per_second" not in k} for entry in found]
    return [entry for entry in kept if "train_loss" not in entry]  # a mean over the steps since resuming


def test_trainer(tmp_path: Path) -> None:
    stock = logged(tmp_path / "stock", "--stock")
    assert sum("loss" in entry for entry in stock) == 4
    assert sum("eval_loss" in entry for entry in stock) == 2
    assert logged(tmp_path / "streamed") == stock
    halfway = str(tmp_path / "streamed" / "checkpoint-2")
    assert logged(tmp_path / "resumed", "--resume", halfway) == stock
    for run in ("streamed", "resumed"):
        assert_same_tensors(
            tmp_path / "stock" / "model" / "model.safetensors", tmp_path / run / "model" / "model.safetensors"
        )


@pytest.mark.parametrize("faster", [False, True])
def test_trainer_whose_micro_batches_go_together(
    faster: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if faster:
        planned = "tapestream.frontends.module.accumulating.accumulate.joint_seconds"
        monkeypatch.setattr(planned, lambda together: 0.0)
    run, more = finetune_accumulate.main, ["--accumulate", "3"]
    stock = logged(tmp_path / "stock", "--stock", *more, run=run)
    ours = logged(tmp_path / "ours", *more, "--budget", "2MiB", run=run)
    assert ours == stock
    assert ("  accumulated  3 micro-batches together, block by block" in capsys.readouterr().out) >= faster
    assert_same_tensors(*(tmp_path / one / "model" / "model.safetensors" for one in ("stock", "ours")))


@old_name
def test_lora(tmp_path: Path) -> None:
    options = [*SIZES, "--budget", "900KiB", "--steps", "3", "--adapted", "1", "--out", str(tmp_path)]
    ours, moved = finetune_lora.main(options)

    given = finetune_lora.parser().parse_args(options)
    model = finetune_lora.adapted(given)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    theirs = []
    for _, (tokens, _) in zip(range(3), finetune_lora.batches(given), strict=False):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert ours == theirs
    model.save_pretrained(str(tmp_path / "plain"))
    name = "adapter_model.safetensors"
    assert_same_tensors(tmp_path / "plain" / name, tmp_path / "adapter" / name)

    assert moved[ts.Tier.DISK, ts.Tier.DEVICE] > 0


@old_name
def test_layers_without_adapters_are_never_written(tmp_path: Path) -> None:
    """Under the least budget no block stays on the device: both with adapters are written, the one without is not."""
    given = finetune_lora.parser().parse_args([*SIZES, "--adapted", "2"])
    tokens, _ = next(finetune_lora.batches(given))
    with pytest.raises(ts.BudgetError) as refused:
        plan_of_a_step(given, 1, tokens, tmp_path)
    assert refused.value.least_nbytes is not None
    schedule = plan_of_a_step(given, refused.value.least_nbytes, tokens, tmp_path).schedule
    assert {action.value.index for action in schedule if isinstance(action, Prefetch)} == {0, 1, 2}
    assert {action.value.index for action in schedule if isinstance(action, Offload)} == {1, 2}


def plan_of_a_step(given: Any, budget: int, tokens: torch.Tensor, folder: Path) -> ts.Plan:
    model = finetune_lora.adapted(given)
    ts.stream(model, device="cpu", budget=budget, folder=folder)
    try:
        ts.optimizer(model, torch.optim.AdamW)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return ts.report(model).plan
    finally:
        ts.unstream(model)
