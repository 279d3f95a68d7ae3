"""Everyday training on a device, beside plain PyTorch: what people do, and what they read right afterwards.

A scenario takes a device and returns pairs of tensors: what plain PyTorch gave, and what tapestream gave in its place.
They are to be equal, bit for bit. Plain PyTorch always goes first and is done before ours begins. Ours is issued behind
long kernels, so that the host is far ahead of the device, and is read without waiting for anything: a copy that nobody
waits for, or memory that is reused too early, shows. Where users compute on the host (an optimizer of their own, an
average of weights), plain PyTorch does so on copies that lie where ours lie: both then run the same kernels.

Imported by `test_scenarios.py` and by `benchmarks.gpu.first_contact`; needs nothing but torch and tapestream.
"""

import copy
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import tapestream as ts
from tapestream.accelerator.memory import workspaces_nbytes

Pairs = list[tuple[Tensor | None, Tensor | None]]
Scenario = Callable[[str], Pairs]
Seen = list[Tensor | None]
Training = tuple[nn.Module, Any]
"""A model and its optimizer."""

WIDTH = 128
_D, _H, _K = ts.Tier.DEVICE, ts.Tier.HOST, ts.Tier.DISK
MACHINE = ts.Machine(
    links={(_H, _D): ts.Link(2e9), (_D, _H): ts.Link(2e9), (_K, _H): ts.Link(1e9), (_H, _K): ts.Link(1e9)}
)
"""Speeds are given, so that plans are the same on every machine."""
TRAINING, GRADIENTS = "1000 KiB", "600 KiB"
"""Budgets for AdamW and for gradients alone, of a network that takes 2,096 and 1,048 KiB: blocks come and go."""


def unequal(pairs: Pairs) -> list[str]:
    """What differs, in words; empty where every bit is the same."""
    found = []
    for number, (plain, ours) in enumerate(pairs):
        if plain is None and ours is None:
            continue
        if plain is None or ours is None:
            found.append(f"{number}: there is only {'ours' if plain is None else 'that of plain PyTorch'}")
        elif plain.shape != ours.shape or plain.dtype != ours.dtype:
            found.append(f"{number}: {tuple(plain.shape)} {plain.dtype} became {tuple(ours.shape)} {ours.dtype}")
        elif not torch.equal(plain, ours):
            most = (plain.double() - ours.double()).abs().max().item()
            found.append(f"{number}: {tuple(plain.shape)} differs by up to {most:.3g}")
    return found


# What is trained


class Net(nn.Module):
    """Blocks between two layers that are no blocks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(WIDTH, WIDTH), inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to (rows, WIDTH)."""
        out: Tensor = self.last(self.blocks(self.first(x)))
        return out


class Scaled(nn.Module):
    """Multiplies with a scalar that lies on the CPU and is saved for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(WIDTH, WIDTH), torch.tensor(1.5)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return torch.tanh(self.linear(x)) * self.factor


class Force(nn.Module):
    """A step along the gradient of an energy, which it asks autograd for, as force fields do."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        return x - 0.1 * slope(lambda at: torch.tanh(self.energy(at)).square().sum(), x)


def slope(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of ``energy`` at ``x``, itself differentiable."""
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(energy(at), at, create_graph=torch.is_grad_enabled())
    return found


def blocks(count: int = 6, dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    """Layers of WIDTH x WIDTH, with the same bits every time."""
    torch.manual_seed(0)
    layers = []
    for _ in range(count):
        parts = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH) if norm else nn.GELU(), nn.Dropout(dropout)]
        layers.append(nn.Sequential(*parts))
    return nn.Sequential(*layers)


def network(dropout: float = 0.0, norm: bool = False) -> Net:
    """A network on the CPU, with the same bits every time."""
    inner = blocks(dropout=dropout, norm=norm)
    torch.manual_seed(0)
    return Net(inner)


def batch(device: str, scale: float = 1.0, rows: int = 32) -> Tensor:
    """The same numbers every time."""
    return (scale * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(5))).to(device)


def streamed(
    device: str,
    budget: str | int | ts.Budget = GRADIENTS,
    model: nn.Module | None = None,
    streams: int = 1,
    **options: Any,
) -> nn.Module:
    """The same network, its blocks at home in host memory unless ``options`` say otherwise. The budget is for what is
    its own: workspaces of products, which a GPU has and the network is small beside, come on top. ``streams``: in
    which it runs; forward and backward have a workspace each, in each other stream one of them runs."""
    options = {"home": "host", "machine": MACHINE, **options}
    budget = ts.Budget.of(budget)
    assert budget.device_nbytes is not None
    workspaces = workspaces_nbytes(torch.device(device)) * (streams + 1) // 2
    budget = budget.with_device(budget.device_nbytes + workspaces)
    return ts.stream(network() if model is None else model, device=device, budget=budget, **options)


# How it is trained, and what is read


LONG = 60_000_000
"""Cycles of a device, about 40 ms."""


def busy(device: str) -> None:
    """Keep the device busy: whoever waits for nothing overtakes it."""
    module = torch.get_device_module(device)
    with module.device(device):
        module._sleep(LONG)


def differentiate(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """One forward and backward, each behind a long kernel; the loss."""
    busy(str(x.device))
    loss = model(x).square().mean()
    busy(str(x.device))
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Any, device: str, steps: int = 3) -> None:
    """Whole steps, the random numbers of dropout from the same seed on."""
    x = batch(device)  # copied from ordinary memory, which waits: before the device is busy
    torch.manual_seed(7)
    for _ in range(steps):
        differentiate(model, x)
        optimizer.step()
        optimizer.zero_grad()


def plain_training(device: str, model: nn.Module | None = None) -> Training:
    """Plain PyTorch with AdamW."""
    model = (network() if model is None else model).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def our_training(device: str, model: nn.Module | None = None, update: str = "step", **options: Any) -> Training:
    """The same, streamed."""
    model = streamed(device, options.pop("budget", TRAINING), model, **options)
    return model, ts.optimizer(model, torch.optim.AdamW, lr=1e-2, update=update, master=None)


def trainings(device: str) -> Iterator[Training]:
    """First plain PyTorch's, then ours, which is not made before that one has ended."""
    yield plain_training(device)
    yield our_training(device)


def models(device: str, budget: str | ts.Budget = GRADIENTS, streams: int = 1) -> Iterator[nn.Module]:
    """The same without an optimizer."""
    yield network().to(device)
    yield streamed(device, budget, streams=streams)


def compared(found: Iterable[Sequence[Tensor | None]]) -> Pairs:
    """What plain PyTorch gave beside what ours gave."""
    plain, ours = found
    return list(zip(plain, ours, strict=True))


def seen(tensors: Iterable[Tensor | None]) -> Seen:
    """Copies of what the host sees now. What lies on the device is read last, since reading it waits."""
    now = list(tensors)
    at_home = {i: t.detach().clone() for i, t in enumerate(now) if t is not None and t.device.type == "cpu"}
    return [None if t is None else at_home[i] if i in at_home else t.detach().cpu() for i, t in enumerate(now)]


def weights(model: nn.Module) -> Seen:
    """The parameters as the user finds them now."""
    return seen(model.parameters())


def gradients(model: nn.Module) -> Seen:
    """What the user finds in ``.grad`` now."""
    return seen(p.grad for p in model.parameters())


def state(model: nn.Module) -> Seen:
    """What ``state_dict()`` holds now."""
    return seen(model.state_dict().values())


def moments(model: nn.Module, optimizer: Any) -> Seen:
    """Those of AdamW now, parameter by parameter; None where there are none."""
    found, count = optimizer.state_dict()["state"], len(list(model.parameters()))
    return seen(found.get(k, {}).get(name) for k in range(count) for name in ("exp_avg", "exp_avg_sq"))


# Streamed models: read right after a step


def unstream_right_after_step(device: str) -> Pairs:
    """The model is taken back while its last update may still be on its way home."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        return weights(ts.unstream(model) if not isinstance(optimizer, torch.optim.AdamW) else model)

    return compared(run(*training) for training in trainings(device))


def state_dict_right_after_step(device: str) -> Pairs:
    """`state_dict()` is what the step made, not what was there before."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        return state(model)

    return compared(run(*training) for training in trainings(device))


def optimizer_state_right_after_step(device: str) -> Pairs:
    """So are the optimizer's moments."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        return moments(model, optimizer)

    return compared(run(*training) for training in trainings(device))


def save_right_after_step(device: str) -> Pairs:
    """A save made at once, loaded into another model."""
    plain, optimizer = plain_training(device)
    train(plain, optimizer, device)
    expected = state(plain) + moments(plain, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = our_training(device)
        train(model, optimizer, device)
        ts.save(folder, model=model, optimizer=optimizer)
        model, optimizer = our_training(device)
        ts.load(folder, model=model, optimizer=optimizer)
        return compared([expected, state(model) + moments(model, optimizer)])


def update_backward_dropout(device: str) -> Pairs:
    """Updates in the backward, of blocks that draw random numbers."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        return weights(model)

    plain = run(*plain_training(device, network(dropout=0.2)))
    return compared([plain, run(*our_training(device, network(dropout=0.2), update="backward"))])


def home_disk(device: str) -> Pairs:
    """Blocks at home on disk, by way of host memory."""
    plain, optimizer = plain_training(device)
    train(plain, optimizer, device)
    expected = weights(plain)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = our_training(device, home="disk", folder=folder)
        train(model, optimizer, device)
        found = weights(model)
        ts.unstream(model)
    return compared([expected, found])


def running_statistics(device: str) -> Pairs:
    """Buffers that forwards write into, read with the parameters right after a step."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        return state(model)

    plain = run(*plain_training(device, network(norm=True)))
    return compared([plain, run(*our_training(device, network(norm=True)))])


def copies_on_the_cpu(device: str) -> Pairs:
    """A copy of all weights on the CPU after each step, as people keep the best ones so far."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        kept: Seen = []
        for _ in range(3):
            train(model, optimizer, device, steps=1)
            kept += [p.detach().to("cpu", copy=True) for p in model.parameters()]
        return kept

    return compared(run(*training) for training in trainings(device))


def average_of_weights_on_the_host(device: str) -> Pairs:
    """A moving average of the weights, kept and updated on the CPU after each step."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        average = [p.detach().to("cpu", copy=True) for p in model.parameters()]
        for _ in range(3):
            train(model, optimizer, device, steps=1)
            for mean, now in zip(average, model.parameters(), strict=True):
                mean.lerp_(now.detach().cpu(), 0.1)
        return list(average)

    return compared(run(*training) for training in trainings(device))


# Streamed models: what a training run does besides


def saving_while_training_goes_on(device: str) -> Pairs:
    """A save after each step; what came later is in none of them."""
    plain, optimizer = plain_training(device)
    expected, found = [], []
    for _ in range(3):
        train(plain, optimizer, device, steps=1)
        expected += state(plain)
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = our_training(device)
        saves = []
        for _ in range(3):
            train(model, optimizer, device, steps=1)
            saves.append(ts.save(folder, keep=3, model=model, optimizer=optimizer))
        for save in saves:
            ts.load(save, model=model, optimizer=optimizer)
            found += state(model)
    return compared([expected, found])


def state_dict_loaded_in_mid_training(device: str) -> Pairs:
    """Back to the state of two steps ago, and on from there."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        kept = tree_map_only(Tensor, torch.clone, (model.state_dict(), optimizer.state_dict()))
        train(model, optimizer, device, steps=2)
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        train(model, optimizer, device, steps=2)
        return state(model) + moments(model, optimizer)

    return compared(run(*training) for training in trainings(device))


def evaluation_between_steps(device: str) -> Pairs:
    """Outputs without gradients and dropout between steps with both, none of them read before the end."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        outputs, x = [], batch(device, 2.0)
        for _ in range(3):
            train(model.train(), optimizer, device, steps=1)
            busy(device)
            with torch.no_grad():
                outputs.append(model.eval()(x))
        return weights(model) + seen(outputs)

    plain = run(*plain_training(device, network(dropout=0.2)))
    return compared([plain, run(*our_training(device, network(dropout=0.2)))])


def train_then_user_writes(device: str) -> Pairs:
    """The user clamps the weights between two steps."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.05, 0.05)
        train(model, optimizer, device, steps=1)
        return weights(model)

    return compared(run(*training) for training in trainings(device))


def learning_rate_schedule_and_losses(device: str) -> Pairs:
    """A schedule that halves the rate, and every loss printed."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        schedule, losses, x = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), [], batch(device)
        for _ in range(3):
            losses.append(torch.tensor(differentiate(model, x).item()))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        return weights(model) + losses

    return compared(run(*training) for training in trainings(device))


def gradients_zeroed_in_place(device: str) -> Pairs:
    """``zero_grad(set_to_none=False)``: gradients stay where they are, full of zeros."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        x, found = batch(device), []
        for _ in range(3):
            differentiate(model, x)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            found += gradients(model)
        return weights(model) + found

    return compared(run(*training) for training in trainings(device))


def two_models_in_turns(device: str) -> Pairs:
    """Two models with an optimizer each, one step of one and then of the other, as a generator and its critic."""

    def run(first: Training, second: Training) -> Seen:
        for _ in range(3):
            train(*first, device, steps=1)
            train(*second, device, steps=1)
        return weights(first[0]) + weights(second[0])

    plain = run(plain_training(device), plain_training(device, network(dropout=0.2)))
    return compared([plain, run(our_training(device), our_training(device, network(dropout=0.2)))])


def interrupted_by_an_error(device: str) -> Pairs:
    """A forward dies in the middle of the network; the next steps are as if it had never been."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device, steps=1)
        hook = model.blocks[3].register_forward_hook(lambda *_: 1 / 0)
        busy(device)
        try:
            model(batch(device))
        except ZeroDivisionError:
            hook.remove()
        train(model, optimizer, device, steps=2)
        return weights(model)

    return compared(run(*training) for training in trainings(device))


def inputs_from_page_locked_memory(device: str) -> Pairs:
    """Batches copied without waiting from one page-locked buffer, which is filled again once the copy has ended."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        buffer = torch.empty(32, WIDTH, pin_memory=True)
        for number in range(3):
            buffer.copy_(batch("cpu", 1.0 + number))
            busy(device)
            x = buffer.to(device, non_blocking=True)
            copied = torch.accelerator.current_stream(device).record_event()
            differentiate(model, x)
            optimizer.step()
            optimizer.zero_grad()
            copied.synchronize()
        return weights(model)

    return compared(run(*training) for training in trainings(device))


# Streamed models: gradients


def two_calls_one_backward(device: str) -> Pairs:
    """A loss of two forwards."""

    def run(model: nn.Module) -> Seen:
        x, y = batch(device), batch(device, 2.0)
        busy(device)
        loss = model(x).square().mean() + model(y).square().mean()
        busy(device)
        loss.backward()
        return gradients(model)

    return compared(run(model) for model in models(device, ts.Budget("1400 KiB", calls=2)))


def accumulate_then_cpu_clip(device: str) -> Pairs:
    """The sum of two gradients, clipped value by value where it lies."""

    def run(model: nn.Module) -> Seen:
        for x in (batch(device), batch(device, 2.0)):
            differentiate(model, x)
        found = gradients(model)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1e-4)
        return found + gradients(model)

    return compared(run(model) for model in models(device))


def gradients_read_between_micro_batches(device: str) -> Pairs:
    """The gradients of each of four micro-batches so far, then a step by their sum."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        inputs, found = [batch(device, 1.0 + number) for number in range(4)], []
        for x in inputs:
            differentiate(model, x)
            found += gradients(model)
        optimizer.step()
        return found + weights(model)

    return compared(run(*training) for training in trainings(device))


def new_batch_shape_while_gradients_accumulate(device: str) -> Pairs:
    """Micro-batches of several sizes: each brings a plan of its own while gradients lie at home."""

    def run(model: nn.Module) -> Seen:
        for rows in (32, 8, 16, 32):
            differentiate(model, batch(device, rows=rows))
        return gradients(model)

    return compared(run(model) for model in models(device))


def gradients_scaled_by_the_user(device: str) -> Pairs:
    """The user halves every gradient before the step."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        x = batch(device)
        for _ in range(3):
            differentiate(model, x)
            for p in model.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    return compared(run(*training) for training in trainings(device))


def clip_grad_norm_then_step(device: str) -> Pairs:
    """Clipping by the norm of all gradients; plain PyTorch clips copies that lie where ours do."""
    model, optimizer = our_training(device)
    expected = _clipped_where_they_lie(device, [p.device for p in model.parameters()])
    x, norms = batch(device), []
    for _ in range(3):
        differentiate(model, x)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        optimizer.zero_grad()
    return compared([expected, weights(model) + seen(norms)])


def _clipped_where_they_lie(device: str, homes: list[torch.device]) -> Seen:
    """Weights and norms of plain PyTorch after three steps."""
    model, optimizer = plain_training(device)
    x, norms = batch(device), []
    for _ in range(3):
        differentiate(model, x)
        copies = [torch.zeros_like(p, device=home) for p, home in zip(model.parameters(), homes, strict=True)]
        for p, moved in zip(model.parameters(), copies, strict=True):
            moved.grad = p.grad if p.grad is None else p.grad.to(moved.device)
        norms.append(torch.nn.utils.clip_grad_norm_(copies, 1e-3))
        for p, moved in zip(model.parameters(), copies, strict=True):
            p.grad = moved.grad if moved.grad is None else moved.grad.to(device)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model) + seen(norms)


def grad_scaler_with_gradients_on_the_host(device: str) -> Pairs:
    """float16 by autocast with a scaler, whose scale is a power of two: unscaling rounds nothing anywhere."""

    def run(model: nn.Module, optimizer: Any) -> Seen:
        kind = torch.device(device).type
        scaler, x = ts.GradScaler(kind, init_scale=256.0), batch(device)
        for _ in range(3):
            busy(device)
            with torch.autocast(kind, torch.float16):
                loss = model(x).square().mean()
            busy(device)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    return compared(run(*training) for training in trainings(device))


def own_cpu_optimizer(device: str) -> Pairs:
    """torch's own optimizer on the parameters of a streamed model, most of which lie on the CPU between steps."""
    model = streamed(device)
    homes = [p.device for p in model.parameters()]
    plain = network().to(device)
    copies = [p.detach().to(home, copy=True) for p, home in zip(plain.parameters(), homes, strict=True)]
    optimizer, x = torch.optim.SGD(copies, lr=0.1), batch(device)
    for _ in range(3):
        differentiate(plain, x)
        for p, moved in zip(plain.parameters(), copies, strict=True):
            moved.grad, p.grad = None if p.grad is None else p.grad.to(moved.device), None
        optimizer.step()
        for p, moved in zip(plain.parameters(), copies, strict=True):
            p.data.copy_(moved)
    expected, optimizer = seen(copies), torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        differentiate(model, x)
        optimizer.step()
        optimizer.zero_grad()
    return compared([expected, weights(model)])


def frozen_blocks(device: str) -> Pairs:
    """Every second block is frozen: only the others have gradients, and are updated."""

    def frozen() -> nn.Module:
        model = network()
        for block in model.blocks[::2]:
            block.requires_grad_(False)
        return model

    def run(model: nn.Module, optimizer: Any) -> Seen:
        train(model, optimizer, device)
        differentiate(model, batch(device))
        return weights(model) + gradients(model)

    return compared([run(*plain_training(device, frozen())), run(*our_training(device, frozen()))])


def forward_only_then_user_writes(device: str) -> Pairs:
    """Outputs without gradients; the user halves the weights while the device still computes with them."""

    def run(model: nn.Module) -> Seen:
        outputs, x = [], batch(device)
        with torch.no_grad():
            for _ in range(3):
                busy(device)
                outputs.append(model(x))
                for p in model.parameters():
                    p.mul_(0.5)
        return seen(outputs)

    return compared(run(model) for model in models(device))


# Streams, precision


def side_stream(device: str) -> Pairs:
    """All of our training in a stream of the user's."""
    plain, optimizer = plain_training(device)
    train(plain, optimizer, device)
    expected = weights(plain)
    with torch.Stream(device):
        model, optimizer = our_training(device, streams=2)
        train(model, optimizer, device)
        found = weights(model)
    return compared([expected, found])


def forward_in_side_stream_backward_in_default(device: str) -> Pairs:
    """The forward in a stream of the user's, the backward behind it in the default one."""

    def run(model: nn.Module) -> Seen:
        x, side = batch(device), torch.Stream(device)
        torch.accelerator.synchronize(device)
        with side:
            busy(device)
            loss = model(x).square().mean()
        torch.accelerator.current_stream(device).wait_stream(side)
        loss.backward()
        return gradients(model)

    with torch.get_device_module(device).device(device):
        return compared(run(model) for model in models(device, streams=2))


def autocast_bf16(device: str) -> Pairs:
    """bfloat16 by autocast, gradients in float32."""

    def run(model: nn.Module) -> Seen:
        x = batch(device)
        busy(device)
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = model(x).square().mean()
        busy(device)
        loss.backward()
        return gradients(model)

    return compared(run(model) for model in models(device))


def bf16_masters(device: str) -> Pairs:
    """bfloat16 weights with float32 masters, updated in the backward; plain PyTorch keeps the masters by hand."""
    plain, x = network().bfloat16().to(device), batch(device).bfloat16()
    masters = [p.detach().float() for p in plain.parameters()]
    optimizer: Any = torch.optim.AdamW(masters, lr=1e-2, fused=True)
    for _ in range(3):
        plain(x).float().square().mean().backward()
        for p, master in zip(plain.parameters(), masters, strict=True):
            master.grad, p.grad = None if p.grad is None else p.grad.float(), None
        optimizer.step()
        for p, master in zip(plain.parameters(), masters, strict=True):
            p.data.copy_(master)
    expected = weights(plain)
    model = streamed(device, "1020 KiB", network().bfloat16())
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-2, update="backward", fused=True)
    for _ in range(3):
        busy(device)
        loss = model(x).float().square().mean()
        busy(device)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return compared([expected, weights(model)])


# Chains, loops, programs


def _chained(device: str, stages: nn.Sequential, budget: str = "120 KiB") -> Pairs:
    """Gradients of two calls of a chain whose states and tapes go to host memory."""

    def run(model: Callable[[Tensor], Tensor], owner: nn.Module) -> Seen:
        x = batch(device)
        torch.manual_seed(3)
        for _ in range(2):
            differentiate(model, x)
        return gradients(owner)

    plain = stages.to(device)
    ours = copy.deepcopy(plain)
    chain = ts.Chain(list(ours), budget=budget, machine=MACHINE, home="host", planner="offload")
    return compared([run(plain, plain), run(chain, ours)])


def chain_home_host(device: str) -> Pairs:
    """Stages with dropout."""
    return _chained(device, blocks(12, dropout=0.1))


def chain_cpu_scalars_saved(device: str) -> Pairs:
    """Stages that save a scalar which lies on the CPU."""
    torch.manual_seed(0)
    return _chained(device, nn.Sequential(*[Scaled() for _ in range(10)]))


def chain_of_forces(device: str) -> Pairs:
    """Stages that ask autograd for a gradient of their own."""
    torch.manual_seed(0)
    return _chained(device, nn.Sequential(*[Force() for _ in range(8)]), "240 KiB")


def stream_of_forces(device: str) -> Pairs:
    """Blocks that ask autograd for a gradient of their own."""

    def make() -> Net:
        torch.manual_seed(0)
        return Net(nn.Sequential(*[Force() for _ in range(6)]))

    def run(model: nn.Module) -> Seen:
        differentiate(model, batch(device))
        return gradients(model)

    return compared([run(make().to(device)), run(streamed(device, "800 KiB", make()))])


def _looped(device: str, step: Callable[[Tensor, Tensor], Tensor], budget: str = "300 KiB", **options: Any) -> Pairs:
    """The gradient of the matrix in forty steps of ``step(state, matrix)``."""

    def run(matrix: Tensor, steps: Callable[[Tensor], Tensor]) -> Seen:
        differentiate(steps, batch(device))
        return seen([matrix.grad])

    def forty(state: Tensor) -> Tensor:
        for _ in range(40):
            state = step(state, plain)
        return state

    plain = nn.Parameter((0.9 * torch.eye(WIDTH)).to(device))
    ours = nn.Parameter(plain.detach().clone())
    loop = ts.Loop(lambda state: step(state, ours), budget=budget, machine=MACHINE, **options)
    return compared([run(plain, forty), run(ours, lambda state: loop(state, steps=40))])


def _tanh(state: Tensor, matrix: Tensor) -> Tensor:
    return torch.tanh(state @ matrix)


def loop(device: str) -> Pairs:
    """Forty steps on the device."""
    return _looped(device, _tanh)


def loop_folder(device: str) -> Pairs:
    """The same with a folder where restart checkpoints may go."""
    with tempfile.TemporaryDirectory() as folder:
        return _looped(device, _tanh, folder=folder)


def loop_of_forces(device: str) -> Pairs:
    """Steps that ask autograd for a gradient of their own."""

    def step(state: Tensor, matrix: Tensor) -> Tensor:
        return state - 0.1 * slope(lambda at: torch.tanh(at @ matrix).square().sum(), state)

    return _looped(device, step, "600 KiB")


def program(device: str) -> Pairs:
    """A function, three times: recorded, then following its plan."""

    def run(function: Callable[[Tensor], Tensor], owner: nn.Module) -> Seen:
        x = batch(device)
        torch.manual_seed(3)
        for _ in range(3):
            owner.zero_grad()
            differentiate(function, x)
        return gradients(owner)

    plain = blocks(12, dropout=0.1).to(device)
    ours = copy.deepcopy(plain)
    recorded = ts.Program(lambda x: ours(x), budget="200 KiB", machine=MACHINE)
    return compared([run(plain, plain), run(recorded, ours)])


def join(device: str) -> Pairs:
    """Two branches that meet in a loss."""

    def run(both: Callable[[Tensor, Tensor], Tensor], owners: nn.ModuleList) -> Seen:
        x, y = batch(device), batch(device, 2.0)
        busy(device)
        both(x, y).backward()
        return gradients(owners)

    def head(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).mean()

    plain = nn.ModuleList([blocks(4), blocks(4)]).to(device)
    ours = copy.deepcopy(plain)
    joined = ts.Join([list(branch) for branch in ours], head, budget="200 KiB", machine=MACHINE)
    return compared([run(lambda x, y: head(plain[0](x), plain[1](y)), plain), run(joined, ours)])


SCENARIOS: dict[str, Scenario] = {
    scenario.__name__: scenario
    for scenario in (
        unstream_right_after_step,
        state_dict_right_after_step,
        optimizer_state_right_after_step,
        save_right_after_step,
        update_backward_dropout,
        home_disk,
        running_statistics,
        copies_on_the_cpu,
        average_of_weights_on_the_host,
        saving_while_training_goes_on,
        state_dict_loaded_in_mid_training,
        evaluation_between_steps,
        train_then_user_writes,
        learning_rate_schedule_and_losses,
        gradients_zeroed_in_place,
        two_models_in_turns,
        interrupted_by_an_error,
        inputs_from_page_locked_memory,
        two_calls_one_backward,
        accumulate_then_cpu_clip,
        gradients_read_between_micro_batches,
        new_batch_shape_while_gradients_accumulate,
        gradients_scaled_by_the_user,
        clip_grad_norm_then_step,
        grad_scaler_with_gradients_on_the_host,
        own_cpu_optimizer,
        frozen_blocks,
        forward_only_then_user_writes,
        side_stream,
        forward_in_side_stream_backward_in_default,
        autocast_bf16,
        bf16_masters,
        chain_home_host,
        chain_cpu_scalars_saved,
        chain_of_forces,
        stream_of_forces,
        loop,
        loop_folder,
        loop_of_forces,
        program,
        join,
    )
}
"""Every scenario by its name."""
