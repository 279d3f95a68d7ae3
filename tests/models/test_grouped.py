"""Groups of equal layers beside the same layers as modules: every name and every bit."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tapestream as ts
from tapestream.capture.buffers import BufferSnapshot, buffer_slots
from tapestream.errors import InputError
from tapestream.models import ResNet, ResNetConfig
from tapestream.models.grouped import Group
from tapestream.models.resnet import Bottleneck

# Width 3: no tensor fills whole registers, so that there is padding everywhere.
CONFIGS = [
    ResNetConfig("basic", (5, 3), width=8, stem="cifar", classes=4, zero_residual=False, group_nbytes=8000),
    ResNetConfig("basic", (4, 4), width=3, stem="cifar", classes=4, zero_residual=False),
    ResNetConfig("bottleneck", (3, 5), width=4, stem="imagenet", classes=4, zero_residual=False, group_nbytes=2000),
    ResNetConfig("bottleneck", (2, 7), width=4, classes=4, output_stride=4, multi_grid=(1, 2, 4)),
]


def pair(config: ResNetConfig, seed: int = 3) -> tuple[ResNet, ResNet]:
    """The network in groups, and of modules."""
    return ResNet(config, seed=seed), ResNet(replace(config, group_nbytes=0), seed=seed)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, 16, 16, generator=generator), torch.randint(4, (2,), generator=generator)


def same_bits(left: nn.Module, right: nn.Module) -> bool:
    a, b = left.state_dict(), right.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By plain names: what a group's flat gradient holds, shown by the group itself."""
    shown = copy.deepcopy(model)
    with torch.no_grad():
        for parameter, own in zip(shown.parameters(), model.parameters(), strict=True):
            assert own.grad is not None
            parameter.copy_(own.grad)
    names = {name for name, _ in model.named_parameters()}
    return {n: t for n, t in shown.state_dict().items() if n in names or not n.endswith(("_mean", "_var", "_tracked"))}


@pytest.mark.parametrize("config", CONFIGS)
def test_names_values_results_gradients_and_statistics_are_those_of_modules(config: ResNetConfig) -> None:
    model, plain = pair(config)
    assert sum(isinstance(m, Group) for m in model.modules())
    assert not any(isinstance(m, Group) for m in plain.modules())
    assert same_bits(model, plain)
    optimizers = [torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, weight_decay=1e-3) for m in (model, plain)]
    for number in range(3):
        losses = [m(*batch(number)) for m in (model, plain)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        found, expected = gradients(model), gradients(plain)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert same_bits(model, plain)
    images, _ = batch(9)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    assert same_bits(model, plain)


def test_modules_and_parameters_are_few_however_deep() -> None:
    with torch.device("meta"):
        model = ResNet(ResNetConfig.cifar(100_002, stages=1))
    layers = sum(group.count for group in model.blocks if isinstance(group, Group))
    assert layers == 50_000
    assert len(model.blocks) <= layers * 4672 * 4 / 2**20 + 1
    assert all(p.numel() * 4 >= 2**20 for g in model.blocks for p in g.parameters())
    assert len(list(model.modules())) < len(model.blocks) + 10


def test_values_come_piece_by_piece_in_any_order() -> None:
    whole = ResNet(CONFIGS[0], seed=5)
    with torch.device("meta"):
        pieces = ResNet(CONFIGS[0], seed=5)
    before = torch.get_rng_state()
    for block in reversed(pieces.blocks):
        block.to_empty(device="cpu")
        block.initialize()  # type: ignore[operator]
    assert pieces.conv1.weight.is_meta
    for outside in (pieces.conv1, pieces.bn1, pieces.fc):
        outside.to_empty(device="cpu")
    pieces.initialize()
    assert same_bits(whole, pieces)
    assert torch.equal(before, torch.get_rng_state())
    assert not same_bits(whole, ResNet(CONFIGS[0], seed=6))


@pytest.mark.parametrize("config", CONFIGS)
def test_states_load_both_ways(config: ResNetConfig) -> None:
    (model, plain), (other, third) = pair(config), pair(config, seed=4)
    model(batch(0)[0])  # statistics that are not the initial ones
    third.load_state_dict(model.state_dict())
    assert same_bits(third, model)
    other.load_state_dict(third.state_dict())
    assert same_bits(other, model)
    model.load_state_dict(plain.state_dict())
    assert same_bits(model, plain)


def test_what_does_not_load_is_named() -> None:
    model, plain = pair(CONFIGS[0])
    state = plain.state_dict()
    state["layer1.3.conv9.weight"] = state.pop("layer1.3.conv2.weight")
    state["layer1.77.bn1.weight"] = torch.ones(8)
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["layer1.3.conv2.weight"]
    assert sorted(unexpected) == ["layer1.3.conv9.weight", "layer1.77.bn1.weight"]
    with pytest.raises(RuntimeError, match=r"Missing.*layer1\.3\.conv2\.weight") as raised:
        model.load_state_dict(state)
    assert "layer1.3.conv9.weight" in str(raised.value)
    assert "layer1.77.bn1.weight" in str(raised.value)
    state = plain.state_dict()
    state["layer2.2.bn2.running_mean"] = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"size mismatch for layer2\.2\.bn2\.running_mean"):
        model.load_state_dict(state)
    group = next(m for m in model.modules() if isinstance(m, Group))
    again = copy.deepcopy(group)
    with torch.no_grad():
        again.flat.zero_()
    again.load_state_dict(group.state_dict())
    assert torch.equal(again.flat, group.flat)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("other", [0, 500, 2**20], ids=["modules", "small groups", "large groups"])
def test_weights_of_layers_one_by_one_stream_into_groups(config: ResNetConfig, other: int, tmp_path: Path) -> None:
    saved = ResNet(replace(config, group_nbytes=other), seed=4)
    saved(batch(0)[0])  # statistics that are not the initial ones
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = ResNet(config)
    ts.stream(model, device="cpu", blocks=model.blocks, folder=tmp_path, weights=tmp_path, budget="16MiB")
    assert same_bits(ts.unstream(model), saved)
    again = ResNet(config)
    again.load_state_dict(saved.state_dict())
    for mine, theirs in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(mine, theirs)  # what lies between tensors, too


def test_weights_that_do_not_fit_groups_are_named(tmp_path: Path) -> None:
    config = CONFIGS[0]
    state = ResNet(config).state_dict()
    state["layer1.3.conv9.weight"] = state.pop("layer1.3.conv2.weight")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"1 missing .*layer1\.3\.conv2\.weight; 1 not .*conv9") as raised:
        ts.stream(ResNet(config), device="cpu", weights=tmp_path)
    assert "group_nbytes" not in str(raised.value)


def test_a_save_of_other_groups_says_so(tmp_path: Path) -> None:
    config, other = CONFIGS[0], ResNet(replace(CONFIGS[0], group_nbytes=20_000))
    ts.save(tmp_path / "saves", model=other)
    model = ResNet(config)
    before = copy.deepcopy(model)
    with pytest.raises(InputError, match=r"another model: .* not in the same ones: .* group_nbytes that it was saved"):
        ts.load(tmp_path / "saves", model=model)
    assert same_bits(before, model)
    with pytest.raises(InputError, match=r"do not fit this ResNet: .* group_nbytes that it was saved"):
        ts.stream(model, device="cpu", weights=tmp_path / "saves" / "000001" / "model")


def test_the_template_holds_nothing_between_calls() -> None:
    model, _ = pair(CONFIGS[0])
    group = next(m for m in model.modules() if isinstance(m, Group))

    def held() -> Iterator[torch.Tensor]:
        return (t for slot in group._kind.slots if (t := slot.held_in[slot.key]) is not None)

    model(*batch(0)).backward()
    assert all(t.is_meta for t in held())
    with pytest.raises(RuntimeError):
        group(torch.randn(2, 5, 4, 4))
    assert all(t.is_meta for t in held())


def test_what_is_carried_is_handed_on_as_it_is() -> None:
    model, _ = pair(CONFIGS[2])
    x, other = torch.randn(2, 4, 8, 8), torch.randn(1)
    for stack in model.stacks:
        alone, (found, handed) = copy.deepcopy(stack)(x), stack(x, other)
        assert torch.equal(found, alone)
        assert handed is other
        x = found
    assert isinstance(model.blocks[0], Bottleneck)


def test_statistics_that_training_does_not_read_are_not_copied_for_recomputes() -> None:
    net = ResNet(CONFIGS[0])
    groups = [module for module in net.modules() if isinstance(module, Group)]
    assert groups
    for group in groups:
        slots = buffer_slots([group])
        training, group.training = BufferSnapshot.for_recomputes(slots), False
        assert not training.slots
        assert training.unread == slots
        held = {name: (buffer, buffer.clone()) for name, buffer in group._buffers.items()}
        with training.substituted():  # and yet what a recompute writes is discarded
            for buffer in group.buffers():
                buffer.add_(1)
        assert all(group._buffers[name] is was and torch.equal(was, value) for name, (was, value) in held.items())
        assert BufferSnapshot.for_recomputes(slots).slots == slots  # in eval mode they are read
