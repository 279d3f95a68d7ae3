"""A save that does not fit is refused before anything is changed, whatever the order of the parts."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Run
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

import tapestream as ts
from tapestream.errors import InputError

ADAMW, SGD = torch.optim.AdamW, torch.optim.SGD


def network(width: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(width, width, dtype=dtype), nn.BatchNorm1d(width, dtype=dtype))


def trained(model: nn.Module, optimizer: Any) -> Any:
    first = next(model.parameters())
    model(torch.randn(3, first.shape[1], dtype=first.dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def states(parts: dict[str, Any]) -> Any:
    return copy.deepcopy({name: part.state_dict() for name, part in parts.items() if not isinstance(part, type | int)})


def same(left: Any, right: Any) -> bool:
    leaves = [torch.utils._pytree.tree_leaves(tree) for tree in (left, right)]
    return len(leaves[0]) == len(leaves[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True)
    )


def refused(folder: Path, match: str, **parts: Any) -> None:
    """Loading raises InputError, and changes neither the parts nor a model and the generators beside them."""
    parts = {"first": network(2), **parts}
    before, random = states(parts), torch.get_rng_state()
    with pytest.raises(InputError, match=match):
        ts.load(folder, **parts)
    assert same(states(parts), before)
    assert torch.equal(torch.get_rng_state(), random)


def saved(folder: Path, **parts: Any) -> Path:
    found = ts.save(folder, first=network(2), **parts)
    torch.rand(3)
    return found


@pytest.mark.parametrize(
    ("there", "here", "match"),
    [
        (torch.float32, torch.bfloat16, r"'0.weight' is torch.float32 there and torch.bfloat16 here, and nothing is"),
        (torch.float64, torch.float32, r"load into a model of torch.float64, then convert that; nothing was changed"),
        (torch.bfloat16, torch.float32, r"'0.weight' is torch.bfloat16 there"),
    ],
)
def test_no_value_is_rounded(there: torch.dtype, here: torch.dtype, match: str, tmp_path: Path) -> None:
    saved(tmp_path, model=network(dtype=there))
    refused(tmp_path, match, model=network(dtype=here))


def test_buffers_and_meta_tensors_too(tmp_path: Path) -> None:
    model, other = network(), network()
    model.register_buffer("count", torch.tensor([300.7]))
    other.register_buffer("count", torch.zeros(1, dtype=torch.uint8))
    saved(tmp_path, model=model)
    refused(tmp_path, "'count' is torch.float32 there and torch.uint8 here", model=other)
    first, hollow = network(2), copy.deepcopy(model).to("meta")
    before = states({"first": first})
    with pytest.raises(InputError, match=r"'count' of model is on the meta device.*model.to_empty"):
        ts.load(tmp_path, first=first, model=hollow)
    assert same(states({"first": first}), before)
    ts.load(tmp_path, first=first, model=hollow.to_empty(device="cpu"))
    assert torch.equal(hollow.get_buffer("count"), torch.tensor([300.7]))


def test_parts_of_another_kind(tmp_path: Path) -> None:
    model = network()
    optimizer = trained(model, ADAMW(model.parameters()))
    saved(tmp_path, model=model, optimizer=optimizer, number=3)
    others = {"model": network(), "optimizer": ADAMW(network().parameters())}
    refused(
        tmp_path, "holds a plain value as number.*Sequential was to be loaded.*leave it out", number=others["model"]
    )
    refused(tmp_path, "holds a plain value as number.*AdamW was to be", number=others["optimizer"])
    refused(tmp_path, "another model: its class is Sequential there and AdamW here", model=others["optimizer"])
    refused(tmp_path, "another optimizer: its class is AdamW there and Sequential", optimizer=others["model"])
    refused(tmp_path, "model=Linear is a class, which has no state; give an object", model=nn.Linear)
    refused(tmp_path, r"model=int has no load_state_dict\(\); leave it out", model=3)


def test_optimizers_of_another_class_or_for_other_parameters(tmp_path: Path) -> None:
    model = network()
    saved(tmp_path, optimizer=trained(model, SGD(model.parameters(), momentum=0.9)))
    refused(tmp_path, "its class is SGD there and AdamW here", optimizer=ADAMW(network().parameters()))
    refused(tmp_path, r"parameter 0 is of torch.float32 and shape \(4, 4\) there and of \S+ and shape \(3, 3\) here",
            optimizer=SGD(network(3).parameters()))  # fmt: skip
    refused(tmp_path, "parameter 0 is of torch.float32 .* there and of torch.float64",
            optimizer=SGD(network(dtype=torch.float64).parameters()))  # fmt: skip

    class Mine(SGD):
        pass

    for cls in (SGD, Mine):
        other = network()
        optimizer = cls(other.parameters(), momentum=0.9)
        ts.load(tmp_path, optimizer=optimizer)
        assert same(optimizer.state_dict()["state"], states({"o": optimizer})["o"]["state"])
    saved(tmp_path, optimizer=trained(other, torch.optim.Adam(other.parameters())))
    refused(tmp_path, "its class is Adam there and AdamW here", optimizer=ADAMW(network().parameters()))


def test_schedulers_and_scalers_of_another_kind(tmp_path: Path) -> None:
    optimizer = SGD(network().parameters(), lr=0.1)
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    saved(tmp_path, schedule=StepLR(optimizer, 1), scaler=disabled)
    other = SGD(network().parameters(), lr=0.1)
    refused(tmp_path, "its class is StepLR there and CosineAnnealingLR here", schedule=CosineAnnealingLR(other, 5))
    refused(
        tmp_path, "saved with scaler disabled, here it is enabled; leave it out", scaler=torch.amp.GradScaler("cpu")
    )
    ts.load(tmp_path, schedule=StepLR(other, 3), scaler=torch.amp.GradScaler("cpu", enabled=False))


def test_the_state_of_a_streamed_optimizer_has_its_place(tmp_path: Path) -> None:
    """A plain run of 16 bits keeps no masters: those of a streamed one would be whatever was there."""
    plain = Run(None, bfloat16=True)
    plain.train(1)
    plain.save(tmp_path / "saves")
    streamed = Run(tmp_path / "home", bfloat16=True, budget="1 MiB")
    before = streamed.digest()
    with pytest.raises(InputError, match=r"another optimizer: '\w+' of parameter 0 is .* here; make optimizer as"):
        streamed.load(tmp_path / "saves")
    assert streamed.digest() == before
    other = Run(tmp_path / "home", budget="1 MiB")
    rule = ts.optimizer(other.model, SGD, lr=0.1, momentum=0.9)
    with pytest.raises(InputError, match="its class is AdamW there and SGD here"):
        ts.load(tmp_path / "saves", optimizer=rule)
    for run in (streamed, other):
        ts.unstream(run.model)


def test_masters_are_not_rounded_by_a_plain_optimizer(tmp_path: Path) -> None:
    streamed = Run(tmp_path / "home", bfloat16=True, budget="1 MiB")
    streamed.train(1)
    streamed.save(tmp_path / "saves")
    plain = Run(None, bfloat16=True)
    before = plain.digest()
    with pytest.raises(InputError, match=r"another optimizer: '\w+' of parameter 0 is torch.float32 and shape"):
        plain.load(tmp_path / "saves")
    assert plain.digest() == before
    ts.unstream(streamed.model)


def test_what_has_no_shape_yet_fits(tmp_path: Path) -> None:
    """Lazy modules, and extra state that grows."""

    class Grows(nn.Linear):
        history = torch.zeros(3)

        def get_extra_state(self) -> torch.Tensor:
            return self.history

        def set_extra_state(self, state: torch.Tensor) -> None:
            self.history = state

    model = nn.Sequential(nn.Linear(2, 3), Grows(3, 3))
    model[1].history = torch.arange(5)
    ts.save(tmp_path, model=model, optimizer=SGD(model.parameters()))
    other = nn.Sequential(nn.LazyLinear(3), Grows(3, 3))
    with pytest.raises(InputError, match=r"model.0.weight has no shape yet; call the module once"):
        ts.save(tmp_path, model=other)
    ts.load(tmp_path, optimizer=SGD(other.parameters()), model=other)
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].history, torch.arange(5))


def test_what_refuses_its_state_itself_does_so_first(tmp_path: Path) -> None:
    """Before models and optimizers change."""

    class Picky:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: Any) -> None:
            raise KeyError("picky")

    class Closed(nn.Module):
        def get_extra_state(self) -> Any:
            return 1

        def set_extra_state(self, state: Any) -> None:
            raise KeyError("closed")

    for part, match in ((Picky(), "picky"), (Closed(), "closed")):
        model = network()
        saved(tmp_path, model=model, optimizer=trained(model, ADAMW(model.parameters())), picky=part)
        other = network()
        parts: dict[str, Any] = {"model": other, "optimizer": ADAMW(other.parameters()), "picky": part}
        before, random = states(parts), torch.get_rng_state()
        with pytest.raises(KeyError, match=match):
            ts.load(tmp_path, **parts)
        assert same(states(parts), before)
        assert torch.equal(torch.get_rng_state(), random)
