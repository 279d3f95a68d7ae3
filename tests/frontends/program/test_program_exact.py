"""Programs none of which is a chain: values and gradients are those of plain autograd, bit for bit."""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from side_by_side import compare
from torch import nn
from torch.nn import functional

from tapestream.frontends.program.program import Program


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(7)
    return [nn.Parameter(torch.randn(shape, dtype=dtype) / math.sqrt(shape[0])) for shape in shapes]


def given(*tensors: torch.Tensor) -> Any:
    return lambda: tuple(t * 1.0 if t.requires_grad else t for t in tensors)


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(3)).requires_grad_()


def test_a_recursive_network_on_random_trees() -> None:
    left, right, bias = weights((16, 16), (16, 16), (16,))
    x = leaf(16)

    def program(x: torch.Tensor) -> torch.Tensor:
        def node(depth: int) -> torch.Tensor:
            if depth == 0 or random.random() < 0.2:
                return x * random.random()
            return torch.tanh(node(depth - 1) @ left + node(depth - 1) @ right + bias)

        return node(5)

    found = compare(program, [left, right, bias, x], given(x), calls=3)
    assert found.report is not None
    assert found.report.reruns > 0


def test_a_loop_that_ends_when_its_data_say_so() -> None:
    (w,) = weights((32, 32))
    x = leaf(4, 32)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        steps = 0
        while x.norm() > 0.5 and steps < 40:
            x = x - 0.1 * torch.sin(x @ w) * float(x.detach().abs().mean())
            x = x * 0.95
            steps += 1
        return x, steps

    found = compare(program, [w, x], given(x), calls=3)
    assert found.report is not None
    assert found.report.planned
    assert found.report.kept > 1


def test_an_lstm_written_with_lists() -> None:
    wx, wh, b = weights((8, 64), (16, 64), (64,))
    x = leaf(20, 3, 8)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        h, c, out = x.new_zeros(3, 16), x.new_zeros(3, 16), []
        for row in x:
            i, f, g, o = (row @ wx + h @ wh + b).chunk(4, dim=-1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        return torch.stack(out), [h, c]

    compare(program, [wx, wh, b, x], given(x))


def test_torch_lstm_takes_the_same_kernel() -> None:
    net = nn.LSTM(8, 8, num_layers=2)
    x = leaf(5, 3, 8)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = net(x)[0] + x
        return x

    compare(program, [*net.parameters(), x], given(x))


def test_a_network_with_skips_and_batch_norm_whose_buffers_move_once() -> None:
    torch.manual_seed(0)
    down = nn.ModuleList(
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)) for _ in range(4)
    )
    up = nn.ModuleList(nn.Conv2d(8, 4, 3, padding=1) for _ in range(4))
    x = leaf(2, 4, 16, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in down:
            x = block(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        for block in up:
            x = functional.interpolate(x, scale_factor=2)
            x = functional.relu(block(torch.cat([x, skips.pop()], dim=1)), inplace=True)
        return x

    compare(program, [*down.parameters(), *up.parameters(), x], given(x), modules=[down, up], calls=3)


def test_views_and_writes() -> None:
    (w,) = weights((6, 6))
    x = leaf(12, 6)

    def program(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(12, 6)
        carry = x[0]
        for t in range(12):
            carry = torch.tanh(carry @ w + x[t])
            out[t] = carry
            carry = carry.clone()
            carry[:3] *= 0.5
            carry.view(2, 3).add_(out[t].view(2, 3))
            row = out[t]
            row.mul_(1.5)
            carry.relu_()
        return out.t() + carry.unsqueeze(1)

    compare(program, [w, x], given(x), calls=3)


def test_dropout_everywhere_and_seeds_set_inside() -> None:
    (w,) = weights((16, 16))
    x = leaf(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i in range(12):
            x = functional.dropout(torch.relu(x @ w), 0.3) + functional.rrelu(x, training=True)
            if i % 5 == 2:
                torch.manual_seed(i)
            x = x + 0.1 * torch.randn_like(x)
        return x

    compare(program, [w, x], given(x), calls=3)


@pytest.mark.parametrize("cache", [True, False])
def test_autocast(cache: bool) -> None:
    torch.manual_seed(0)
    nets = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
    shared = nn.Linear(16, 16)
    x = leaf(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            for net in nets[:3]:
                x = functional.layer_norm(torch.relu(net(x)), (16,))
            for _ in range(3):
                x = torch.tanh(shared(x))
        x = x.float() @ shared.weight
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            for net in nets[3:]:
                x = functional.gelu(net(x)) + shared(x)
        return x

    compare(program, [*nets.parameters(), *shared.parameters(), x], given(x), calls=3)


def test_autocast_around_the_call() -> None:
    (w, v) = weights((16, 16), (16, 16))
    x = leaf(8, 16)
    program = lambda x: torch.tanh(x @ w) @ v @ w  # noqa: E731

    def casting(function: Any) -> Any:
        def run(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return function(x)  # type: ignore[no-any-return]

        return run

    from side_by_side import outcome, same

    expected = outcome(casting(program), [w, v, x], given(x))
    found = outcome(casting(Program(program, budget=8_000)), [w, v, x], given(x))
    assert all(map(same, found[0], expected[0]))
    assert all(map(same, found[2], expected[2]))


def test_complex_numbers() -> None:
    (w,) = weights((8, 8), dtype=torch.complex64)
    x = leaf(4, 8, dtype=torch.complex64)

    def program(x: torch.Tensor) -> Any:
        for _ in range(8):
            x = torch.fft.ifft(torch.fft.fft(x) * 0.9) @ w.conj()
            x = torch.polar(x.abs() + 0.1, x.angle()).conj()
        return x.real, x.imag, x

    compare(program, [w, x], given(x))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.scale = scale
        return torch.round(x * scale) / scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * ctx.scale, None


straight = Straight.apply


def test_a_straight_through_estimator_is_one_operation() -> None:
    (w,) = weights((16, 16))
    x = leaf(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            x = straight(torch.tanh(x @ w), 4.0 + i) + Straight.apply(x, 2.0)
        return x

    compare(program, [w, x], given(x))
    assert "apply" not in vars(torch.autograd.function._SingleLevelFunction)


def test_an_exception_caught_inside() -> None:
    (w,) = weights((16, 16))
    x = leaf(8, 16)

    def program(x: torch.Tensor) -> torch.Tensor:
        for i in range(8):
            try:
                y = torch.tanh(x @ w)
                x = y @ torch.ones(3, 3) if i % 3 == 0 else y
            except RuntimeError:
                x = x * 0.5 + y
        return x

    compare(program, [w, x], given(x))


@dataclass
class Found:
    loss: torch.Tensor
    parts: dict[str, Any]
    name: str


def test_a_dataclass_with_a_dictionary_and_what_passes_untouched() -> None:
    (w,) = weights((16, 16))
    x = leaf(8, 16)

    def program(x: torch.Tensor, *, power: int = 2) -> Found:
        y = torch.tanh(x @ w)
        mask = y > 0
        z = (y**power).sum(1)
        return Found(z.mean(), {"x": x, "mask": mask, "rows": [y[0], y[1]], "none": None}, "a")

    found = compare(program, [w, x], given(x))
    assert isinstance(found(*given(x)()), Found)


def test_a_tensor_computed_before_and_captured() -> None:
    (w,) = weights((16, 16))
    x = leaf(8, 16)
    calls = []

    def make() -> Any:
        calls.append(w.t() * 0.5)
        return (x * 1.0,)

    def program(x: torch.Tensor) -> torch.Tensor:
        captured = calls[-1]
        for _ in range(6):
            x = torch.tanh(x @ captured)
        return x

    compare(program, [w, x], make)


def test_flags_look_as_they_do_in_plain_pytorch() -> None:
    (w,) = weights((4, 4))
    seen: list[list[object]] = []

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x @ w
        with torch.no_grad():
            z = y * 2
        seen.append([y.requires_grad, y.is_leaf, z.requires_grad, y[0]._is_view(), y._version, torch.is_grad_enabled()])
        return y * z

    compare(program, [w], lambda: (torch.ones(2, 4),), calls=1, reruns=False)
    assert seen[0] == seen[1]


def test_scatter_and_gather_with_data_dependent_indices() -> None:
    x = leaf(30, 2)

    def program(x: torch.Tensor) -> torch.Tensor:
        velocity = torch.zeros_like(x)
        for _ in range(6):
            near = ((x[:, None] - x[None]).norm(dim=-1) < 0.7).nonzero()
            a, b = near[:, 0], near[:, 1]
            force = torch.zeros_like(x).index_add(0, a, torch.sin(x[b] - x[a]))
            velocity = 0.9 * velocity + 0.05 * force
            x = x + velocity
        return x

    compare(program, [x], given(x), calls=3)


def test_a_captured_counter_that_many_restart_checkpoints_share() -> None:
    (w,) = weights((4, 4))
    x, counter = leaf(4, 4), torch.zeros(4, 4)

    def make() -> Any:
        counter.zero_()
        return (x * 1.0,)

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(5):
            x = torch.tanh(x @ w)
        for _ in range(5):
            counter.add_(0.1)
            x = x * (x @ w + counter)
        return x

    for budget in (4_000, 8_000, 16_000):
        compare(program, [w, x], make, budget, calls=3)
