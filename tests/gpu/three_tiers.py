"""A child of `test_three_tiers`: trains a model in plain PyTorch or within three tiers, and prints what it took.

``plain``, or ``DEVICE_BYTES HOST_BYTES ALLOWED_BYTES FOLDER``: two budgets, and what the process may take beyond what
it has when training begins. The environment says how much memory the simulated GPU has.
"""

import hashlib
import json
import resource
import sys
from collections.abc import Iterator, Mapping

import psutil
import simulated_gpu

simulated_gpu.load("cuda")

import torch  # noqa: E402
from torch import nn  # noqa: E402

import tapestream as ts  # noqa: E402

BLOCKS, WIDTH, ROWS, STEPS = 24, 768, 64, 3
_NEAR, _FAR = (ts.Tier.DEVICE, ts.Tier.HOST), (ts.Tier.HOST, ts.Tier.DISK)
SPEEDS = {lane: ts.Link(1e9) for lane in (_NEAR, _NEAR[::-1], _FAR, _FAR[::-1])}


class Block(nn.Module):
    """A residual product."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, width) to the same."""
        return x + torch.tanh(self.linear(self.norm(x)))


def trained(net: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[float]:
    """The loss of each step."""
    for step in range(STEPS):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def named(nbytes: Mapping[tuple[ts.Tier, ts.Tier], int]) -> dict[str, int]:
    """By names, without what is nothing."""
    return {f"{source.name} to {target.name}": n for (source, target), n in nbytes.items() if n}


def main() -> None:
    """See above."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    found: dict[str, object] = {"nbytes": sum(p.nbytes for p in net.parameters())}
    if sys.argv[1] == "plain":
        found["losses"] = list(trained(net.cuda(), torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)))
    else:
        device, host, allowed = map(int, sys.argv[1:4])
        data = psutil.Process().memory_info().data
        resource.setrlimit(resource.RLIMIT_DATA, (data + allowed, resource.RLIM_INFINITY))
        budget, machine = ts.Budget(device, host=host), ts.Machine(SPEEDS)
        ts.stream(net, device="cuda", budget=budget, folder=sys.argv[4], machine=machine)
        optimizer, losses = ts.optimizer(net, torch.optim.AdamW, lr=1e-2), list[float]()
        for loss in trained(net, optimizer):
            losses.append(loss)
            report = ts.report(net)  # what was moved since the last one
        found |= {"losses": losses, "moved": named(report.bytes_moved)}
        found["planned"] = named(report.plan.simulation.bytes_moved)
        found["held"] = {tier.name: nbytes for tier, nbytes in report.peak_nbytes.items()}
        found["allocated"] = torch.cuda.max_memory_allocated()
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    print(json.dumps(found | {"digest": digest.hexdigest()}), flush=True)


if __name__ == "__main__":
    main()
