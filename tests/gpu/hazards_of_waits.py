"""Small runs in each of which some wait decides what comes out. Each says what went wrong: nothing, as things are.

Copies and kernels are slow and late here (`SLOW`), and fresh memory holds NaN: what is read or written too early is
seen. Where the host itself has to wait, the device is paused, and the simulator says who waits for it.
"""

import contextlib
import copy
import functools
import gc
import tempfile
from collections.abc import Callable, Iterator

import torch
from scenarios import MACHINE, batch, blocks, gradients, moments, network, our_training, streamed, weights
from simulated_gpu import Simulator
from torch import Tensor, nn

import tapestream as ts
from tapestream.accelerator.memory import page_unlock
from tapestream.accelerator.streams import timed
from tapestream.executor.doubts import Doubts
from tapestream.executor.engines.cuda import CudaEngine
from tapestream.executor.engines.protocol import CopyEngine
from tapestream.executor.engines.streams import TorchStreams
from tapestream.executor.loans import Look
from tapestream.executor.travel.parcel import Parcels
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.planning import measure
from tapestream.storage import Pool, Region

SLOW = {"lag": 60, "copy_in": 20_000, "copy_out": 20_000, "poison": 1}
Hazard = Callable[[Simulator], list[str]]
Seen = list[Tensor | None]
_DEVICE = torch.device("cuda", 0)


def differing(expected: Seen, found: Seen) -> list[str]:
    """The numbers of those that are not the same bits."""
    pairs = list(zip(expected, found, strict=True))
    return [
        f"{k} of {len(pairs)} differs"
        for k, (one, other) in enumerate(pairs)
        if (one is None) != (other is None) or (one is not None and other is not None and not torch.equal(one, other))
    ]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    """Training with two micro-batches a step."""
    x = batch("cuda")
    torch.manual_seed(7)
    for _ in range(count):
        for _ in range(2):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@functools.cache
def _trained(dropout: float) -> tuple[Tensor | None, ...]:
    """What plain PyTorch makes of the same training."""
    model = network(dropout).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer)
    return (*weights(model), *moments(model, optimizer))


def training(simulator: Simulator) -> list[str]:
    """Weights and moments are read right after a step."""
    expected = list(_trained(0.2))
    with simulator.knobs(**SLOW):
        model, optimizer = our_training("cuda", network(0.2))
        steps(model, optimizer)
        return differing(expected, weights(model) + moments(model, optimizer))


def training_from_disk(simulator: Simulator) -> list[str]:
    """The same, with blocks on disk."""
    expected = list(_trained(0.0))
    with simulator.knobs(**SLOW), tempfile.TemporaryDirectory() as folder:
        model, optimizer = our_training("cuda", network(), home="disk", folder=folder)
        steps(model, optimizer)
        found = weights(model) + moments(model, optimizer)
        ts.unstream(model)
    return differing(expected, found)


def an_error_in_the_middle(simulator: Simulator) -> list[str]:
    """A block raises while the next ones are on their way; the training then goes on."""
    expected = list(_trained(0.0))
    with simulator.knobs(**SLOW):
        model, optimizer = our_training("cuda", network())
        for _ in range(2):
            model(batch("cuda"))
        hook = model.blocks[2].register_forward_hook(lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            model(batch("cuda"))
        hook.remove()
        steps(model, optimizer)
        return differing(expected, weights(model) + moments(model, optimizer))


def chain(simulator: Simulator) -> list[str]:
    """States and tapes go to host memory and back."""
    plain = blocks(10, dropout=0.1).cuda()
    ours = copy.deepcopy(plain)

    def run(call: Callable[[Tensor], Tensor], owner: nn.Module) -> Seen:
        torch.manual_seed(3)
        for _ in range(2):
            call(batch("cuda")).square().mean().backward()
        return gradients(owner)

    expected = run(plain, plain)
    with simulator.knobs(**SLOW):
        found = run(ts.Chain(list(ours), budget="120 KiB", machine=MACHINE, home="host", planner="offload"), ours)
    return differing(expected, found)


def data_replaced(simulator: Simulator) -> list[str]:
    """Users put other tensors into parameters while the device computes with the old ones, which they hold."""
    x = batch("cuda")

    def run(model: nn.Module) -> Seen:
        found: Seen = []
        held: Seen = []
        with torch.no_grad():
            for _ in range(4):
                torch.cuda._sleep(15_000_000)
                found.append(model(x))
                held += [p.data for p in model.parameters()]
                for p in model.parameters():
                    p.data = p.data.cpu().mul(0.5).to(p.device)
        return [None if one is None else one.cpu() for one in found] + weights(model)

    expected = run(network().cuda())
    with simulator.knobs(**SLOW):
        return differing(expected, run(streamed("cuda")))


class Changing(nn.Module):
    """Uses a block twice and replaces its weight in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, WIDTH) to the same."""
        weight = self.blocks[0][0].weight
        for k in (0, 1, 0, 2):
            x = self.blocks[k](x)
            if k == 1:
                weight.data = weight.detach() * 0.5
        return x


def data_replaced_within_a_call(simulator: Simulator) -> list[str]:
    """The first copy of the block has yet to leave host memory when another weight is to be written there."""
    x = batch("cuda")

    def run(model: nn.Module) -> Seen:
        found = []
        with torch.no_grad():
            for _ in range(3):
                torch.cuda._sleep(15_000_000)
                found.append(model(x))
        return [one.cpu() for one in found]

    expected = run(Changing().cuda())
    with simulator.knobs(**SLOW):
        return differing(expected, run(streamed("cuda", "250 KiB", Changing())))


def weights_read_within_a_call(simulator: Simulator) -> list[str]:
    """Blocks that stayed on the device have just been sent home when a hook reads them there."""
    x, large = batch("cuda"), batch("cuda", rows=400)

    def run(model: nn.Module) -> Seen:
        found: Seen = []
        with torch.no_grad():
            for one in (large, x, x, x):
                model(one)
            for p in model.parameters():
                p.mul_(0.5)
            torch.cuda._sleep(15_000_000)
            hook = model.first.register_forward_hook(lambda *_: found.extend(weights(model)))
            model(large)
            hook.remove()
        return found

    expected = run(network().cuda())
    with simulator.knobs(**SLOW):
        return differing(expected, run(streamed("cuda", "1300 KiB")))


def answers_are_read_when_they_are_there(simulator: Simulator) -> list[str]:
    """Whether a block wrote into its parameters is asked on the device; who needs the answer waits for it."""
    doubts, total = Doubts(_DEVICE), torch.ones((), dtype=torch.int64, device="cuda")
    look = Look([0], [total])
    assert not doubts.has_written(0, "block 0", look, look, watched=False)
    with simulator.paused():
        doubts.call_ended()
        return _goes_on(doubts.settle)


def scaled_gradients(simulator: Simulator) -> list[str]:
    """Gradients in RAM are multiplied with a scale that comes from the device."""

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> Seen:
        scaler = ts.GradScaler("cuda", init_scale=256.0)
        for _ in range(2):
            torch.cuda._sleep(3_000_000)
            scaler.scale(model(batch("cuda")).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return weights(model)

    plain = network().cuda()
    expected = run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    with simulator.knobs(**SLOW):
        return differing(expected, run(*our_training("cuda")))


@contextlib.contextmanager
def _copy_out(simulator: Simulator, *, ended: bool = True) -> Iterator[tuple[CopyEngine, Pool, Region]]:
    """A region of host memory to which a copy is under way that ends after the block, and its engine and pool."""
    engine, pool = CudaEngine(TorchStreams(_DEVICE)), Pool(_DEVICE, folder=None, limits={}, pin=True)
    source, target = pool.allocate(Tier.DEVICE, 1 << 16), pool.allocate(Tier.HOST, 1 << 16)
    engine.wait(engine.copy(source, target))
    kept = target.memory  # whatever happens, the copy finds memory there
    try:
        with simulator.paused(engine._streams[Tier.DEVICE, Tier.HOST]):
            ticket = engine.copy(source, target)
            if ended:
                engine.wait(ticket)
            yield engine, pool, target
    finally:
        torch.cuda.synchronize()
        engine.close()
        pool.close()
        del kept


def host_computes_after_a_copy(simulator: Simulator) -> list[str]:
    """An engine is told that the CPU uses a host region to which a copy is under way."""
    with _copy_out(simulator) as (engine, _, target):
        return _goes_on(lambda: engine.compute_begins([target]))


def abandoned_copies(simulator: Simulator) -> list[str]:
    """Nothing uses a region any more when an engine has abandoned its copies."""
    with _copy_out(simulator, ended=False) as (engine, _, _):
        return _goes_on(engine.abandon)


def pages_in_use_unlocked_after_a_copy(simulator: Simulator) -> list[str]:
    """A pool is closed while a copy to one of its regions is under way."""
    with _copy_out(simulator) as (_, pool, _):
        return _goes_on(pool.close)


def idle_pages_unlocked_after_a_copy(simulator: Simulator) -> list[str]:
    """A pool gives up the memory of a region that it was given back with a copy under way."""
    with _copy_out(simulator) as (_, pool, target):
        pool.release(target)
        return _goes_on(lambda: pool.trim(Tier.HOST))


def pages_unlocked_at_the_end(simulator: Simulator) -> list[str]:
    """A pool that nobody has closed goes while a copy to one of its regions is under way: the simulator would tell."""
    engine, pool = CudaEngine(TorchStreams(_DEVICE)), Pool(_DEVICE, folder=None, limits={}, pin=True)
    source, target = pool.allocate(Tier.DEVICE, 1 << 16), pool.allocate(Tier.HOST, 1 << 16)
    with simulator.knobs(copy_out=1_000_000):
        engine.wait(engine.copy(source, target))
        assert pool._locked is not None
        try:
            pool._locked._unlock()
        except RuntimeError as error:
            torch.cuda.synchronize()
            for address in pool._locked._locked:  # or whoever gets this memory next could not lock it
                page_unlock(address, _DEVICE)
            return [str(error)]
        finally:
            torch.cuda.synchronize()
            pool._locked._locked.clear()
    return []


def _goes_on(action: Callable[[], object]) -> list[str]:
    """What is wrong where the host should wait for a device that is paused, and does not. Models that are garbage wait
    for the device before their pages are unlocked: not now."""
    gc.disable()
    try:
        action()
    except RuntimeError as error:
        if "paused" in str(error):
            return []
        raise
    finally:
        gc.enable()
    return ["the host has not waited"]


def links_are_measured(simulator: Simulator) -> list[str]:
    """A copy is timed to its end; buffers for it are not taken from under kernels that still read them."""
    nbytes, problems = 4 << 20, []
    effort = measure._Effort(0.01, nbytes, nbytes)
    with simulator.knobs(copy_in=2_000, copy_out=2_000, poison=1):
        torch.cuda.empty_cache()
        x = torch.ones(nbytes // 4, device="cuda")
        torch.cuda._sleep(60_000_000)
        y = x * 2
        del x
        links = measure._accelerator_links(_DEVICE, effort, None)
        if not bool((y == 2).all()):
            problems.append("what a kernel reads was overwritten")
        most = (1 << 20) / 2_000e-6
        problems += [f"{link.bytes_per_second} bytes a second" for link in links if link.bytes_per_second > 1.01 * most]
    return problems


def products_are_measured(simulator: Simulator) -> list[str]:
    """So is a product of matrices, here one that takes nobody's time."""
    product = torch.mm
    torch.mm = lambda left, right, out: out  # type: ignore[assignment]
    try:
        with simulator.paused():
            return _goes_on(lambda: measure._flops_per_second(_DEVICE, measure._QUICK))
    finally:
        torch.mm = product
        torch.cuda.synchronize()


def sums_are_measured(simulator: Simulator) -> list[str]:
    """So is a sum."""
    with simulator.paused():
        return _goes_on(lambda: measure._memory_bytes_per_second(_DEVICE, measure._QUICK))


def launches_are_measured(simulator: Simulator) -> list[str]:
    """And a step of small modules."""
    with simulator.paused():
        return _goes_on(lambda: measure._launch_seconds(_DEVICE, measure._QUICK))


def seconds_are_measured(simulator: Simulator) -> list[str]:
    """Events give the seconds between them when both have happened."""
    with simulator.paused():
        return _goes_on(lambda: timed(_DEVICE, lambda: torch.ones(3, device="cuda")))


def a_state_that_comes_twice(simulator: Simulator) -> list[str]:
    """What has come back is written into by who showed it first; the next one gets it once more."""
    engine, pool = CudaEngine(TorchStreams(_DEVICE)), Pool(_DEVICE, folder=None, limits={}, pin=True)
    parcels = Parcels(pool, engine)
    first, second = Value(Kind.STATE, 0), Value(Kind.STATE, 1)
    bytes_ = torch.arange(1 << 14, dtype=torch.float32, device="cuda")
    for value in (first, second):
        parcels.pack(value, [bytes_])
        parcels.start(value, Tier.DEVICE, Tier.HOST)
        parcels.wait(value, Tier.HOST)
    expected = bytes_.cpu()
    del bytes_
    with simulator.knobs(**SLOW):
        for value in (first, second):
            parcels.start(value, Tier.HOST, Tier.DEVICE)
            parcels.wait(value, Tier.DEVICE)
        (one,) = parcels.unpack(first)
        one.zero_()
        (other,) = parcels.unpack(second)
        found = other.clone().cpu()
    engine.close()
    pool.close()
    return differing([expected], [found])


HAZARDS: tuple[Hazard, ...] = (
    seconds_are_measured, host_computes_after_a_copy, abandoned_copies, pages_in_use_unlocked_after_a_copy,
    idle_pages_unlocked_after_a_copy, pages_unlocked_at_the_end, a_state_that_comes_twice,
    answers_are_read_when_they_are_there,
    products_are_measured, sums_are_measured, launches_are_measured, links_are_measured,
    data_replaced_within_a_call, weights_read_within_a_call, data_replaced,
    training, training_from_disk, chain, scaled_gradients, an_error_in_the_middle,
)  # fmt: skip
"""The quick ones first."""
