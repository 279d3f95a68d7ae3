"""Streams and events order work, and nothing else does: a paused stream makes certain what is luck on a GPU."""

import pytest
import torch

from simulated_gpu import Simulator


def test_the_host_goes_on_while_the_device_works(simulator: Simulator) -> None:
    x = torch.ones(1000, device="cuda")
    event = torch.cuda.Event()
    with simulator.paused():
        y = torch.nn.functional.layer_norm(x * 2 @ torch.ones(1000, 3, device="cuda"), (3,))
        event.record()
        assert not event.query()
    event.synchronize()
    assert event.query()
    assert y.shape == (3,)


def test_waiting_for_a_paused_stream_is_refused(simulator: Simulator) -> None:
    x = torch.ones(3, device="cuda")
    with simulator.paused():
        y = x + 1
        with pytest.raises(RuntimeError, match="paused"):
            y.sum().item()


def test_streams_run_beside_each_other(simulator: Simulator) -> None:
    other = torch.cuda.Stream()
    x = torch.ones(100, device="cuda")
    torch.cuda.synchronize()
    with simulator.paused():
        waiting = x + 1
        with torch.cuda.stream(other):
            y = x * 3
        with torch.cuda.stream(other):
            assert y.sum().item() == 300
    assert waiting.sum().item() == 200


@pytest.mark.parametrize("waits", [False, True])
def test_a_missing_wait_shows(simulator: Simulator, waits: bool) -> None:
    copies = torch.cuda.Stream()
    host = torch.empty(1 << 16).pin_memory()
    device = torch.zeros(1 << 16, device="cuda")
    torch.cuda.synchronize()
    with simulator.paused():
        device.fill_(7)
        with torch.cuda.stream(copies):
            if waits:
                copies.wait_stream(torch.cuda.default_stream())
            host.copy_(device, non_blocking=True)
        if not waits:
            copies.synchronize()
    copies.synchronize()
    assert bool((host == 7).all()) is waits


def test_contexts_of_streams_nest(simulator: Simulator) -> None:
    first, second = torch.cuda.Stream(), torch.Stream(device="cuda")
    with torch.cuda.stream(first):
        assert torch.cuda.current_stream() == first
        with second:
            assert torch.accelerator.current_stream() == second
        assert torch.accelerator.current_stream() == first
    assert torch.cuda.current_stream() == torch.cuda.default_stream()


def test_events_of_two_devices(simulator: Simulator) -> None:
    x = torch.zeros(4, device="cuda:0")
    torch.cuda.synchronize(0)
    with simulator.paused(torch.cuda.default_stream(0)):
        x.fill_(5)
        y = x.to("cuda:1", non_blocking=True) * 2
        assert not torch.cuda.default_stream(1).query()
    assert y.tolist() == [10] * 4
    assert torch.cuda.current_device() == 0


def test_backward_runs_on_a_thread_of_the_device(simulator: Simulator) -> None:
    x = torch.ones(3, device="cuda", requires_grad=True)
    since = torch._C._autograd._get_sequence_nr()
    gradient = torch.autograd.grad((x * x * x).sum(), x, create_graph=True)[0]
    assert gradient.grad_fn._sequence_nr() < since


def test_data_of_another_device_forgets_the_node_that_gradients_reach(simulator: Simulator) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4))
    home = parameter.data
    parameter.data = home.cuda()
    result = (torch.ones(2, 4, device="cuda") @ parameter).sum()
    parameter.data = home
    parameter.data = home.cuda()
    assert torch.autograd.grad(result, [parameter], allow_unused=True) == (None,)
