"""A recompute sees its own layer's weights: every layer has others, and they come late, over poison, from the disk."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.models import GPT, DRANet, DRANetConfig, GPTConfig, ResNet, ResNetConfig
from tapestream.models.grouped import Group

RESNET = ResNetConfig.cifar(32, width=8, classes=4, zero_residual=False, group_nbytes=5_000)
BACKBONE = ResNetConfig("bottleneck", (2, 3, 6, 4), width=4, zero_residual=False, group_nbytes=10_000)
SMALL = GPTConfig(8, 32, 2, vocabulary=17, context=16)
CASES = {  # the budgets: too little for the weights to stay, whatever seconds are measured
    "resnet": (ResNet, RESNET, replace(RESNET, group_nbytes=0), "480 KiB"),
    "dranet": (
        DRANet, DRANetConfig.on(BACKBONE, 5), DRANetConfig.on(replace(BACKBONE, group_nbytes=0), 5), "2700 KiB"
    ),
    "gpt": (GPT, SMALL, SMALL, "400 KiB"),
}  # fmt: skip


def batch(name: str, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    if name == "gpt":
        tokens = torch.randint(0, 17, (4, 17), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]
    size = (48, 48) if name == "dranet" else (16, 16)
    shape = (2, *size) if name == "dranet" else (2,)
    return torch.randn(2, 3, *size, generator=generator), torch.randint(4, shape, generator=generator)


def distinct(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """No two layers have a tensor in common, those that all start with alike (norms, biases) included."""
    generator = torch.Generator().manual_seed(5)
    changed = {
        name: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t
        for name, t in state.items()
    }
    bits = [t.numpy().tobytes() for name, t in changed.items() if t.is_floating_point() and name != "head.weight"]
    assert len(set(bits)) == len(bits)
    return changed


def train(name: str, model: nn.Module, optimizer: Any) -> list[float]:
    losses = []
    for number in range(2):
        torch.manual_seed(number)  # of the dropout
        loss = model(*batch(name, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", CASES)
def test_a_recompute_sees_its_own_layers_weights(name: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    cls, config, apart, budget = CASES[name]
    plain: Any = cls(apart, seed=3)
    start = distinct(plain.state_dict())
    if name == "gpt":
        start["head.weight"] = start["token.weight"]
    plain.load_state_dict(start)
    model: Any = cls(config, seed=3)
    model.load_state_dict(start)
    if name != "gpt":
        kinds = [(group._kind, group.count) for group in model.modules() if isinstance(group, Group)]
        assert len(kinds) > len({id(kind) for kind, _ in kinds}), "groups share templates"
        assert max(count for _, count in kinds) > 1, "and so do layers of a group"
    ts.stream(model, device="cpu", budget=budget, folder=tmp_path, blocks=list(model.blocks), engine="adversarial")
    ours = ts.optimizer(model, torch.optim.SGD, update="backward", lr=0.02, momentum=0.9, foreach=False)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.02, momentum=0.9, foreach=False)
    assert train(name, model, ours) == train(name, plain, theirs)
    plan = ts.report(model).plan
    assert plan.simulation.forwards > len(plan.profile), "nothing was recomputed"
    assert sum(plan.simulation.bytes_moved.values()) > 0
    found, wanted = model.state_dict(), plain.state_dict()
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    ts.unstream(model)
