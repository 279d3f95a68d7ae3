"""Claim (a): where everything fits, `ts.Chain` and `ts.stream` cost at most 3% over plain PyTorch.

A step is zero_grad, forward, backward; for ``stream`` AdamW too, on both sides.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

import tapestream as ts
from benchmarks.common import Row, Settings, Workload, alternate, milliseconds, same_bits, save, settings, yes
from benchmarks.networks import Case, Network, gpt, resnet, tiny_mlp

TITLE = "Step time with an ample budget, against plain PyTorch"
AMPLE = "16GiB"


def main(device: str = "cpu", name: str = "everything_fits") -> None:
    """Measure all networks."""
    chosen = settings(device, rounds=9)
    rows = (row for case, repeat in _cases(chosen) for row in measure(case, repeat, chosen))
    save(name, TITLE, chosen, rows, budget=AMPLE, optimizer="AdamW (fused) for stream, none for Chain")


def _cases(chosen: Settings, part: int = 1) -> list[tuple[Case, int]]:
    device = chosen.device
    if chosen.quick:
        return [(gpt(2, 64, 2, 32, device), 1), (resnet(2, 4, device), 1), (tiny_mlp(10, 8, device), 2)]
    large = [(gpt(6, 512, 4 // part, 128, device), 1), (resnet(18, 32 // part, device), 1)]
    return [*large, (tiny_mlp(100, 32, device), 20)]


def measure(case: Case, repeat: int, chosen: Settings) -> list[Row]:
    """Rows for Chain and stream."""
    plain, chained = case.network(), case.network()
    pair = {"plain": stepper(plain, case, None), "ts.Chain": chain_stepper(chained, case)}
    rows = [_row("ts.Chain", case, pair, plain, chained, repeat, chosen)]

    plain, streamed = case.network(), case.network()
    ours = stream_stepper(streamed, case)
    pair = {"plain": stepper(plain, case, torch.optim.AdamW(plain.parameters(), fused=True)), "ts.stream": ours}
    rows.append(_row("ts.stream", case, pair, plain, streamed, repeat, chosen))
    ts.unstream(streamed)
    return rows


def workloads(chosen: Settings) -> Iterator[Workload]:
    """The steps of ours alone, in a quarter of the batches, where what ours adds is more of the time."""
    for case, _ in _cases(chosen, 4):
        yield Workload(f"{case.name}, ts.Chain", chain_stepper(case.network(), case))
        streamed = case.network()
        yield Workload(f"{case.name}, ts.stream", stream_stepper(streamed, case))
        ts.unstream(streamed)


def chain_stepper(network: Network, case: Case) -> Callable[[], None]:
    """One step with the blocks in a Chain."""
    return stepper(network, case, None, ts.Chain(list(network.blocks), budget=AMPLE))


def stream_stepper(network: Network, case: Case) -> Callable[[], None]:
    """One step of the network, which is streamed from here on."""
    home = "host" if case.device == "cuda" else "device"
    ts.stream(network, device=case.device, budget=AMPLE, home=home)
    return stepper(network, case, ts.optimizer(network, torch.optim.AdamW, fused=True))


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
