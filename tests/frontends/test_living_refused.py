"""What a streamed model refuses by name, with what to do instead, and what it leaves as it was."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import assert_same
from living import one_process
from pairs import CASE, Pair, batch, both
from streamable import WIDTH
from streaming import everything
from torch import nn

import tapestream as ts
from tapestream.errors import InputError

__all__ = ["one_process"]  # a fixture

MOVES: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda m: m.half(),
    "dtype": lambda m: m.to(torch.bfloat16),
    "device": lambda m: m.to("meta"),
    "block": lambda m: m.blocks[0].double(),
    "container": lambda m: m.blocks.half(),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "rounded": lambda m: m._apply(lambda t: t.half().float()),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("how", MOVES)
def test_other_bytes_for_the_parameters(how: str, pair: Pair) -> None:
    before = everything(pair[1])
    with pytest.raises(InputError, match=r"of a streamed (Chained|Dense).*before stream\(\), or call tapestream.unst"):
        MOVES[how](pair[1])
    assert_same(before, everything(pair[1]))
    both(pair, lambda m, _: m(batch()).sum().backward(), steps=1)


def test_moves_to_where_the_model_is_do_nothing(pair: Pair) -> None:
    both(pair, lambda m, _: m.to("cpu").float().cpu().to("cpu:0", torch.float32)(batch()).sum().backward())


COPIES: dict[str, Callable[[nn.Module], object]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "block": lambda m: copy.deepcopy(m.blocks),
    "save": lambda m: torch.save(m, io.BytesIO()),
    "average": torch.optim.swa_utils.AveragedModel,
}


@pytest.mark.parametrize("how", COPIES)
def test_copies(how: str, pair: Pair) -> None:
    with pytest.raises(InputError, match=r"cannot be copied or pickled.*state_dict\(\), make the copy before stream"):
        COPIES[how](pair[1])


@pytest.mark.parametrize("how", ["model", "in place", "container"])
def test_compiling_the_whole(how: str, pair: Pair) -> None:
    model = pair[1]
    torch._dynamo.reset()
    if how == "in place":
        model.compile(backend="eager")
    call = torch.compile(model, backend="eager") if how == "model" else model
    if how == "container":
        model.forward = torch.compile(model.forward, backend="eager")  # as if a part of the model were compiled
    with pytest.raises(InputError, match=r"torch.compile was asked.*block.compile\(\)"):
        call(batch())


def test_processes(pair: Pair, monkeypatch: pytest.MonkeyPatch, one_process: None) -> None:
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    with pytest.raises(InputError, match=r"over 4 processes.*peers=ts.Peers"):
        nn.parallel.DistributedDataParallel(pair[1])


class Params4bit(nn.Parameter):
    """Named as the one of bitsandbytes, whose bytes mean nothing without what it keeps beside them."""


def quantised(model: Any) -> None:
    model.blocks[2].linear.weight = Params4bit(torch.zeros(8, dtype=torch.uint8), requires_grad=False)


def same_bytes(model: Any) -> None:
    model.blocks[2].linear.weight.data = model.blocks[4].linear.weight.data


def part_of_another(model: Any) -> None:
    model.blocks[1].head = nn.Parameter(model.blocks[3].linear.weight.data[2:4])


def with_code_outside(model: Any) -> None:
    model.before.weight.data = model.blocks[5].linear.weight.data


def buffer_of_a_parameter(model: Any) -> None:
    model.blocks[0].register_buffer("row", model.blocks[0].linear.weight.data[0])


def expanded(model: Any) -> None:
    model.blocks[0].scale = nn.Parameter(torch.zeros(1).expand(WIDTH))


def sparse(model: Any) -> None:
    model.blocks[0].scale = nn.Parameter(torch.eye(4).to_sparse())


REFUSED: dict[Callable[[Any], None], str] = {
    quantised: r"'linear.weight' of block 2 is a Params4bit .*\(bitsandbytes, torchao\).*without quantisation",
    same_bytes: r"'blocks.[24].linear.weight' and 'blocks.[24].linear.weight' are different tensors over the same",
    part_of_another: r"'blocks.3.linear.weight' and 'blocks.1.head' are different tensors over the same bytes",
    with_code_outside: r"'before.weight'.*are different tensors over the same bytes.*clone\(\) one of them",
    buffer_of_a_parameter: r"'blocks.0.row'.*are different tensors over the same bytes.*clone\(\) one of them",
    expanded: r"'scale' of block 0 is a Parameter whose elements share bytes.*contiguous\(\) first",
    sparse: r"'scale' of block 0 is a Parameter of layout torch.sparse_coo.*to_dense\(\)",
}


@pytest.mark.parametrize("spoil", REFUSED, ids=lambda f: f.__name__)
def test_tensors_that_alias_or_hold_more_than_their_bytes(spoil: Callable[[Any], None]) -> None:
    model = CASE.model()
    spoil(model)
    before = type(model), [p.data_ptr() if p.layout is torch.strided else 0 for p in model.parameters()]
    with pytest.raises(InputError, match=REFUSED[spoil]):
        ts.stream(model, device="cpu", budget="1 MiB")
    after = type(model), [p.data_ptr() if p.layout is torch.strided else 0 for p in model.parameters()]
    assert before == after


def test_neighbours_in_one_storage_are_fine() -> None:
    model = CASE.model()
    whole = torch.randn(2, WIDTH, WIDTH)
    for k in range(2):
        model.blocks[k].linear.weight.data = whole[k]
    plain = copy.deepcopy(model)
    ts.stream(model, device="cpu", budget="1 MiB")
    assert_same(everything(plain), everything(model))
    ts.unstream(model)


def test_data_of_another_dtype(pair: Pair) -> None:
    pair[1].blocks[0].linear.half()
    with pytest.raises(InputError, match=r"replaced by torch.float16 of shape \[16, 16\], it was torch.float32"):
        pair[1](batch()).sum().backward()


@pytest.mark.parametrize("how", [copy.deepcopy, lambda o: torch.save(o, io.BytesIO())])
def test_copies_of_the_optimizer(how: Callable[[Any], object], pair: Pair) -> None:
    with pytest.raises(InputError, match=r"optimizer of a streamed model cannot be copied.*state_dict\(\)"):
        how(pair[3])
