"""What comes back is what was saved, and may be written to."""

import copy
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import InputError
from tapestream.frontends.saving.shards import json
from tapestream.frontends.saving.state import only_copies
from tapestream.frontends.saving.tree import pack, unpack
from tapestream.models import ResNet, ResNetConfig

LARGE = 4096  # elements: beyond what is copied as it is read


def through(value: Any) -> Any:
    packed, tensors = pack(value, "value")
    return unpack(json.loads(json.dumps(packed)), tensors.__getitem__)


class Remembers(nn.Module):
    """Keeps what it is given, and writes to it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.history = nn.Linear(64, 64), torch.zeros(LARGE)

    def get_extra_state(self) -> Any:
        return {"history": self.history}

    def set_extra_state(self, state: Any) -> None:
        self.history = state["history"]
        self.history += 1


class Assigns(nn.Linear):
    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = True) -> Any:
        return super().load_state_dict(state_dict, strict=strict, assign=True)


class Halves(nn.Linear):
    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        state_dict[prefix + "weight"].mul_(0.5)
        super()._load_from_state_dict(state_dict, prefix, *others)


@pytest.mark.on_cpu("tensors are loaded to the CPU")
def test_what_is_loaded_may_be_written_to(tmp_path: Path) -> None:
    """By modules that keep what they are given, by hooks, and by those who take plain values; files do not change."""
    model = nn.ModuleDict({"remembers": Remembers(), "assigns": nn.Linear(64, 64), "halves": nn.Linear(64, 64)})
    saved = ts.save(tmp_path, model=model, values={"set": {torch.zeros(LARGE)}, "list": [torch.zeros(LARGE)]})
    before = {path: path.read_bytes() for path in saved.rglob("*.safetensors")}
    other = nn.ModuleDict({"remembers": Remembers(), "assigns": Assigns(64, 64), "halves": Halves(64, 64)})
    kept: dict[str, torch.Tensor] = {}
    other.register_load_state_dict_pre_hook(lambda module, state, *_: kept.update(state))
    values = ts.load(tmp_path, model=other)["values"]
    assert torch.equal(other["halves"].weight, model["halves"].weight / 2)
    assert torch.equal(other["remembers"].history, torch.ones(LARGE))
    for tensor in (other["remembers"].history, *kept.values(), *values["set"], *values["list"]):
        if isinstance(tensor, torch.Tensor):
            tensor.detach().add_(1)
    assert copy.deepcopy(kept["assigns.weight"]).untyped_storage().nbytes() == 64 * 64 * 4
    assert {path: path.read_bytes() for path in before} == before
    assigned = Assigns(64, 64)
    ts.save(tmp_path, model=assigned)
    ts.load(tmp_path, model=assigned)
    optimizer = torch.optim.SGD(assigned.parameters(), lr=1.0)
    assigned(torch.ones(1, 64)).sum().backward()
    optimizer.step()


@pytest.mark.on_cpu("tensors are loaded to the CPU")
def test_files_are_mapped_to_write_only_for_those_who_might() -> None:
    """Some limits count what is mapped so."""
    assert only_copies(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.LSTM(2, 2)))
    assert only_copies(ResNet(ResNetConfig.cifar(62, stages=2, width=4, group_nbytes=4096)))
    for module in (Remembers(), Assigns(2, 2), Halves(2, 2)):
        assert not only_copies(nn.Sequential(module))


class Second(nn.Module):
    """Its weight was half as large in the first version."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *others: Any) -> None:
        if local_metadata.get("version", 1) < 2:
            state_dict[prefix + "weight"] = state_dict[prefix + "weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)


@pytest.mark.on_cpu("tensors are loaded to the CPU")
def test_the_versions_of_modules_are_kept(tmp_path: Path) -> None:
    model = nn.Sequential(Second(), nn.BatchNorm1d(2))
    ts.save(tmp_path, model=model, values=model.state_dict())
    other = nn.Sequential(Second(), nn.BatchNorm1d(2))
    values = ts.load(tmp_path, model=other)["values"]
    assert torch.equal(other[0].weight, model[0].weight)
    expected = model.state_dict()._metadata  # type: ignore[attr-defined]
    assert values._metadata == expected
    assert type(values._metadata) is type(expected)
    groups = ResNet(ResNetConfig.cifar(62, stages=2, width=4, group_nbytes=4096))
    tree = json.loads((ts.save(tmp_path, model=groups) / "manifest.json").read_text())["save"]["parts"]["model"]["tree"]
    assert unpack(tree, lambda name: torch.ones(()))._metadata["bn1"] == {"version": 2}


@pytest.mark.on_cpu("tensors are loaded to the CPU")
def test_the_name_that_the_format_keeps_for_itself_is_free(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("__metadata__", torch.arange(3.0))
    model.register_buffer("__metadata___", torch.arange(4.0))
    ts.save(tmp_path, model=model, values={"__metadata__": torch.ones(9)})
    other = nn.Linear(2, 2)
    other.register_buffer("__metadata__", torch.zeros(3))
    other.register_buffer("__metadata___", torch.zeros(4))
    assert torch.equal(ts.load(tmp_path, model=other)["values"]["__metadata__"], torch.ones(9))
    assert torch.equal(other.get_buffer("__metadata__"), torch.arange(3.0))
    assert torch.equal(other.get_buffer("__metadata___"), torch.arange(4.0))


@pytest.mark.on_cpu("tensors are loaded to the CPU")
def test_views_with_another_sign_are_other_values(tmp_path: Path) -> None:
    number = torch.randn(LARGE, dtype=torch.complex64)
    plain = torch.ones(5)
    values = {
        "plain": plain, "negative": torch._neg_view(plain), "number": number, "conjugate": number.conj(),
        "imaginary": number.imag, "of conjugate": number.conj().imag, "again": number.conj().imag,
    }  # fmt: skip
    ts.save(tmp_path, values=values)
    found = ts.load(tmp_path)["values"]
    assert all(torch.equal(found[name], value) for name, value in values.items())


Pair = namedtuple("Pair", "a b")


def test_types_come_back_as_they_were_or_as_what_they_build_on() -> None:
    same = [
        OrderedDict(b=1, a=OrderedDict()), torch.Size([2, 3]), numpy.float64(0.1), numpy.longdouble(1.1), 10**5000,
        -(10**5000), numpy.array([1.0, 2.0]).astype(">f4")[0], numpy.float32("nan"),
    ]  # fmt: skip
    for value in same:
        found = through([value])[0]
        assert type(found) is type(value)
        assert found == value or found != found
    assert type(through(Pair(1, 2))) is tuple
    assert type(through(nn.Parameter(torch.ones(1)))) is torch.Tensor


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (numpy.arange(3).astype(">f4"), r"x.value is a numpy.ndarray of dtype >f4, which cannot be saved"),
        (numpy.zeros(2, numpy.longdouble), r"x.value is a numpy.ndarray of dtype <f16"),
        (numpy.ma.array([1, 2], mask=[0, 1]), r"x.value is a numpy.ma\S*MaskedArray of dtype"),
        (torch.empty(3, device="meta"), r"x.value is on the meta device"),
        (torch.nn.Linear, r"x.value is a builtins.type"),
    ],
)
def test_what_cannot_be_saved_as_it_is_is_refused(value: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=match):
        ts.save(tmp_path, x={"value": value})
    assert not list(tmp_path.iterdir())


def test_states_without_end_are_refused(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    deep: Any = ()
    for _ in range(5000):
        deep = (deep,)
    for value in (cycle, deep, {deep: 1}):
        with pytest.raises(InputError, match=r"value.* is nested more than 100 deep, or holds itself"):
            ts.save(tmp_path, value=value)
    with pytest.raises(InputError, match=r"optimizer is a builtins.type"):
        ts.save(tmp_path, optimizer=torch.optim.SGD)
    assert not list(tmp_path.iterdir())
    flat: Any = ()
    for _ in range(99):
        flat = (flat,)
    ts.save(tmp_path, value=flat)
    assert ts.load(tmp_path)["value"] == flat
