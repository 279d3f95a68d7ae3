"""DRANet: its attentions and gate beside the formulas written out, the skip that is carried once, training streamed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tapestream as ts
from tapestream.errors import InputError
from tapestream.models import DRANet, DRANetConfig, ResNetConfig
from tapestream.models.dranet import ChannelAttention, GatedDecoder, PositionAttention

BACKBONE = ResNetConfig("bottleneck", (2, 3, 6, 4), width=4, zero_residual=False, group_nbytes=10_000)
SMALL = DRANetConfig.on(BACKBONE, 5)


def batch(number: int, images: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    targets = torch.randint(5, (images, 48, 48), generator=generator)
    targets[0, :7] = 255
    return torch.randn(images, 3, 48, 48, generator=generator), targets


def test_position_attention_is_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    module = PositionAttention(16).eval()
    x = torch.randn(2, 16, 12, 12)
    assert torch.equal(module(x), x)  # the scale starts from 0
    with torch.no_grad():
        module.scale.fill_(0.7)
        centres = torch.cat([c(x).flatten(2) for c in module.centres], 2)
        assert centres.shape == (2, 16, 50)
        for image in range(2):
            for i, j in ((0, 0), (3, 11)):
                weights = torch.stack([module.query(x)[image, :, i, j] @ module.key(centres[image, :, k])
                                       for k in range(50)]).softmax(0)  # fmt: skip
                seen = sum(weights[k] * module.value(centres[image, :, k]) for k in range(50))
                torch.testing.assert_close(module(x)[image, :, i, j], x[image, :, i, j] + 0.7 * seen)


def test_channel_attention_is_what_the_paper_writes() -> None:
    torch.manual_seed(0)
    module = ChannelAttention(32).eval()
    x = torch.randn(2, 32, 5, 5)
    assert torch.equal(module(x), x)
    with torch.no_grad():
        module.scale.fill_(0.7)
        centres = module.centres(x).flatten(2)
        assert centres.shape == (2, 2, 25)
        for channel in (0, 17):
            energies = torch.stack([x[1, channel].flatten() @ centre for centre in centres[1]])
            weights = (energies.max() - energies).softmax(0)
            seen = (weights[:, None] * centres[1]).sum(0).view(5, 5)
            torch.testing.assert_close(module(x)[1, channel], x[1, channel] + 0.7 * seen)


def test_the_gate_lets_detail_through() -> None:
    torch.manual_seed(0)
    module = GatedDecoder(8, 16).eval()
    detail, x = torch.randn(2, 8, 12, 12), torch.randn(2, 16, 6, 6)
    low = module.reduce(detail)
    assert low.shape == (2, 32, 12, 12)
    high = F.interpolate(x, (12, 12), mode="bilinear", align_corners=True)
    gate = torch.sigmoid(module.gate[0](torch.cat([low, high], 1)))
    assert gate.shape == (2, 1, 12, 12)
    torch.testing.assert_close(module(detail, x), module.fuse(torch.cat([gate * low, high], 1)))
    assert module.gamma.item() == 1.0
    with torch.no_grad():
        module.gamma.zero_()
    assert torch.equal(module(detail, x), module(2 * detail, x))  # shut


def test_shapes_and_losses() -> None:
    model = DRANet(SMALL, seed=1)
    assert SMALL.backbone.multi_grid == (1, 2, 4)
    assert SMALL.backbone.output_stride == 8
    for attention in (model.head.position[1], model.head.channel[1]):
        assert isinstance(attention, PositionAttention | ChannelAttention)
        assert attention.scale.item() == 0.0
    model.eval()
    images, targets = batch(0)
    logits = model(images)
    assert logits.shape == (2, 5, 48, 48)
    assert model(images[:1]).shape == (1, 5, 48, 48)
    x = model.backbone.start(images)
    for stack in model.backbone.stacks[:3]:
        x = stack(x)
    other = F.interpolate(model.auxiliary(x), (48, 48), mode="bilinear", align_corners=True)  # type: ignore[misc]
    expected = sum(weight * F.cross_entropy(found.movedim(1, -1)[targets != 255], targets[targets != 255])
                   for weight, found in ((1.0, logits), (0.4, other)))  # fmt: skip
    torch.testing.assert_close(model(images, targets), expected)
    alone = DRANet(replace(SMALL, auxiliary=0.0), seed=1).eval()
    assert alone.auxiliary is None
    assert torch.equal(alone(images), logits)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DRANetConfig.on(BACKBONE, 1), "classes"),
        (lambda: DRANetConfig.on(replace(BACKBONE, width=3), 5), "multiple of 64"),
        (lambda: DRANetConfig.on(replace(BACKBONE, stages=(2, 2), width=8), 5).backbone.output_stride, None),
    ],
)
def test_shapes_that_cannot_be_are_refused(make: Any, said: str | None) -> None:
    if said is None:
        assert make() == 8
        return
    with pytest.raises(InputError, match=said):
        make()


def test_a_batch_of_one_image_is_refused_in_training() -> None:
    with pytest.raises(InputError, match="two images"):
        DRANet(SMALL)(*batch(0, images=1))


@pytest.mark.parametrize("shape", [(2, 24, 24), (1, 48, 48), (2, 1, 48, 48)])
def test_targets_of_another_size_than_the_images_are_refused(shape: tuple[int, ...]) -> None:
    images, _ = batch(0)
    with pytest.raises(InputError) as refused:
        DRANet(SMALL)(images, torch.zeros(shape, dtype=torch.int64))
    assert "(2, 48, 48) for images of (2, 3, 48, 48)" in str(refused.value)
    assert f"given are {shape}" in str(refused.value)


def train(model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for number in range(3):
        torch.manual_seed(number)  # of the dropout
        loss = model(*batch(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


OPTIONS: dict[str, Any] = {"lr": 0.02, "momentum": 0.9, "foreach": False}


def test_streamed_it_trains_like_modules_and_carries_the_early_stage_once(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    plain = DRANet(replace(SMALL, backbone=replace(SMALL.backbone, group_nbytes=0)), seed=7)
    expected = train(plain, torch.optim.SGD(plain.parameters(), **OPTIONS))
    with torch.device("meta"):
        model: Any = DRANet(SMALL, seed=7)
    ts.stream(model, device="cpu", budget="3500 KiB", folder=tmp_path, blocks=model.blocks)
    optimizer = ts.optimizer(model, torch.optim.SGD, update="backward", **OPTIONS)
    assert train(model, optimizer) == expected
    plan = ts.report(model).plan
    assert plan.simulation.forwards > len(plan.profile)
    early = len(model.backbone.stacks[0])
    detail = 2 * SMALL.backbone.features[0] * 12 * 12 * 4
    assert [(c.first, c.last, c.nbytes) for c in plan.profile.carried] == [(early, len(plan.profile), detail)]
    found, wanted = model.state_dict(), plain.state_dict()
    assert list(found) == list(wanted)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    ts.unstream(model)
