"""Claim (e): batches of random lengths stay within the budget and cost at most 10% more than with plans made before.

Lengths are drawn evenly between 64 and 1,024. In each round a new `Chain` or streamed model meets every length as it
comes, then the same lengths again with all plans made; the ratio is that of the two passes. The budget holds half of
what the longest batch needs beyond parameters and gradients. Peaks are measured afterwards at the shortest, some middle
and the longest lengths. A Chain's budget does not cover the gradients of its parameters: they go to the user.

One network is a small Mixtral: blocks of causal attention and eight experts, of which every token has two; every other
batch sends all its tokens to the same two. The profile has seen whatever came first, an even batch.

Time to the first step (the first call with its profile and plan, links measured too, backward and update) is compared
with three plain steps on that batch, measured right before it and right after, and one read of the weights from where
they live.
"""

import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
    synchronize,
    yes,
)
from benchmarks.networks import Case, Network, gpt

TITLE = "Random sequence lengths: plans made as they come, against all plans made before"
EXPERTS, HEADS = 8, 4


@dataclass(frozen=True, slots=True)
class Batch:
    """Its length, and the expert that all its tokens are sent to (None: evenly)."""

    length: int
    expert: int | None = None


Step = Callable[[Batch], None]
Peak = Callable[[Batch], int]


@dataclass(slots=True)
class Firsts:
    """Seconds of the first step of each round, and of plain steps on the same batch."""

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)


class Attention(nn.Module):
    """Causal attention with a residual around it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inputs, self.output = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        with torch.no_grad():
            self.output.weight.mul_(0.01)  # what a token is, not what is around it, says where it goes

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        parts = self.inputs(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        mixed: Tensor = self.output(found.transpose(1, 2).flatten(2))
        return x + mixed


class Experts(nn.Module):
    """Eight experts, of which each token has two, one product per expert as in Mixtral, with a residual around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, EXPERTS, bias=False)
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(EXPERTS))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, sequence, width) to the same."""
        flat = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number in range(EXPERTS):
            token, place = torch.where(chosen == number)
            if token.numel():
                found = self.down[number](F.gelu(self.up[number](flat[token])))
                out = out.index_add(0, token, found * weights[token, place, None])
        return x + out.view_as(x)


def experts(blocks: int, width: int, longest: int, device: str) -> Case:
    """Word n goes to experts n and n + 1, modulo eight: embeddings and routers share their directions."""

    def network() -> Network:
        pairs = [(Attention(width), Experts(width)) for _ in range(blocks)]
        token = nn.Embedding(256, width)
        directions, word = torch.linalg.qr(torch.randn(width, width))[0], torch.arange(256)
        with torch.no_grad():
            token.weight.mul_(0.01).add_(directions[word % EXPERTS] + 0.5 * directions[(word + 1) % EXPERTS])
            for _, routed in pairs:
                routed.router.weight.copy_(10 * directions[:EXPERTS])
        return Network(token, [nn.Sequential(*pair) for pair in pairs], nn.Linear(width, 256))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.randint(256, (1, longest)), torch.randint(256, (1, longest))

    return Case(f"Mixtral, {blocks} blocks of width {width}, {EXPERTS} experts", network, batch, device)


def main(device: str = "cpu", name: str = "random_lengths") -> None:
    """Measure Chain and stream on even tokens, and stream on skewed ones."""
    chosen = settings(device, rounds=3)
    count, longest, width = (10, 128, 64) if chosen.quick else (200, 1024, 128)
    lengths = random.Random(0).choices(range(64, longest + 1), k=count)
    even = [Batch(n) for n in lengths]
    skewed = [Batch(n, (k // 2) % EXPERTS if k % 2 else None) for k, n in enumerate(lengths)]
    dense, routed = gpt(6, width, 1, longest, device), experts(6, width, longest, device)
    below = "host" if device == "cuda" else "disk"
    runs = [(dense, even, "ts.Chain", "device"), *((dense, even, "ts.stream", h) for h in ("device", below)),
            *((routed, skewed, "ts.stream", h) for h in ("device", below))]  # fmt: skip
    rows = (measure(case, batches, chosen, api, home) for case, batches, api, home in runs)
    save(name, TITLE, chosen, rows, batches=count, lengths=f"64 to {longest}", optimizer="SGD")


def measure(case: Case, batches: list[Batch], chosen: Settings, api: str, home: str) -> Row:
    """Both passes a few times over, then peaks."""
    longest = max(batches, key=lambda b: (b.length, b.expert is not None))
    timings, firsts = Timings({"new": [], "known": []}, {"new": [], "known": []}), Firsts()
    network, read = case.network(), 0.0
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        budget = _budget(case, longest, api, home, folder)
        if home != "device":
            lower = ts.Tier.HOST if home == "host" else ts.Tier.DISK
            link = ts.measure_machine(case.device, folder).link(lower, ts.Tier.DEVICE)
            read = sum(p.nbytes for p in network.blocks.parameters()) / link.bytes_per_second
        for _ in range(chosen.rounds):
            network, step, peak = _chained(case, budget) if api == "ts.Chain" else _streamed(case, budget, home, folder)
            firsts.plain.append(_plain_seconds(case, batches[0]))

            def a_pass(step: Step = step, firsts: Firsts | None = None) -> None:
                for number, batch in enumerate(batches):
                    begin = time.perf_counter()
                    step(batch)
                    if number == 0 and firsts is not None:
                        synchronize(case.device)
                        firsts.ours.append(time.perf_counter() - begin)

            once = alternate({"new": partial(a_pass, firsts=firsts), "known": a_pass}, 1, case.device, warm=0)
            for name in timings.wall:
                timings.wall[name] += once.wall[name]
                timings.cpu[name] += once.cpu[name]
            firsts.plain.append(_plain_seconds(case, batches[0]))
            peaks = [peak(b) for b in _probes(batches)] if len(firsts.ours) == chosen.rounds else []
            if api == "ts.stream":
                ts.unstream(network)
    ratio, first = timings.ratio("new", "known"), median(firsts.ours)
    allowed = 3 * median(firsts.plain) + read
    return {
        "network": case.name, "with": api, "home": home, "budget MiB": mebibytes(budget),
        "highest peak MiB": mebibytes(max(peaks)), "within": yes(max(peaks) <= budget),
        "different lengths": len({b.length for b in batches}),
        "ms a batch, new": milliseconds(timings.seconds("new") / len(batches)),
        "ms a batch, known": milliseconds(timings.seconds("known") / len(batches)), **ratio,
        "claim": "at most 1.10", "met": yes(ratio["ratio"] <= 1.10), "first step ms": milliseconds(first),
        "3 plain steps and a read ms": milliseconds(allowed), "first met": yes(first <= allowed),
    }  # fmt: skip


def _probes(batches: list[Batch]) -> list[Batch]:
    """The shortest, some middle and the longest, skewed ones among them."""
    known = sorted(set(batches), key=lambda b: (b.length, b.expert is not None))
    found = [known[0], *known[len(known) // 6 :: len(known) // 6], known[-1]]
    return found + [Batch(b.length, 0) for b in found if any(c.expert is not None for c in batches)]


def _plain_seconds(case: Case, batch: Batch) -> float:
    """A step of plain PyTorch, the median of three after one that is not counted."""
    network = case.network()
    step = _step(network, case, network, torch.optim.SGD(network.parameters(), 1e-3))
    timings = alternate({"plain": lambda: step(batch)}, 3, case.device)
    return timings.seconds("plain")


def _budget(case: Case, longest: Batch, api: str, home: str, folder: str) -> int:
    """Half of what the longest batch needs beyond parameters and gradients, or the least that works if that is more."""
    network = case.network()
    if api == "ts.Chain":
        chain = ts.Chain(list(network.blocks), budget="16GiB")
        _chain_peak(chain, case, longest)
        assert chain.plan is not None
        return chain.plan.peak_nbytes // 2
    step = _step(network, case, network, torch.optim.SGD(network.parameters(), 1e-3))
    parameters = sum(p.nbytes for p in network.parameters())
    budget = parameters + (peak_nbytes(lambda: step(longest), case.device) - parameters) // 2 + parameters
    network, step, _ = _streamed(case, budget, home, folder)
    try:
        step(longest)
    except ts.BudgetError as error:
        budget = error.least_nbytes or budget
    ts.unstream(network)
    return budget


def _chained(case: Case, budget: int) -> tuple[Network, Step, Peak]:
    network = case.network()
    chain = ts.Chain(list(network.blocks), budget=budget)
    optimizer = torch.optim.SGD(network.parameters(), 1e-3)
    step = _step(network, case, lambda x, y: network.loss(x, y, chain), optimizer)
    return network, step, lambda b: _chain_peak(chain, case, b)


def _streamed(case: Case, budget: int, home: str, folder: str) -> tuple[Network, Step, Peak]:
    network = case.network()
    ts.stream(network, device=case.device, budget=budget, home=home, folder=folder if home == "disk" else None)
    step = _step(network, case, network, ts.optimizer(network, torch.optim.SGD, lr=1e-3))
    return network, step, lambda b: streamed_peak_nbytes(network, lambda: step(b), case.device)


def _step(
    network: Network,
    case: Case,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
) -> Step:
    x, targets = case.batch()

    def step(batch: Batch) -> None:
        network.zero_grad()
        tokens = x[:, : batch.length]
        if batch.expert is not None:
            tokens = tokens // EXPERTS * EXPERTS + batch.expert
        loss(tokens, targets[:, : batch.length]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def _chain_peak(chain: ts.Chain, case: Case, batch: Batch) -> int:
    """Bytes beyond arguments, result and the gradients of parameters at the peak of a forward and a backward."""
    tokens, _ = case.batch()
    x = case.network().before(tokens[:, : batch.length]).detach().requires_grad_()
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
