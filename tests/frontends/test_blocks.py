"""Which modules are found to be blocks, and how they may be named."""

import pytest
import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.blocks import find_blocks


def layer(width: int = 8) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, dim_feedforward=2 * width)


def tower(count: int, width: int = 8) -> nn.Module:
    return nn.ModuleDict(
        {"embed": nn.Linear(width, width), "layers": nn.ModuleList(layer(width) for _ in range(count))}
    )


class Stage(nn.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Conv2d(width, width, 3) for _ in range(count)))
        self.shrink = nn.Conv2d(width, 2 * width, 3, stride=2)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.gate = nn.Linear(8, 6)


def test_two_towers_are_two_chains() -> None:
    model = nn.ModuleDict({"one": tower(3), "two": tower(2)})
    assert find_blocks(model) == [*model["one"]["layers"], *model["two"]["layers"]]


def test_a_small_head_is_no_chain() -> None:
    model = nn.ModuleDict({"body": tower(6), "head": nn.Sequential(nn.Linear(8, 2), nn.Linear(2, 2))})
    assert find_blocks(model) == list(model["body"]["layers"])


def test_stages_of_different_width_are_opened() -> None:
    stages = nn.ModuleList([Stage(1, 2), Stage(2, 4), Stage(3, 8)])
    model = nn.ModuleDict({"stages": stages})
    assert find_blocks(model) == [conv for stage in stages for conv in stage.layers]


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Conv2d(width, width, 3), nn.BatchNorm2d(width))


def test_blocks_of_several_widths_in_one_list_are_not_opened() -> None:
    blocks = [Residual(width) for width in (2, 4, 8) for _ in range(3)]
    assert find_blocks(nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(8, 2)})) == blocks


def test_a_pair_of_body_and_head_is_opened() -> None:
    model = nn.Sequential(tower(3), nn.Linear(8, 2))
    assert find_blocks(model) == list(model[0]["layers"])


def test_stages_of_two_blocks_that_differ_are_opened() -> None:
    stages = [nn.Sequential(Stage(1, width), Stage(2, width)) for width in (2, 4, 8)]
    assert find_blocks(nn.ModuleList(stages)) == [block for stage in stages for block in stage]


def test_experts_inside_equal_layers_are_not_opened() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(Experts() for _ in range(3))})
    assert find_blocks(model) == list(model["layers"])


@pytest.mark.parametrize(
    "names",
    [
        "TransformerEncoderLayer",
        nn.TransformerEncoderLayer,
        ["two.layers", "one.layers"],
        ["one.layers", nn.TransformerEncoderLayer],
    ],
)
def test_blocks_by_class_and_by_name(names: object) -> None:
    model = nn.ModuleDict({"one": tower(3), "two": tower(2)})
    found = find_blocks(model, names)  # type: ignore[arg-type]
    assert set(found) == {*model["one"]["layers"], *model["two"]["layers"]}
    assert len(found) == 5


def test_one_block_by_its_name() -> None:
    model = tower(3)
    assert find_blocks(model, ["layers.1"]) == [model["layers"][1]]


@pytest.mark.parametrize("name", ["layer", "Conv9d", nn.LSTM])
def test_an_unknown_name_lists_the_classes(name: object) -> None:
    with pytest.raises(InputError, match=r"blocks= names '\w+', but ModuleDict has no module or class.*Linear"):
        find_blocks(tower(2), name)  # type: ignore[arg-type]


class Owner(nn.Module):
    """Holds modules under the names given."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def test_an_activation_of_all_blocks_is_no_overlap() -> None:
    activation, dropout = nn.GELU(), nn.Sequential(nn.Dropout(0.1), nn.Identity())
    blocks = [nn.Sequential(nn.Linear(8, 8), activation, dropout) for _ in range(3)]
    assert find_blocks(nn.ModuleList(blocks)) == blocks
    shared = nn.BatchNorm1d(8, affine=False)  # has buffers
    with pytest.raises(InputError, match="blocks overlap: Sequential and Sequential share a BatchNorm1d"):
        find_blocks(nn.ModuleList(nn.Sequential(nn.Linear(8, 8), shared) for _ in range(3)))


def test_what_blocks_share_is_named_with_a_way_out() -> None:
    shared = nn.ParameterDict({"bank": nn.Parameter(torch.ones(8))})
    blocks = [nn.ModuleDict({"linear": nn.Linear(8, 8), "bank": shared}) for _ in range(3)]
    with pytest.raises(InputError, match=r"share a ParameterDict, whose tensors.*give each its own"):
        find_blocks(nn.ModuleList(blocks), blocks)
    inside = blocks[0]["linear"]
    with pytest.raises(InputError, match="blocks overlap: a Linear lies inside a ModuleDict"):
        find_blocks(nn.ModuleList(blocks), [blocks[0], inside])


def test_a_list_of_one_is_found_where_no_list_has_two() -> None:
    group = nn.Sequential(nn.Linear(8, 8))
    assert find_blocks(Owner(groups=nn.ModuleList([group]), head=nn.Linear(8, 2))) == [group]
    two = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    assert find_blocks(Owner(groups=nn.ModuleList([group]), layers=two)) == list(two)


def test_lists_of_lists_are_opened() -> None:
    pairs = [nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())]) for _ in range(3)]
    model = Owner(layers=nn.ModuleList(pairs), head=nn.Linear(8, 2))
    parts = [part for pair in pairs for part in pair]
    assert find_blocks(model) == parts
    assert find_blocks(model, "layers") == parts
    assert find_blocks(model, "layers.1") == list(pairs[1])
    named = nn.ModuleList(nn.ModuleDict({"mix": nn.Linear(8, 8), "norm": nn.LayerNorm(8)}) for _ in range(3))
    assert find_blocks(named) == [part for layer in named for part in layer.children()]


class Called(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x)
        return x


def test_lists_that_can_be_called_are_blocks() -> None:
    blocks = [Called([nn.Linear(8, 8), nn.Linear(8, 8)]) for _ in range(3)]
    assert find_blocks(nn.ModuleList(blocks)) == blocks


def test_dictionaries_of_blocks() -> None:
    blocks = {f"layer{number}": layer() for number in range(3)}
    assert find_blocks(Owner(layers=nn.ModuleDict(blocks), head=nn.Linear(8, 2))) == list(blocks.values())
    towers = nn.ModuleDict({"text": Owner(layers=tower(3)), "image": Owner(layers=tower(3))})
    assert len(find_blocks(towers)) == 6


def test_two_ways_to_the_same_blocks() -> None:
    stages = [nn.Sequential(layer(), layer()) for _ in range(2)]
    blocks = [block for stage in stages for block in stage]
    model = Owner(stages=nn.ModuleList(stages), flat=nn.ModuleList(blocks), again=nn.Sequential(*blocks))
    assert sorted(map(id, find_blocks(model))) == sorted(map(id, blocks))
    assert find_blocks(model, ["flat.0", "again.3"]) == [blocks[0], blocks[3]]


def test_parts_of_an_embedding_beside_blocks_are_none() -> None:
    embedding = nn.Sequential(nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Identity())
    blocks = [layer() for _ in range(3)]
    assert find_blocks(Owner(embedding=embedding, layers=nn.ModuleList(blocks))) == blocks
