"""Operations that write into what they are given without a name or a version that says so: their schema does."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from side_by_side import compare, least
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that this module is to move elsewhere
    from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize, MovingAverageMinMaxObserver

ATEN = torch.ops.aten
SIZE = 32
Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@torch.library.custom_op("tapestream_tests::add_mean", mutates_args={"into"})
def add_mean(x: torch.Tensor, into: torch.Tensor) -> None:
    """Its name does not say so."""
    into.add_(x.mean(0))


def with_statistics(operation: Callable[..., torch.Tensor]) -> Step:
    return lambda x, mean, var: operation(x, None, None, mean, var, True, 0.1, 1e-5)


def updated(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        torch.batch_norm_update_stats(x, mean, var, 0.1)
    return (x - mean) / (var + 1e-5).sqrt()


def noisy(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    noise = torch.zeros_like(x)
    return torch._C._nn.rrelu_with_noise(x, noise, 0.1, 0.9, True) + noise * 0.1


def custom(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    own = torch.zeros(SIZE)
    add_mean(x.detach(), own)
    add_mean(x.detach(), mean)
    return x + own.sigmoid()


STEPS: dict[str, Step] = {
    "native_batch_norm, a packet": with_statistics(lambda *given: ATEN.native_batch_norm(*given)[0]),
    "native_batch_norm, an overload": with_statistics(lambda *given: ATEN.native_batch_norm.default(*given)[0]),
    "_native_batch_norm_legit": with_statistics(lambda *given: ATEN._native_batch_norm_legit(*given)[0]),
    "batch_norm": with_statistics(lambda *given: ATEN.batch_norm.default(*given, False)),
    "instance_norm": with_statistics(lambda x, *given: ATEN.instance_norm(x[None], *given, False)[0]),
    "batch_norm_update_stats": updated,
    "rrelu_with_noise": noisy,
    "custom": custom,
}


class Stepping(nn.Module):
    """Six times the step, with buffers that it may write into."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.step, self.weight = step, nn.Parameter(torch.randn(SIZE, SIZE) / 5)
        self.register_buffer("mean", torch.zeros(SIZE))
        self.register_buffer("var", torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = torch.tanh(self.step(x @ self.weight, self.mean, self.var))
        return x


def made() -> tuple[torch.Tensor]:
    return (torch.randn(SIZE, SIZE, generator=torch.Generator().manual_seed(1)),)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("name", STEPS)
def test_the_schema_says_what_is_written_into(name: str, tight: bool) -> None:
    budget = least(Stepping(STEPS[name]), [], made, 0) if tight else 2**30
    net = Stepping(STEPS[name])
    compare(net, [net.weight], made, budget, calls=3, modules=[net], reruns=tight)


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:.*quantization:DeprecationWarning")
@pytest.mark.parametrize("tight", [True, False])
@pytest.mark.parametrize("fused", [True, False])
def test_training_with_fake_quantization(fused: bool, tight: bool) -> None:
    def quantized() -> tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor], nn.Parameter]:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(SIZE, SIZE) / 5)
        quantize = FusedMovingAvgObsFakeQuantize() if fused else FakeQuantize(MovingAverageMinMaxObserver)
        quantize(torch.zeros(2, 2))  # its scale gets its size

        def run(x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.tanh(quantize(x) @ weight)
            return x

        return quantize, run, weight

    _, run, weight = quantized()
    budget = least(run, [weight], made, 0) if tight else 2**30
    quantize, run, weight = quantized()
    compare(run, [weight], made, budget, calls=3, modules=[quantize], reruns=tight)


@pytest.mark.parametrize("size", [pytest.param(16, marks=pytest.mark.full), 48])
def test_deep_copies_of_what_a_program_makes(size: int) -> None:
    """A replay is not given the memo of the first run, whose numbers may be those of other tensors by then."""
    weight = nn.Parameter(torch.eye(size) / 2 + 0.1)

    def run(x: torch.Tensor) -> torch.Tensor:
        state = [torch.zeros(size, size) for _ in range(4)]
        for _ in range(10):
            x = torch.tanh(x @ weight)
            state = [s * 0.5 + x.detach() * (j + 1) for j, s in enumerate(state)]
            snapshot = copy.deepcopy([*state, state[0]])
            assert snapshot[-1] is snapshot[0]
            x = x + sum(s * (j + 1) for j, s in enumerate(snapshot)) / 50
            x = x * snapshot[2].sigmoid()
        return x

    def make() -> tuple[torch.Tensor]:
        return (torch.randn(size, size, generator=torch.Generator().manual_seed(1)),)

    low = least(run, [weight], make, 0)
    for budget in (low, int(1.15 * low), 2 * low):
        compare(run, [weight], make, budget, calls=3)


def test_the_default_generator_by_its_name() -> None:
    net = Stepping(lambda x, mean, var: x * torch.rand(SIZE, SIZE, generator=torch.default_generator))
    compare(net, [net.weight], made, least(net, [], made, 0), calls=3, planner="auto")
