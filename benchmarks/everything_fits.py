"""Claim (a): where everything fits, `ts.Chain` and `ts.stream` cost at most 3% over plain PyTorch.

A step is zero_grad, forward, backward; for ``stream`` AdamW too, on both sides.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.common import Row, Settings, alternate, milliseconds, same_bits, save, settings, yes
from benchmarks.networks import Case, Network, gpt, resnet, tiny_mlp

TITLE = "Step time with an ample budget, against plain PyTorch"
AMPLE = "16GiB"


def main(device: str = "cpu", name: str = "everything_fits") -> None:
    """Measure all networks."""
    chosen = settings(device, rounds=9)
    rows = (row for case, repeat in _cases(chosen) for row in measure(case, repeat, chosen))
    save(name, TITLE, chosen, rows, budget=AMPLE, optimizer="AdamW (fused) for stream, none for Chain")


def _cases(chosen: Settings) -> list[tuple[Case, int]]:
    device = chosen.device
    if chosen.quick:
        return [(gpt(2, 64, 2, 32, device), 1), (resnet(2, 4, device), 1), (tiny_mlp(10, 8, device), 2)]
    return [(gpt(6, 512, 4, 128, device), 1), (resnet(18, 32, device), 1), (tiny_mlp(100, 32, device), 20)]


def measure(case: Case, repeat: int, chosen: Settings) -> list[Row]:
    """Rows for Chain and stream."""
    plain, chained = case.network(), case.network()
    chain = ts.Chain(list(chained.blocks), budget=AMPLE)
    pair = {"plain": stepper(plain, case, None), "ts.Chain": stepper(chained, case, None, chain)}
    rows = [_row("ts.Chain", case, pair, plain, chained, repeat, chosen)]

    plain, streamed = case.network(), case.network()
    home = "host" if case.device == "cuda" else "device"
    ts.stream(streamed, device=case.device, budget=AMPLE, home=home)
    optimizer = ts.optimizer(streamed, torch.optim.AdamW, fused=True)
    ours = stepper(streamed, case, optimizer)
    pair = {"plain": stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True)), "ts.stream": ours}
    rows.append(_row("ts.stream", case, pair, plain, streamed, repeat, chosen))
    ts.unstream(streamed)
    return rows


def stepper(
    network: Network,
    case: Case,
    optimizer: torch.optim.Optimizer | None,
    run_blocks: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[], None]:
    """One training step as a function."""
    x, targets = case.batch()

    def step() -> None:
        network.zero_grad()
        loss = network(x, targets) if run_blocks is None else network.loss(x, targets, run_blocks)
        loss.backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _row(
    api: str,
    case: Case,
    pair: dict[str, Callable[[], None]],
    plain: nn.Module,
    ours: nn.Module,
    repeat: int,
    chosen: Settings,
) -> Row:
    timings = alternate(pair, chosen.rounds, chosen.device, repeat=repeat, warm=2)
    equal = same_bits([p.grad for p in plain.parameters()], [p.grad for p in ours.parameters()])
    equal = equal and same_bits(list(plain.parameters()), list(ours.parameters()))
    found = timings.ratio(api, "plain")
    return {
        "network": case.name, "with": api, "plain ms": milliseconds(timings.seconds("plain")),
        "ms": milliseconds(timings.seconds(api)), **found, "claim": "at most 1.03", "met": yes(found["ratio"] <= 1.03),
        "same bits": yes(equal),
    }  # fmt: skip


if __name__ == "__main__":
    main()
