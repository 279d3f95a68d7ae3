"""What surrounds a program's operations: generators, function modes, the choice of kernels, flags of weights. A replay
finds it as it was in the first run, or is refused by name."""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from side_by_side import compare, hear_followed, least
from test_program_unseen import W, X, given, often, tight
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.errors import BudgetError, GradientError, InputError
from tapestream.executor.program.record.ambients import Ambients, surroundings
from tapestream.executor.program.record.record import Ambient
from tapestream.frontends.program.program import Program
from tapestream.runner.kernels import KERNELS, are_chosen, choose, fixed, refused


def dropped(x: torch.Tensor) -> torch.Tensor:
    return functional.dropout(torch.tanh(x @ W), 0.3)


@contextlib.contextmanager
def forked() -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    torch.set_rng_state(before)


@pytest.mark.parametrize("fork", [lambda: torch.random.fork_rng(devices=[]), forked])
def test_generators_put_back_inside(fork: Callable[[], Any]) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        with fork():
            for _ in range(24):
                x = dropped(x)
        return x

    found = compare(program, [W, X], given)
    assert found.report is not None
    assert found.report.reruns > 0


def test_a_function_that_draws_now_and_then() -> None:
    class Draws(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, draw: torch.Tensor) -> torch.Tensor:
            ctx.mask = torch.rand_like(x) if draw.item() else torch.ones_like(x)
            return x * ctx.mask

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * ctx.mask, None

    def program(x: torch.Tensor) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            for k in range(12):
                x = torch.tanh(Draws.apply(x @ W, torch.tensor(k % 4 == 3)))  # type: ignore[no-untyped-call]
        return x

    compare(program, [W, X], given)


@pytest.mark.parametrize("by", ["set_state", "manual_seed"])
def test_a_generator_set_by_its_own_method(by: str) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            before = torch.default_generator.get_state()
            x = dropped(x)
            if by == "set_state":
                torch.default_generator.set_state(before)
            else:
                torch.default_generator.manual_seed(3)
            x = dropped(x)
        return x

    with pytest.raises(GradientError, match="generator was set or drawn from"):
        tight(program)(*given()).sum().backward()
    compare(program, [W, X], given, "1MiB", planner="auto", reruns=False)


class Stretched(TorchFunctionMode):
    """Gives half as much again of every tanh."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.5 if getattr(func, "__name__", "") == "tanh" else out


def test_a_function_mode_around_the_call_alone() -> None:
    program = often(lambda x: torch.tanh(x @ W))
    gradients = []
    for run in (program, tight(program)):
        with Stretched():
            result = run(*given())
        gradients += torch.autograd.grad(result.sum(), W)
    assert torch.equal(*gradients)
    assert isinstance(torch.tanh(X), torch.Tensor)


def test_a_function_mode_around_backward_alone() -> None:
    program = often(lambda x: torch.tanh(x @ W))
    result, plain = tight(program)(*given()).sum(), program(*given()).sum()
    with Stretched():
        found = torch.autograd.grad(result, W)
        assert torch.equal(torch.tanh(X), torch.tanh(X.detach()))
        assert not torch.equal(torch.tanh(X), X.detach().tanh_())  # the mode is there again
    assert torch.equal(found[0], torch.autograd.grad(plain, W)[0])


def test_default_devices_around_the_call_inside_and_around_backward() -> None:
    ones = often(lambda x: torch.tanh(x @ W + torch.ones(16)))

    def program(x: torch.Tensor) -> torch.Tensor:
        x = ones(x)
        with torch.device("meta"):
            assert torch.ones(1).is_meta
            with torch.device("cpu"):
                x = ones(x)
        return x

    run, expected = tight(program), torch.autograd.grad(program(*given()).sum(), W)
    result = run(*given()).sum()
    with torch.device("meta"):
        found = torch.autograd.grad(result, W)
        assert torch.ones(1).is_meta
    assert torch.equal(found[0], expected[0])
    weight, x = torch.ones(16, 16, device="meta").requires_grad_(), torch.ones(8, 16, device="meta")

    def somewhere(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.tanh(x @ weight + torch.ones(16))
        return x

    with torch.device("meta"):
        y = Program(somewhere, budget=10 * x.nbytes, planner="revolve", device="cpu")(x)
    y.sum().backward()
    assert weight.grad is not None


def attention(x: torch.Tensor) -> torch.Tensor:
    q = (x @ W).view(1, 2, 4, 16)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.tanh(functional.scaled_dot_product_attention(q, q, q).reshape(8, 16))


def test_kernels_chosen_inside() -> None:
    before = torch.backends.cuda.flash_sdp_enabled()
    found = compare(often(attention), [W, X], given, least(often(attention), [W, X], given, 0))
    assert found.report is not None
    assert found.report.reruns > 0
    assert torch.backends.cuda.flash_sdp_enabled() == before


def test_attention_is_followed_though_its_kernel_is_chosen_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed = hear_followed(monkeypatch)

    def program(x: torch.Tensor) -> torch.Tensor:
        for k in range(12):
            backend = SDPBackend.MATH if k % (2 + torch.initial_seed() // 4) else SDPBackend.FLASH_ATTENTION
            with sdpa_kernel(backend):
                q = torch.tanh(x @ W).view(1, 2, 4, 16)
                x = torch.tanh(functional.scaled_dot_product_attention(q, q, q).reshape(8, 16) + x)
        return x

    compare(program, [W, X], given, calls=7)
    compare(program, [W, X], given, 1 << 24, calls=7, reruns=False)
    assert "scaled_dot_product_attention" in followed
    assert "tanh" in followed


@contextlib.contextmanager
def switched(switch: Callable[[Any], Any], there: Any, back: Any) -> Iterator[None]:
    switch(there)
    try:
        yield
    finally:
        switch(back)


class _Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


CHANGES: dict[str, Callable[[], Any]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast's cache": lambda: torch.autocast("cpu", enabled=False, cache_enabled=False),
    "default dtype": lambda: switched(torch.set_default_dtype, torch.float64, torch.float32),
    "deterministic": lambda: switched(torch.use_deterministic_algorithms, True, False),
    "warnings": lambda: switched(lambda on: torch.use_deterministic_algorithms(on, warn_only=on), True, False),
    "mkldnn": lambda: switched(torch._C._set_mkldnn_enabled, False, True),
    "precision": lambda: switched(torch.set_float32_matmul_precision, "medium", "highest"),
    "convolutions": lambda: switched(partial(torch._C._set_fp32_precision_setter, "mkldnn", "conv"), "bf16", "none"),
    "nnpack": lambda: switched(torch._C._set_nnpack_enabled, False, True),
    "deterministic convolutions": lambda: switched(torch._C._set_mkldnn_deterministic, True, False),
    "threads": lambda: switched(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    "denormals": lambda: switched(torch.set_flush_denormal, True, False),
    "function mode": lambda: torch.device("meta"),
    "dispatch mode": _Dispatches,
}


PRODUCTS = ("convolutions", "nnpack", "deterministic convolutions")


@pytest.mark.parametrize("name", CHANGES)
def test_the_short_look_at_what_surrounds_an_operation_sees_all_but_choices_for_attention(name: str) -> None:
    with CHANGES[name]():
        pass  # a precision that has been set is another one than none
    ambients = Ambients([], ("cpu",))
    number = ambients.now(0)
    ambients.guard(0)
    assert ambients.hold(0, products=True)
    assert not ambients.hold(1, products=True)
    with CHANGES[name]():
        assert not ambients.hold(0, products=True)
        assert ambients.hold(0, products=False) == (name in PRODUCTS)
    assert ambients.hold(0, products=True)
    with sdpa_kernel(SDPBackend.MATH):
        assert ambients.hold(0, products=True)
        assert ambients.now(0) != number


def test_kernels_are_chosen_in_replays_as_in_the_first_run() -> None:
    seen: list[Any] = []

    def look() -> Any:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return torch.are_deterministic_algorithms_enabled(), warns, torch.backends.mkldnn.enabled

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            seen.append(look())
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 2

    program = often(lambda x: torch.tanh(Looks.apply(x @ W)))  # type: ignore[no-untyped-call]
    run, outside = tight(program), look()
    seen.clear()
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch._C._set_mkldnn_enabled(False)
    try:
        result, inside = run(*given()), look()
    finally:
        torch.use_deterministic_algorithms(False)
        torch._C._set_mkldnn_enabled(outside[2])
    assert inside != outside
    result.sum().backward()
    assert len(seen) > 10
    assert set(seen) == {inside}
    assert look() == outside


def test_all_that_chooses_kernels_can_be_asked_for_and_put_back() -> None:
    before = [get() for get, _ in KERNELS]
    for (_, put), answer in zip(KERNELS, before, strict=True):
        if put is not refused:
            put(answer)
    assert [get() for get, _ in KERNELS] == before
    chosen = [fixed(answer) for answer in before]
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    assert not are_chosen(chosen)
    choose(chosen)
    assert are_chosen(chosen)
    assert [get() for get, _ in KERNELS] == before


def test_switches_of_cudnn_are_watched_where_cuda_is_used_and_no_algorithms_are_tried_in_what_runs_again() -> None:
    found: list[Ambient] = []
    ambients = Ambients(found, ("cpu", "cuda"))
    first = ambients.now(0)
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True):
        second = ambients.now(0)
        assert ambients.now(0) == second != first
    assert ambients.now(0) == first
    with surroundings(found) as enter:
        enter(found[second])
        assert torch.backends.cudnn.deterministic
        assert not torch.backends.cudnn.benchmark
        enter(found[first])
        assert not torch.backends.cudnn.deterministic
    assert not torch.backends.cudnn.benchmark


@pytest.mark.parametrize("planner", ["revolve", "auto"])
def test_convolutions_are_run_again_in_the_precision_of_the_first_run(planner: str) -> None:
    weight = torch.randn(8, 8, 3, 3, generator=torch.Generator().manual_seed(0)).div(8).requires_grad_()
    image = torch.randn(2, 8, 12, 12, generator=torch.Generator().manual_seed(1))
    put = partial(torch._C._set_fp32_precision_setter, "mkldnn", "conv")

    def program(x: torch.Tensor) -> torch.Tensor:
        for _ in range(10):
            x = torch.tanh(functional.conv2d(x, weight, padding=1))
        return x.square().sum()

    def gradient(run: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with switched(put, "bf16", "none"):
            result = run(image)
        return torch.autograd.grad(result, weight)[0]

    expected = gradient(program)
    with pytest.raises(BudgetError) as refused:  # what its kernels take depends on the processor
        gradient(Program(program, budget=1, planner=planner))
    assert refused.value.least_nbytes is not None
    run = Program(program, budget=refused.value.least_nbytes * 5 // 4, planner=planner)
    for _ in range(4):
        assert torch.equal(gradient(run), expected)
        assert run.report is not None
        assert run.report.reruns > 0


def test_another_precision_in_backward_is_refused() -> None:
    result = tight(often(lambda x: torch.tanh(x @ W)))(*given()).sum()
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(GradientError, match="of float32 products"):
            result.backward()
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_replay_that_saves_tensors_of_other_shapes_is_refused() -> None:
    extra = [1]

    class Changes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.ones(extra[0]))
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 2 * ctx.saved_tensors[0].sum()

    result = tight(often(lambda x: torch.tanh(Changes.apply(x @ W))))(*given()).sum()  # type: ignore[no-untyped-call]
    extra[0] = 3
    with pytest.raises(GradientError, match="other shapes or dtypes"):
        result.backward()


def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("run", [lambda program: program, lambda program: Program(program, budget="1MiB")])
def test_saved_by_a_call_that_is_not_shown_and_written_into(run: Callable[..., Any]) -> None:
    sine = torch.jit.script(scripted)

    def program(x: torch.Tensor) -> torch.Tensor:
        z = x @ W
        y = sine(z)
        z.mul_(2)
        return y

    with pytest.raises((RuntimeError, GradientError), match=r"modified by an inplace|made by torch\.jit"):
        run(program)(*given()).sum().backward()


def test_the_last_call_fails() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ W)
        with contextlib.suppress(RuntimeError):
            y @ torch.ones(3, 3)
        return y

    compare(program, [W, X], given, "1MiB", planner="auto", reruns=False)


@pytest.mark.full
def test_very_many_tensors_saved_by_one_operation() -> None:
    class Many(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(*[x] * 66_000)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> Any:
            return g * 2

    compare(lambda x: Many.apply(x @ W), [W, X], given, "1MiB", calls=1, reruns=False)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("frozen", [True, False])
def test_weights_frozen_or_not_between_call_and_backward(frozen: bool) -> None:
    first, second = (nn.Parameter(torch.eye(16) / (k + 2)) for k in range(2))
    program = often(lambda x: torch.tanh(x @ first) @ second)
    gradients = []
    for make in (lambda: program, lambda: tight(program)):
        first.requires_grad_(frozen)
        run = make()
        result = run(*given()).sum()
        first.requires_grad_(not frozen)
        second.grad, X.grad = None, None
        result.backward()
        gradients.append((second.grad, X.grad))
    for ours, plain in zip(*gradients, strict=True):
        assert ours is not None
        assert torch.equal(ours, plain)


def frozen_encoder(**options: bool) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options).eval().requires_grad_(False)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_takes_the_fast_path_that_it_takes_in_plain_pytorch(masked: bool) -> None:
    """Modules leave it where a function mode is entered, and the numbers of both differ."""
    torch.manual_seed(0)
    encoder, attention = frozen_encoder(enable_nested_tensor=False), nn.MultiheadAttention(32, 4, batch_first=True)
    attention.eval()
    weight, x, padding = nn.Parameter(torch.eye(32)), torch.randn(2, 9, 32), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 6:] = masked

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            attended = attention(x, x, x, key_padding_mask=padding if masked else None, need_weights=False)[0]
        return torch.tanh((encoder(x, src_key_padding_mask=padding if masked else None) + attended) @ weight)

    wanted = run(x)
    assert torch.equal(Program(run, budget="1GiB")(x), wanted)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        assert not torch.equal(run(x), wanted)  # else this test shows nothing
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_by_name() -> None:
    encoder, padding = frozen_encoder(), torch.zeros(2, 9, dtype=torch.bool)
    padding[:, 7:] = True
    weight = nn.Parameter(torch.eye(32))
    with pytest.raises(InputError, match="enable_nested_tensor=False"):
        Program(lambda x: encoder(x, src_key_padding_mask=padding) @ weight)(torch.randn(2, 9, 32))
