"""Tensors are saved as they are kept: layers in groups are few, and state in parts is not put together first."""

from pathlib import Path

import pytest
import torch
from running import Run

import tapestream as ts
from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.models import ResNet, ResNetConfig
from tapestream.optim import parts
from tapestream.optim.shown import StateInParts
from tapestream.storage.tensor_files import read_tensors


def network(group_nbytes: int = 4096, seed: int = 0) -> ResNet:
    return ResNet(ResNetConfig.cifar(62, stages=2, width=4, group_nbytes=group_nbytes), seed=seed)


def same(left: torch.nn.Module, right: torch.nn.Module) -> bool:
    found, expected = left.state_dict(), right.state_dict()
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


def test_layers_in_groups_are_saved_as_groups(tmp_path: Path) -> None:
    model, other = network(), network(seed=1)
    model(torch.randn(2, 3, 8, 8))  # statistics that are not the initial ones
    saved = ts.save(tmp_path, model=model)
    names = read_tensors(saved / "model" / "model.safetensors").keys()
    assert len(names) < len(model.state_dict()) / 3
    assert {"layer1.0.flat", "layer1.0.flat_int64", "fc.weight"} <= names
    ts.load(tmp_path, model=other)
    assert same(other, model)


def test_a_group_streams_and_resumes_from_its_save(tmp_path: Path) -> None:
    model = network()
    saved = ts.save(tmp_path / "saves", model=model)
    with torch.device("meta"):
        hollow = network()
    streamed = ts.stream(
        hollow, device="cpu", budget="4 MiB", folder=tmp_path / "home", blocks=hollow.blocks, weights=saved / "model"
    )  # fmt: skip
    assert same(streamed, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    ts.load(ts.save(tmp_path / "saves", model=streamed), model=model)
    assert same(model, streamed)
    ts.unstream(streamed)


def test_a_module_per_layer_loads_into_groups_and_not_the_other_way(tmp_path: Path) -> None:
    plain, model = network(0), network(seed=1)
    ts.save(tmp_path, model=plain)
    ts.load(tmp_path, model=model)
    assert same(model, plain)
    ts.save(tmp_path, model=model)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    with pytest.raises(InputError, match=r"from another model: \d+ of \d+ tensors differ.*nothing was changed"):
        ts.load(tmp_path, model=plain)
    assert all(torch.equal(tensor, before[name]) for name, tensor in plain.state_dict().items())


def test_state_in_parts_goes_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "LEAST_PART_NBYTES", 24 * 1024)
    monkeypatch.setattr(parts, "_SHARE", 10**9)
    run = Run(tmp_path / "home", width=64, budget="1 MiB")
    run.train(2)
    found = run.optimizer.state_dict()["state"]
    cut = [
        value for state in run.optimizer.state.values() for value in state.values() if isinstance(value, StateInParts)
    ]
    assert cut
    with monkeypatch.context() as patched:
        patched.setattr(BlockStore, "beside", None)
        saved = run.save(tmp_path / "saves")
    tensors = read_tensors(saved / "optimizer" / "optimizer.safetensors")
    for number, state in found.items():
        for name, value in state.items():
            if torch.is_tensor(value) and value.dim():
                assert torch.equal(tensors[f"state.{number}.{name}"], value), (number, name)
    other = Run(tmp_path / "home", width=64, budget="1 MiB")
    other.load(tmp_path / "saves")
    assert other.digest() == run.digest()
    for one in (run, other):
        ts.unstream(one.model)
