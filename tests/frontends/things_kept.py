"""Random models whose blocks keep things, and the bytes of everything that is alive while they train."""

import contextlib
import gc
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import compress
from random import Random
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils import spectral_norm, weight_norm

from tapestream.storage.meter import watch_memory

_SEEN: ContextVar[Any] = ContextVar("_SEEN", default=None)
_LOCAL = threading.local()


@dataclass
class Note:
    value: torch.Tensor | None = None


class Slotted:
    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None


class Scope:
    """A context that keeps what it is told."""

    def __init__(self) -> None:
        self.noted: torch.Tensor | None = None

    @contextlib.contextmanager
    def opened(self, value: torch.Tensor) -> Iterator[None]:
        yield
        self.noted = value.detach() + 1


class OnContext(torch.autograd.Function):
    """Keeps a tensor on its context, where no hook sees it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.factor = torch.cos(x)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> torch.Tensor:
        return cotangents[0] * ctx.factor


class Keeping(nn.Module):
    """A block that keeps things in the ways ``kinds``."""

    def __init__(self, width: int, rows: int, kinds: tuple[str, ...]) -> None:
        super().__init__()
        self.linear, self.kinds, self.width = nn.Linear(width, width), kinds, width
        self.last: Any = None
        self.graph: Any = None
        self.fresh: list[torch.Tensor] = []
        self.pair: tuple[Any, ...] = ()
        self.cleared: list[torch.Tensor] = []
        self.latest: deque[torch.Tensor] = deque(maxlen=1)
        self.store: dict[str, torch.Tensor] = {}
        self.cache: dict[Any, torch.Tensor] = {}
        self.note, self.replaced, self.slotted, self.scope = Note(), Note(), Slotted(), Scope()
        self.mask: torch.Tensor | None = None
        if "buffer" in kinds:
            self.register_buffer("state", torch.zeros(rows, width))
        if "weight_norm" in kinds:
            self.linear = weight_norm(self.linear)
        elif "spectral_norm" in kinds:
            self.linear = spectral_norm(self.linear)
        elif "pre_hook" in kinds:
            self.raw = nn.Parameter(torch.randn(width, width) / width)
            del self.linear._parameters["weight"]
            self.linear.weight = self.raw.detach().exp()
            self.linear.register_forward_pre_hook(self._make)
        if "hook" in kinds:
            self.linear.register_forward_hook(lambda module, given, made: self.store.update(hooked=made.detach()))

    def _make(self, linear: nn.Module, given: Any) -> None:
        linear.weight = torch.tanh(self.raw) * torch.exp(-self.raw) / self.width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kinds = self.kinds
        if "scope" in kinds:
            with self.scope.opened(x):
                y = torch.tanh(self.linear(x))
        else:
            y = torch.tanh(self.linear(x))
        if "context" in kinds:
            y = OnContext.apply(y)
        if "lazy" in kinds and self.mask is None:
            self.mask = torch.ones_like(y)
        if "cache" in kinds and y.shape not in self.cache:
            self.cache[y.shape] = torch.full_like(y, 0.5, requires_grad=False)
        self._keep(y)
        return y if self.mask is None else y * self.mask

    def _keep(self, y: torch.Tensor) -> None:
        kinds = self.kinds
        if "attribute" in kinds:
            self.last = y.detach() * 2
        if "graph" in kinds:
            self.graph = torch.exp(y) + 1
        if "fresh" in kinds:
            self.fresh = [y.detach() * 3]
        if "tuple" in kinds:
            self.pair = (1, y.detach() * 3)
        if "cleared" in kinds:
            self.cleared.clear()
            self.cleared.append(y.detach() * 4)
        if "deque" in kinds:
            self.latest.append(y.detach() * 5)
        if "entry" in kinds:
            self.store["entry"] = y.detach() + 2
        if "object" in kinds:
            self.note.value = y.detach() + 3
        if "new_object" in kinds:
            self.replaced = Note(y.detach() + 3)
        if "slots" in kinds:
            self.slotted.value = y.detach() + 4
        if "buffer" in kinds:
            self.state = y.detach() + 5
        if "variable" in kinds:
            _SEEN.set(y.detach() + 6)
        if "local" in kinds:
            _LOCAL.value = y.detach() + 7


KINDS = (
    "attribute", "graph", "fresh", "tuple", "cleared", "deque", "entry", "object", "new_object", "slots",
    "buffer", "variable", "local", "context", "scope", "lazy", "cache", "hook", "pre_hook", "weight_norm",
    "spectral_norm",
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """A model of ``count`` blocks, all of which keep things in the ways ``kinds``."""

    kinds: tuple[str, ...]
    count: int = 8
    width: int = 64
    rows: int = 128
    room: float = 1.0
    home: str = "disk"
    optimizer: str = "SGD"

    @classmethod
    def drawn(cls, number: int) -> "Kept":
        random = Random(number)
        kinds = tuple(random.sample(KINDS, random.choice((0, 1, 1, 2, 3))))
        return cls(
            kinds, random.choice((4, 8, 12)), random.choice((32, 64, 96)), random.choice((32, 128, 256)),
            random.choice((1.0, 1.0, 1.2, 1.6, 3.0)), random.choice(("disk", "disk", "device")),
            random.choice(("SGD", "Adam")),
        )  # fmt: skip

    def model(self) -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*[Keeping(self.width, self.rows, self.kinds) for _ in range(self.count)])

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(self.rows, self.width, generator=torch.Generator().manual_seed(number))


def step_of(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    """A step of training; its loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def alive() -> int:
    """Bytes of all tensors in RAM, each storage once, gradients too; files that are mapped are none, and what the
    compiler's tracing left in this process (fake tensors) has no memory."""
    files, seen = _mapped(), dict[int, int]()
    things = gc.get_objects()
    kinds = {kind for kind in set(map(type, things)) if issubclass(kind, torch.Tensor)}
    for thing in compress(things, map(kinds.__contains__, map(type, things))):
        if thing.layout is not torch.strided:
            continue
        for t in (thing, thing.grad if thing.is_leaf else None):
            if t is not None and not isinstance(t, FakeTensor):
                storage = t.untyped_storage()
                seen[_address(storage)] = storage.nbytes()
    return sum(n for at, n in seen.items() if at and not any(low <= at < high for low, high in files))


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:  # a functional tensor's
        return 0


def _mapped() -> list[tuple[int, int]]:
    with open("/proc/self/maps") as lines:
        parts = [line.split() for line in lines]
    ends = [one[0].split("-") for one in parts if len(one) > 5 and one[5].startswith("/")]
    return [(int(low, 16), int(high, 16)) for low, high in ends]


def whole_peak(step: Callable[[], Any], base: int) -> int:
    """Bytes of everything alive at the peak of a step, beyond ``base``: the median of three, after one whose memory
    they free. PyTorch's reporter now and then takes an address for one that it knew before, of another size."""
    peaks = []
    with watch_memory() as watch:
        for _ in range(4):
            gc.collect()
            before = alive() - base
            with watch.measured() as meter:
                step()
            peaks.append(before + meter.peak_nbytes)
    return sorted(peaks[1:])[1]
