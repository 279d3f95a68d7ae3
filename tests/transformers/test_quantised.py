"""Weights quantised by bitsandbytes and torchao: programs and chains take them as they are, streamed models refuse.

Runs where these are installed (tried: bitsandbytes 0.50.2, torchao 0.18.0).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tapestream as ts
from tapestream.errors import BudgetError, InputError

transformers = pytest.importorskip("transformers")
KINDS = ["8 bits", "4 bits", "torchao"]
Losses = list[torch.Tensor]


def linear(kind: str, was: nn.Linear) -> nn.Module:
    """The same layer, quantised by bitsandbytes."""
    layers = pytest.importorskip("bitsandbytes").nn
    if kind == "8 bits":
        made = layers.Linear8bitLt(was.in_features, was.out_features, bias=False, has_fp16_weights=False)
    else:
        made = layers.Linear4bit(was.in_features, was.out_features, bias=False)
    made.load_state_dict(was.state_dict())
    quantised: nn.Module = made.to("cpu")
    return quantised


def llama(kind: str) -> Any:
    """A small Llama of which the blocks are quantised."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=128
    )
    model = transformers.LlamaForCausalLM(config)
    if kind == "torchao":
        quantization = pytest.importorskip("torchao.quantization")
        quantization.quantize_(model.model.layers, quantization.Int8WeightOnlyConfig())
        return model
    for parent in [module for block in model.model.layers for module in block.children()]:
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, linear(kind, child))
    return model


def adapted(kind: str) -> Any:
    """With LoRA adapters, which are trained (QLoRA)."""
    peft = pytest.importorskip("peft")
    model = llama(kind)
    model.is_loaded_in_4bit = kind == "4 bits"
    targets = ["q_proj", "v_proj", "gate_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=targets)).train()


def trained(model: nn.Module, call: Callable[..., Any]) -> Losses:
    """Losses and gradients of three steps."""
    ids = torch.randint(0, 128, (4, 64), generator=torch.Generator().manual_seed(5))
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer, found = torch.optim.AdamW(learned, lr=1e-2), Losses()
    for step in range(3):
        torch.manual_seed(step)
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in learned if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def least(model: nn.Module) -> int:
    with pytest.raises(BudgetError) as refused:
        trained(model, ts.Program(model, budget=100_000))
    assert refused.value.least_nbytes is not None
    return refused.value.least_nbytes


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks for it
@pytest.mark.parametrize("ample", [True, False])
@pytest.mark.parametrize(("make", "kind"), [(adapted, "4 bits"), (llama, "torchao")])
def test_programs(make: Callable[[str], Any], kind: str, ample: bool) -> None:
    plain, ours = make(kind), make(kind)
    run = ts.Program(ours, budget=2**30 if ample else int(1.1 * least(make(kind))))
    found, wanted = trained(ours, run), trained(plain, plain)
    assert run.report is not None
    assert bool(run.report.reruns) is not ample
    assert len(found) == len(wanted) > 6
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_chains(kind: str) -> None:
    """Before anything else has run: 8-bit layers move their scales at their first run."""
    plain, ours = llama(kind), llama(kind)
    chain = ts.Chain([block.mlp for block in ours.model.layers], budget=2**30, planner="revolve", verify=True)
    by_hand = nn.Sequential(*(block.mlp for block in plain.model.layers))
    found = []
    for call in (chain, by_hand, chain):
        x = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = call(x)
        y.square().sum().backward()
        found.append((y.detach(), x.grad))
    assert found[1][0].isfinite().all()
    for y, gradient in found:
        assert torch.equal(y, found[1][0])
        assert torch.equal(gradient, found[1][1])


@pytest.mark.parametrize("kind", KINDS)
def test_streamed_models_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"which holds more than its own dense bytes.*without quantisation"):
        ts.stream(llama(kind), budget="64MiB")
