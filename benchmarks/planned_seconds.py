"""Claim: seconds that are planned from shapes alone are within a factor of 2 of those measured, whatever a model is of.

What `tapestream plan` would say of a training step with everything stored (forward and backward, no update), from the
rates that `tapestream machine` measures, beside the same step of plain PyTorch. ``products alone``: what would be
planned if only products and convolutions took time, as before.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.common import Row, Run, Settings, alternate, save, settings, yes
from benchmarks.networks import imagenet_resnet
from tapestream.costs import Machine
from tapestream.costs.rates import Rates, usual_rates
from tapestream.frontends.outlines.outline import Outline
from tapestream.frontends.outlines.outlining import outline
from tapestream.ir.actions import Tier
from tapestream.models import GPT, GPTConfig
from tapestream.planning.auto import make_plan
from tapestream.planning.measure import measure_machine

TITLE = "A step as planned from shapes alone, and as measured"
WITHIN = 2.0


class Elementwise(nn.Module):
    """A norm and a GELU, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.activation = nn.LayerNorm(width), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        """(.., width) to the same."""
        added: Tensor = x + self.activation(self.norm(x))
        return added


def elementwise(quick: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """States of 64 MiB, so large that every one lies in memory of its own."""
    rows = 64 if quick else 16384
    return nn.Sequential(*(Elementwise(1024) for _ in range(8))), (torch.randn(rows, 1024),), {}


def convolutions(quick: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """ResNet-50 on images of 224 pixels."""
    case = imagenet_resnet((3, 4, 6, 3), 64, *((1, 64) if quick else (8, 224)), "cpu")
    return case.network(), case.batch(), {}


def t5(quick: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """T5-small: an encoder and a decoder of six blocks each."""
    import transformers as hf

    config = hf.T5Config(d_model=512, num_layers=2 if quick else 6, vocab_size=8192, decoder_start_token_id=0)
    tokens = torch.randint(8192, (1, 16) if quick else (4, 256))
    return hf.T5ForConditionalGeneration(config), (), {"input_ids": tokens, "labels": tokens}


def mamba(quick: bool, tokens: int = 128) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Blocks of Mamba-130m; their scan is a loop over tokens, of which each has a gradient as large as all of them."""
    import transformers as hf

    config = hf.MambaConfig(vocab_size=8192, hidden_size=768, num_hidden_layers=2 if quick else 3, use_cache=False)
    numbers = torch.randint(8192, (1, 8) if quick else (4, tokens))
    return hf.MambaForCausalLM(config), (), {"input_ids": numbers, "labels": numbers}


def short_mamba(quick: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Tensors of 24 MiB: up to 32 MiB, the C library keeps freed memory, and the next tensor costs less than new."""
    return mamba(quick, 64)


def gpt(quick: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT of which products take most of the time."""
    tokens = torch.randint(8192, (1, 16) if quick else (4, 256))
    return GPT(GPTConfig(6, 512, 8, vocabulary=8192, context=256)), (tokens, tokens), {}


def tiny(_: bool) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A GPT of width 64, of which starting operations takes most of the time."""
    tokens = torch.randint(256, (4, 32))
    return GPT(GPTConfig(6, 64, 2, vocabulary=256, context=32)), (tokens, tokens), {}


NETWORKS = {
    "norms and GELUs, states of 64 MiB": elementwise, "ResNet-50": convolutions, "T5-small": t5,
    "Mamba, 128 tokens": mamba, "Mamba, 64 tokens": short_mamba,
    "GPT of width 512": gpt, "GPT of width 64": tiny,
}  # fmt: skip


def main() -> None:
    """Measure and write."""
    chosen = settings(rounds=7)
    machine = measure_machine(chosen.device, chosen.folder)
    rates = machine.rates(usual_rates(chosen.device))
    facts = {name: getattr(rates, name) for name in Rates.__slots__}
    save("planned_seconds", TITLE, chosen, rows(chosen, machine), **facts)


def rows(chosen: Settings, machine: Machine) -> Iterator[Row]:
    """One for each network, in a process of its own: what was freed before makes memory cheaper."""
    for name in NETWORKS:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as child:
            yield child.submit(row, name, chosen, machine).result()


def row(name: str, chosen: Settings, machine: Machine) -> Row:
    """One network, measured and planned."""
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    rates = machine.rates(usual_rates(chosen.device))
    products = replace(rates, memory_bytes_per_second=1e30, launch_seconds=0.0)
    model, args, kwargs = NETWORKS[name](chosen.quick)
    measured = alternate({name: step_of(model, args, kwargs)}, chosen.rounds, chosen.device, warm=2).seconds(name)
    found = outline(model, args, kwargs, device=chosen.device, moves=False)
    said, before = (planned(found, one) for one in (rates, products))
    off = max(said / measured, measured / said)
    return {
        "network": name, "measured, ms": round(1e3 * measured, 2), "planned, ms": round(1e3 * said, 2),
        "planned / measured": round(said / measured, 3), "products alone": round(before / measured, 4),
        "claim": f"within a factor of {WITHIN:g}", "met": yes(off <= WITHIN),
    }  # fmt: skip


def planned(found: Outline, rates: Rates) -> float:
    """Seconds of all segments with everything stored."""
    profiles = found.profiles(rates=rates, optimizer="sgd", home=Tier.DEVICE)
    return sum(make_plan(p, planner="store_all", update="step", home=Tier.DEVICE).stored_seconds for p in profiles)


def step_of(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Run:
    """Forward and backward of plain PyTorch."""
    model.train()

    def step() -> None:
        found = model(*args, **kwargs)
        loss = found if isinstance(found, Tensor) else found.loss
        loss.sum().backward()
        model.zero_grad()

    return step


if __name__ == "__main__":
    main()
