"""Claim (e): batches of random lengths stay within the budget and cost at most 10% more than with plans made before.

Lengths are drawn evenly between 64 and 1,024. In each round a new `Chain` or streamed model meets every length as it
comes, then the same lengths again with all plans made; the ratio is that of the two passes. The budget holds half of
what the longest batch needs beyond parameters and gradients. Peaks are measured afterwards at the shortest, some middle
and the longest lengths. A Chain's budget does not cover the gradients of its parameters: they go to the user.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor

import tapestream as ts
from benchmarks.common import (
    Row,
    Run,
    Settings,
    Timings,
    alternate,
    mebibytes,
    milliseconds,
    peak_nbytes,
    save,
    settings,
    streamed_peak_nbytes,
    yes,
)
from benchmarks.networks import Case, Network, gpt

TITLE = "Random sequence lengths: plans made as they come, against all plans made before"
Step = Callable[[int], None]


def main(device: str = "cpu", name: str = "random_lengths") -> None:
    """Measure Chain and stream."""
    chosen = settings(device, rounds=3)
    count, longest = (10, 128) if chosen.quick else (200, 1024)
    case = gpt(6, 64 if chosen.quick else 128, 1, longest, device)
    lengths = random.Random(0).choices(range(64, longest + 1), k=count)
    rows = (measure(case, lengths, chosen, api) for api in ("ts.Chain", "ts.stream"))
    save(name, TITLE, chosen, rows, network=case.name, batches=count, lengths=f"64 to {longest}", optimizer="SGD")


def measure(case: Case, lengths: list[int], chosen: Settings, api: str) -> Row:
    """Both passes a few times over, then peaks."""
    budget = _budget(case, max(lengths), api)
    timings = Timings({"new": [], "known": []}, {"new": [], "known": []})
    for _ in range(chosen.rounds):
        network, step, peak = (_chained if api == "ts.Chain" else _streamed)(case, budget)

        def a_pass(step: Step = step) -> None:
            for length in lengths:
                step(length)

        once = alternate({"new": a_pass, "known": a_pass}, 1, case.device, warm=0)
        for name in timings.wall:
            timings.wall[name] += once.wall[name]
            timings.cpu[name] += once.cpu[name]
    probes = sorted(set(lengths))
    peaks = [peak(n) for n in (probes[0], *probes[len(probes) // 6 :: len(probes) // 6], probes[-1])]
    if api == "ts.stream":
        ts.unstream(network)
    ratio = timings.ratio("new", "known")
    return {
        "with": api, "budget MiB": mebibytes(budget), "highest peak MiB": mebibytes(max(peaks)),
        "within": yes(max(peaks) <= budget), "different lengths": len(probes),
        "ms a batch, new": milliseconds(timings.seconds("new") / len(lengths)),
        "ms a batch, known": milliseconds(timings.seconds("known") / len(lengths)), **ratio,
        "claim": "at most 1.10", "met": yes(ratio["ratio"] <= 1.10),
    }  # fmt: skip


def _budget(case: Case, longest: int, api: str) -> int:
    network = case.network()
    if api == "ts.Chain":
        chain = ts.Chain(list(network.blocks), budget="16GiB")
        _chain_peak(chain, case, longest)
        assert chain.plan is not None
        return chain.plan.peak_nbytes // 2
    step = _step(network, case, network, torch.optim.SGD(network.parameters(), 1e-3))
    parameters = sum(p.nbytes for p in network.parameters())
    return parameters + (peak_nbytes(lambda: step(longest), case.device) - parameters) // 2 + parameters


def _chained(case: Case, budget: int) -> tuple[Network, Step, Callable[[int], int]]:
    network = case.network()
    chain = ts.Chain(list(network.blocks), budget=budget)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    step = _step(network, case, lambda x, y: network.loss(x, y, chain), optimizer)
    return network, step, lambda n: _chain_peak(chain, case, n)


def _streamed(case: Case, budget: int) -> tuple[Network, Step, Callable[[int], int]]:
    network = case.network()
    home = "host" if case.device == "cuda" else "device"
    ts.stream(network, device=case.device, budget=budget, home=home)
    step = _step(network, case, network, ts.optimizer(network, torch.optim.SGD, lr=1e-3))
    return network, step, lambda n: streamed_peak_nbytes(network, lambda: step(n), case.device)


def _step(
    network: Network,
    case: Case,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
) -> Step:
    x, targets = case.batch()

    def step(length: int) -> None:
        network.zero_grad()
        loss(x[:, :length], targets[:, :length]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _chain_peak(chain: ts.Chain, case: Case, length: int) -> int:
    """Bytes beyond arguments, result and the gradients of parameters at the peak of a forward and a backward."""
    tokens, _ = case.batch()
    x = case.network().before(tokens[:, :length]).detach().requires_grad_()
    cotangent = torch.ones_like(x)
    run: Run = lambda: _there_and_back(chain, x, cotangent)  # noqa: E731
    run()
    chain.zero_grad()
    return peak_nbytes(run, case.device) - sum(p.nbytes for p in chain.parameters())


def _there_and_back(chain: ts.Chain, x: Tensor, cotangent: Tensor) -> None:
    out = chain(x)
    root = torch.autograd.graph.get_gradient_edge(out)
    del out
    torch.autograd.backward([root], [cotangent])


if __name__ == "__main__":
    main()
