"""What people do to models beside training them, done to a streamed one: the bits of plain PyTorch."""

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import assert_same, seed
from living import one_process
from pairs import CASE, Pair, batch, both, sgd
from safetensors.torch import load_file, save_file, save_model
from streaming import budget_at, everything, options_of, state_of, streamed
from torch import nn

import tapestream as ts

__all__ = ["one_process"]  # a fixture


def step(model: nn.Module, optimizer: Any) -> None:
    model(batch()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def saved(thing: Any) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


@pytest.mark.on_cpu("a GPU needs ts.GradScaler")
def test_loss_scaling_with_clipping_and_a_step_left_out(pair: Pair) -> None:
    scales = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for number in range(5):
            loss = model(batch()).sum() * (float("inf") if number == 2 else 1.0)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[0] == scales[1] == 2.0**9  # twice doubled, once halved
    assert_same(everything(pair[0]), everything(pair[1]))


@pytest.mark.on_cpu("gradients of one model lie on one device")
def test_clipping_by_norm_and_by_value(pair: Pair) -> None:
    norms: list[torch.Tensor] = []

    def run(model: nn.Module, _: Any) -> None:
        model(batch()).sum().backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)

    both(pair, run)
    assert all(torch.equal(a, b) for a, b in zip(norms[:3], norms[3:], strict=True))


@pytest.mark.on_cpu("parameters of one model lie on one device")
def test_averages_made_before_and_by_hand(pair: Pair) -> None:
    found = []
    for model, optimizer in (pair[0::2], pair[1::2]):
        seed(3)
        average = torch.optim.swa_utils.AveragedModel(
            CASE.model(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
        )
        by_hand = copy.deepcopy(model.state_dict())
        for _ in range(3):
            step(model, optimizer)
            average.update_parameters(model)
            for name, tensor in model.state_dict().items():
                by_hand[name].lerp_(tensor, 0.1)
        found.append(everything(average) | {f"by hand {name}": tensor for name, tensor in by_hand.items()})
    assert_same(*found)


@pytest.mark.on_cpu("c10d knows no simulated GPU")
def test_one_process_of_many_that_could_be(pair: Pair, one_process: None) -> None:
    theirs, ours, plain, optimizer = pair
    for model, steps in ((theirs, plain), (ours, optimizer)):
        seed(3)
        parallel = nn.parallel.DistributedDataParallel(model)
        for _ in range(3):
            step(parallel, steps)
    assert_same(everything(theirs), everything(ours))


@pytest.mark.thinned(2)
@pytest.mark.on_cpu("the simulated GPU compiles nothing")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # hidden by PyTorch itself
@pytest.mark.parametrize("when", ["before", "wrapped", "after"])
@pytest.mark.parametrize("engine", ["auto", "adversarial"])
def test_compiled_blocks(when: str, engine: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    options = options_of(engine, tmp_path)
    budget = budget_at("least", CASE, sgd, **options)
    theirs, ours = CASE.model(), CASE.model()
    for model in (theirs, ours):
        for k, block in enumerate(model.blocks):
            if when == "wrapped":
                model.blocks[k] = torch.compile(block, backend="aot_eager")
            elif when == "before" or model is theirs:
                block.compile(backend="aot_eager")
    ts.stream(ours, budget=budget, **options)
    if when == "after":
        for block in ours.blocks:
            block.compile(backend="aot_eager")
    both((theirs, ours, torch.optim.SGD(theirs.parameters(), lr=0.05, momentum=0.9), sgd(ours)), step_by_loss)
    ts.unstream(ours)


def step_by_loss(model: nn.Module, _: Any) -> None:
    model(batch()).sum().backward()


def test_blocks_of_one_class_are_of_one_class_still(pair: Pair) -> None:
    assert len({type(block) for block in pair[1].blocks}) == 1


def test_what_is_saved_is_no_more_than_what_was_asked(pair: Pair, tmp_path: Path) -> None:
    theirs, ours = pair[:2]
    assert len(saved(ours.state_dict())) <= len(saved(theirs.state_dict())) + 64
    chosen = "blocks.0.linear.bias"
    assert len(saved({chosen: ours.state_dict()[chosen]})) < 2048
    assert len(saved(ours.blocks[0].state_dict())) <= len(saved(theirs.blocks[0].state_dict())) + 64
    save_model(ours, tmp_path / "model")
    save_file(ours.state_dict(), tmp_path / "tensors")
    for name in ("model", "tensors"):
        assert_same(everything(theirs), load_file(tmp_path / name))


def test_state_dicts_show_the_bytes_and_count_what_is_written(pair: Pair) -> None:
    weight = pair[1].blocks[3].linear.weight
    shown, version = pair[1].state_dict()["blocks.3.linear.weight"], weight._version
    assert shown.data_ptr() == weight.data_ptr()
    shown.mul_(2.0)
    assert weight._version == version + 1
    pair[0].blocks[3].linear.weight.data.mul_(2.0)
    both(pair, step_by_loss)


def test_kept_variables_are_the_parameters(pair: Pair) -> None:
    kept = pair[1].state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in pair[1].named_parameters())


def test_going_on_from_saved_files(pair: Pair, setting: dict[str, Any]) -> None:
    theirs, ours, plain, optimizer = pair
    both(pair, step_by_loss)
    files = saved((ours.state_dict(), optimizer.state_dict()))
    with streamed(CASE, **(setting | {"folder": setting["folder"].parent / "other"})) as again:
        resumed = sgd(again)
        weights, state = torch.load(io.BytesIO(files))
        again.load_state_dict(weights)
        resumed.load_state_dict(state)
        both((theirs, again, plain, resumed), step_by_loss)
        assert_same(state_of(plain), state_of(resumed))


@pytest.mark.on_cpu("weights are drawn where they lie")
def test_fresh_weights_by_apply(pair: Pair) -> None:
    for model in pair[:2]:
        seed(5)
        model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
    both(pair, step_by_loss)
