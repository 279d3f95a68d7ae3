"""`FakeMeter`: bytes and operations of code that runs on fake tensors, which have shapes and storages but no bytes."""

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tapestream.costs.rates import Operation
from tapestream.errors import InputError
from tapestream.frontends.outlines.operations import floating_point, tensors_of, touched_nbytes
from tapestream.frontends.outlines.quick import QuickKernels
from tapestream.storage.meter import MemoryMeter

_DEVICE = torch.ops.prim.device.default
_GROUPED = torch.ops.aten._grouped_mm.default


class NeedsNumbers(InputError):
    """What the code does depends on numbers in its tensors."""


class FakeMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # so PyTorch has it
    """Counts operations (``work``), and the storages that they make until they are freed.

    What kernels allocate for themselves is not seen. Storages that were there before cost nothing. A truth value that
    the code reads is taken as false (an overflow that is looked for, a layer that is dropped by chance); `NeedsNumbers`
    is raised when it reads a number.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work: Counter[Operation] = Counter()
        self._run = QuickKernels()
        self._known: dict[int, weakref.ref[Any]] = {}
        self._live = self._start = self._lowest = 0
        self._section: MemoryMeter | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):  # asked for every tensor of every operation
            return args[0].fake_device
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default:
            return _scalar(args[0])
        given = tensors_of(args, kwargs)
        for tensor in given:
            self._know(tensor, counts=False)
        out = _grouped(*args, **kwargs) if func is _GROUPED else self._run(func, args, kwargs)
        made = tensors_of((out,))
        nbytes = touched_nbytes(func, given, made)
        if nbytes is not None:
            self.work[floating_point(func, args, kwargs, out), nbytes] += 1
        for tensor in made:
            self._know(tensor, counts=True)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and what keeps compilers out takes longer than all else

    @contextlib.contextmanager
    def counted(self) -> Iterator[Counter[Operation]]:
        """The operations of the block, which ``work`` does not get."""
        before, self.work = self.work, Counter()
        try:
            yield self.work
        finally:
            self.work = before

    @contextlib.contextmanager
    def measured(self) -> Iterator[MemoryMeter]:
        """What `tapestream.storage.meter.track_memory` would say of the block; blocks cannot be nested."""
        meter = self._section = MemoryMeter()
        self._start = self._lowest = self._live
        try:
            yield meter
        finally:
            meter.end_nbytes = self._live - self._start
            self._section = None

    def _know(self, tensor: torch.Tensor, *, counts: bool) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes() if counts else 0
        if key not in self._known:
            self._known[key] = weakref.ref(storage, lambda _: self._forget(key, nbytes))
            self._change(nbytes)

    def _forget(self, key: int, nbytes: int) -> None:
        del self._known[key]
        self._change(-nbytes)

    def _change(self, nbytes: int) -> None:
        self._live += nbytes
        if self._section is not None:
            self._lowest = min(self._lowest, self._live)
            self._section.peak_nbytes = max(self._section.peak_nbytes, self._live - self._start)
            self._section.rise_nbytes = max(self._section.rise_nbytes, self._live - self._lowest)


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Distinct storages behind ``tensors``: which (while one is alive) to bytes. Fake storages have no address."""
    return {s._cdata: s.nbytes() for t in tensors if (s := t.untyped_storage()).nbytes() > 0}


@contextlib.contextmanager
def fake_tensors(device: str, model: nn.Module | None = None) -> Iterator[FakeMeter]:
    """Tensors made inside are fakes that behave as on the CPU, metered; attention as fused as ``device`` has it. Those
    of ``model`` are fakes inside, too, ties kept; the meter takes them for ones that were there before."""
    meter = FakeMeter()
    attention = _DropoutWithinKernel() if device == "cuda" else contextlib.nullcontext()
    log = logging.getLogger(FakeTensorMode.__module__)
    before = log.level
    log.setLevel(logging.CRITICAL)  # what goes wrong is raised too
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _fake_inside(model), meter, attention:
            yield meter
    finally:
        log.setLevel(before)


def faked(tree: Any) -> Any:
    """``tree`` with its tensors replaced by fakes; to be called inside `fake_tensors`."""
    return pytree.tree_map_only(torch.Tensor, _fake, tree)


@contextlib.contextmanager
def _fake_inside(model: nn.Module | None) -> Iterator[None]:
    """Parameters, buffers and other tensors of ``model`` are fakes inside."""
    made: dict[int, torch.Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    places: Iterator[dict[str, Any]] = (
        held
        for module in (() if model is None else model.modules())
        for held in (module._parameters, module._buffers, vars(module))
    )
    for held in places:
        for name, value in list(held.items()):
            if isinstance(value, torch.Tensor):
                replaced.append((held, name, value))
                if id(value) not in made:
                    made[id(value)] = _fake(value)
                held[name] = made[id(value)]
    try:
        yield
    finally:
        for held, name, value in replaced:
            held[name] = value


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    return nn.Parameter(found, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _scalar(tensor: torch.Tensor) -> bool:
    if tensor.dtype is torch.bool:
        return False
    raise NeedsNumbers(
        f"the model's forward reads a number of type {tensor.dtype} out of a tensor (.item(), int(), a loop over "
        "tensors) and depends on it, so it cannot be planned without running it: use tapestream.plan(model, batch) in "
        "Python"
    )


class _DropoutWithinKernel(TorchFunctionMode):
    """On a GPU, fused attention draws its dropout inside the kernel and keeps nothing; the CPU's kernel has none."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            args, kwargs = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args, dict(kwargs or {})
            kwargs.pop("dropout_p", None)
        return func(*args, **kwargs) if kwargs else func(*args)


def _grouped(left: Any, right: Any, *args: Any, **kwargs: Any) -> Any:
    """Products of experts: run in any dtype, but the fake of the operation knows bfloat16 alone."""
    found = torch.ops.aten._grouped_mm.default(left.bfloat16(), right.bfloat16(), *args, **kwargs)
    return found.to(left.dtype)
