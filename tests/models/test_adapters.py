"""`models.adapters`: what is trained, and what it costs."""

import peft
import pytest
import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.outlines.outlining import outline
from tapestream.models import GPT, GPTConfig
from tapestream.models.adapters import Adapted, adapt

CONFIG = GPTConfig(3, 64, 4, vocabulary=256, context=32)


def test_an_adapter_adds_a_product_of_two() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(6, 4)))
    plain = nn.Linear(6, 4)
    plain.load_state_dict(model[0][0].state_dict())
    adapt(model, [model[0]], 2)
    layer, x = model[0][0], torch.randn(3, 6)
    assert isinstance(layer, Adapted)
    nn.init.normal_(layer.down)
    nn.init.normal_(layer.up)
    torch.testing.assert_close(layer(x), plain(x) + x @ layer.down.t() @ layer.up.t())
    assert {name for name, p in model.named_parameters() if p.requires_grad} == {"0.0.down", "0.0.up"}


def test_a_model_without_linear_layers_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(2, 2, 1), nn.Conv1d(2, 2, 1))
    with pytest.raises(InputError, match=r"have none of class nn\.Linear"):
        adapt(model, model, 4)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("rank", [4, 16])
def test_as_many_numbers_are_trained_as_by_peft(rank: int) -> None:
    ours = GPT(CONFIG)
    adapt(ours, ours.blocks, rank)
    targets = ["attention_in", "attention_out", "mlp_in", "mlp_out"]
    theirs = peft.get_peft_model(GPT(CONFIG), peft.LoraConfig(r=rank, target_modules=targets))
    counts = [sum(p.numel() for p in model.parameters() if p.requires_grad) for model in (ours, theirs)]
    assert counts[0] == counts[1]
    tokens = torch.randint(256, (2, 32))
    found = outline(ours, (tokens, tokens), moves=False)
    trained = sum(p.numel() for group in found.groups for p in group if p.requires_grad)
    assert trained == counts[0]
