"""Operators give the CPU's numbers, whatever the streams' threads do meanwhile, and few make the host wait."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from simulated_gpu import Simulator


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run(module: nn.Module, x: Tensor, simulator: Simulator | None = None) -> list[Tensor]:
    """The result, gradients of parameters and of the input, buffers."""
    x = x.requires_grad_(x.is_floating_point())
    result = module(x)
    result = result[0] if isinstance(result, tuple) else result
    result.float().square().sum().backward()
    found = [result.detach(), *(p.grad for p in module.parameters()), *module.buffers()]
    return [*found, x.grad] if x.requires_grad else found


def on_both(make: Callable[[], nn.Module], x: Tensor, simulator: Simulator) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    module = make().to(x.dtype if x.is_floating_point() else torch.float32)
    there = copy.deepcopy(module).cuda()
    y = x.cuda()
    with simulator.knobs(lag=200, poison=1):
        with simulator.counters.host_synchronisations() as waits:
            found = run(there, y)
        assert not waits, "\n".join(map(str, waits))
        return run(module, x.clone()), [tensor.cpu() for tensor in found]


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


EXACT = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 3)), (4, 16)),
    "layer norm": (lambda: nn.LayerNorm(16), (4, 16)),
    "rms norm": (lambda: nn.RMSNorm(16), (4, 16)),
    "group norm": (lambda: nn.GroupNorm(2, 16), (4, 16, 5)),
    "batch norm": (lambda: nn.BatchNorm1d(16), (4, 16)),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2)), (2, 4, 8, 8)),
    "by channel": (lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 8, 8)),
    "transposed": (lambda: nn.ConvTranspose2d(8, 4, 3), (2, 8, 8, 8)),
}


@pytest.mark.parametrize("name", EXACT)
def test_results_and_gradients_are_those_of_the_cpu(simulator: Simulator, name: str) -> None:
    make, shape = EXACT[name]
    host, device = on_both(make, numbers(*shape), simulator)
    for a, b in zip(host, device, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["layer norm", "rms norm", "group norm", "batch norm"])
def test_norms_of_16_bits_compute_with_32(simulator: Simulator, name: str, dtype: torch.dtype) -> None:
    make, shape = EXACT[name]
    _, device = on_both(make, numbers(*shape).to(dtype), simulator)
    module = copy.deepcopy(make())  # the same initial values: those of norms are constants
    wide = run(module, numbers(*shape).to(dtype).float())
    for a, b in zip(wide, device, strict=True):
        torch.testing.assert_close(b.float(), a.float(), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_of_16_bit_norms_have_32(simulator: Simulator, dtype: torch.dtype) -> None:
    x, weight = numbers(4, 16).to(dtype).cuda(), torch.ones(16, dtype=dtype, device="cuda")
    result, mean, deviation = torch.ops.aten.native_layer_norm(x, [16], weight, weight, 1e-5)
    assert (result.dtype, mean.dtype, deviation.dtype) == (dtype, torch.float32, torch.float32)


@pytest.mark.parametrize("make", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.filterwarnings("ignore:PyTorch was compiled without cuDNN")
def test_recurrent_networks(simulator: Simulator, make: type[nn.RNNBase], bias: bool) -> None:
    host, device = on_both(lambda: make(8, 16, 2, bias=bias), numbers(5, 2, 8), simulator)
    _, again = on_both(lambda: make(8, 16, 2, bias=bias), numbers(5, 2, 8), simulator)
    for a, b, c in zip(host, device, again, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
        assert torch.equal(b, c)


def attention(device: str, dtype: torch.dtype, heads: int = 4, **options: object) -> tuple[str, list[Tensor]]:
    made = torch.Generator().manual_seed(1)
    inputs = [torch.randn(2, h, 7, 8, generator=made).to(device, dtype).requires_grad_() for h in (4, heads, heads)]
    if options.pop("mask", False):
        options["attn_mask"] = torch.randn(2, 1, 7, 7, generator=made).to(device, dtype)
    torch.manual_seed(3)
    result = F.scaled_dot_product_attention(*inputs, enable_gqa=heads < 4, **options)
    result.float().square().sum().backward()
    return result.grad_fn.name(), [result.detach().cpu(), *(tensor.grad.cpu() for tensor in inputs)]


@pytest.mark.parametrize(
    ("dtype", "options", "kernel"),
    [
        (torch.float32, {}, "Efficient"),
        (torch.float32, {"mask": True}, "Efficient"),
        (torch.bfloat16, {}, "Flash"),
        (torch.bfloat16, {"is_causal": True}, "Flash"),
        (torch.bfloat16, {"heads": 2}, "Flash"),
        (torch.float16, {"mask": True}, "Efficient"),
    ],
)
def test_attention(simulator: Simulator, dtype: torch.dtype, options: dict[str, object], kernel: str) -> None:
    _, host = attention("cpu", dtype, **options)
    with simulator.knobs(lag=200, poison=1):
        name, device = attention("cuda", dtype, **options)
        _, again = attention("cuda", dtype, **options)
    assert kernel in name
    for a, b, c in zip(host, device, again, strict=True):
        torch.testing.assert_close(b.float(), a.float(), rtol=0.03, atol=0.03 if dtype != torch.float32 else 1e-5)
        assert torch.equal(b, c)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backward_of_attention_drops_what_forward_dropped(simulator: Simulator, dtype: torch.dtype) -> None:
    name, found = attention("cuda", dtype, dropout_p=0.4)
    assert "Flash" in name or "Efficient" in name
    # The result is linear in the values: their gradient tells it again.
    made = torch.Generator().manual_seed(1)
    _, _, value = (torch.randn(2, 4, 7, 8, generator=made).to("cuda", dtype) for _ in range(3))
    result, gradient = found[0].double(), found[3].double()
    twice = 2 * result.square().sum()
    torch.testing.assert_close((gradient * value.cpu().double()).sum(), twice, rtol=0.05, atol=0)


def test_dropout_draws_in_the_order_of_the_host(simulator: Simulator) -> None:
    def drawn(lag: int) -> list[Tensor]:
        torch.manual_seed(5)
        with simulator.knobs(lag=lag), torch.cuda.stream(torch.cuda.Stream()):
            x = torch.ones(1000, device="cuda")
            found = [F.dropout(x, 0.3), torch.rand(5, device="cuda"), torch.randperm(9, device="cuda"), x.normal_()]
            torch.cuda.synchronize()
        return [tensor.cpu() for tensor in found]

    for a, b in zip(drawn(0), drawn(500), strict=True):
        assert torch.equal(a, b)


def test_states_of_generators(simulator: Simulator) -> None:
    generator = torch.Generator("cuda")
    generator.manual_seed(4)
    state = generator.get_state()
    first = torch.randn(5, device="cuda", generator=generator)
    generator.set_state(state)
    assert torch.equal(first, torch.randn(5, device="cuda", generator=generator))
    assert generator.get_offset() == 4
    torch.cuda.manual_seed_all(3)
    with torch.random.fork_rng(devices=[0]):
        inside = torch.rand(3, device="cuda")
    assert torch.equal(inside, torch.rand(3, device="cuda"))


@pytest.mark.parametrize("way", [{"fused": True}, {"foreach": True}, {"foreach": False}])
def test_optimizers(simulator: Simulator, way: dict[str, bool]) -> None:
    torch.manual_seed(0)
    module = nn.Linear(4, 4)
    found = []
    for one in (module, copy.deepcopy(module).cuda()):
        optimizer = torch.optim.AdamW(one.parameters(), lr=0.1, **way)
        for _ in range(3):
            one(torch.ones(2, 4, device=one.weight.device)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(one.weight.detach().cpu())
    assert torch.equal(*found)


def test_a_scaler_finds_what_is_not_finite(simulator: Simulator) -> None:
    module = nn.Linear(4, 4).cuda()
    before = module.weight.detach().clone()
    optimizer, scaler = torch.optim.SGD(module.parameters(), lr=0.1), torch.amp.GradScaler("cuda", init_scale=8.0)
    scaler.scale(module(torch.full((2, 4), float("inf"), device="cuda")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(before, module.weight)


def test_two_devices_do_not_mix(simulator: Simulator) -> None:
    first, second = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match="at least two devices"):
        first + second
    with pytest.raises(RuntimeError, match="same device"):
        first.matmul(torch.ones(3))
    assert (first + torch.tensor(2.0)).tolist() == [3, 3, 3]


def test_saved_tensors_come_back_to_the_device(simulator: Simulator, tmp_path) -> None:
    torch.save(torch.arange(3, device="cuda:1"), tmp_path / "saved")
    found = torch.load(tmp_path / "saved")
    assert (found.device, found.tolist()) == (torch.device("cuda:1"), [0, 1, 2])
