"""Who makes the host wait is counted and named."""

import pytest
import torch

from simulated_gpu import Simulator

X = [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("name", "wait"),
    [
        ("aten::_local_scalar_dense", lambda x, event: x[0].item()),
        ("aten::nonzero", lambda x, event: x.nonzero()),
        ("aten::equal", lambda x, event: torch.equal(x, x)),
        ("copy_ from the device to pageable memory", lambda x, event: x.cpu()),
        ("copy_ to the device from pageable memory", lambda x, event: torch.ones(3).cuda()),
        ("copy_ to the device", lambda x, event: x.copy_(torch.ones(3).pin_memory())),
        ("synchronize (device)", lambda x, event: torch.cuda.synchronize()),
        ("synchronize (stream)", lambda x, event: torch.cuda.current_stream().synchronize()),
        ("synchronize (event)", lambda x, event: event.synchronize()),
    ],
)
def test_each_wait_of_the_host_has_a_name_and_a_place(simulator: Simulator, name: str, wait) -> None:
    x, event = torch.tensor(X, device="cuda"), torch.cuda.Event()
    event.record()
    before = simulator.counters.numbers()["synchronisations"]
    with simulator.counters.host_synchronisations() as found:
        wait(x, event)
    assert [one.who for one in found] == [name]
    assert "in <lambda>" in found[0].stack
    assert simulator.counters.numbers()["synchronisations"] == before + 1


def test_a_training_step_needs_no_wait(simulator: Simulator) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.1), torch.nn.LayerNorm(8)).cuda()
    optimizer = torch.optim.AdamW(module.parameters())
    x, target = torch.ones(4, 8, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    with simulator.counters.host_synchronisations() as found:
        for _ in range(2):
            torch.nn.functional.cross_entropy(module(x), target).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not found, "\n".join(map(str, found))


def test_copies_are_counted_by_direction(simulator: Simulator) -> None:
    before = simulator.counters.numbers()
    x = torch.ones(3).pin_memory().to("cuda", non_blocking=True)
    y = x.to("cuda:1").clone()
    y.cpu()
    after = simulator.counters.numbers()
    names = ("copies_in", "copies_within", "copies_between", "copies_out")
    assert [after[name] - before[name] for name in names] == [1, 1, 1, 1]
