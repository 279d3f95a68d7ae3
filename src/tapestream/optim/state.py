"""What state an optimizer keeps for a tensor, found by asking the optimizer itself."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tapestream.accelerator.device import is_accelerator
from tapestream.errors import InputError
from tapestream.optim import refusals
from tapestream.optim.made_bytes import MadeBytes

OptimizerClass = type[torch.optim.Optimizer]
_PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that are their bytes, shape and dtype."""


@dataclass(frozen=True, slots=True)
class StateShape:
    """Tensors that an optimizer keeps for one parameter, by name; scalars such as Adam's ``step`` are not streamed.
    ``scalars``: how many of these lie beside the parameter, and stay on the device. ``first_nbytes``: the most that a
    step which makes it holds, state and temporaries; ``later_nbytes``: what a later one holds beside it.
    ``beside``: shapes of state in lists and the like, or that comes after the first step; it stays on the device."""

    tensors: tuple[tuple[str, tuple[int, ...], torch.dtype], ...]
    scalars: int = 0
    first_nbytes: int = 0
    later_nbytes: int = 0
    beside: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in self.tensors)

    @property
    def beside_nbytes(self) -> int:
        """Bytes of what stays on the device."""
        return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.beside)


def uncompiled() -> contextlib.AbstractContextManager[None]:
    """Inside, what an optimizer compiles runs as it is written. What is tried under a mode cannot be compiled, and
    Dynamo would not try that code again in this process, of the user's own optimizer either."""
    return torch.compiler.set_stance("force_eager")  # type: ignore[no-any-return,no-untyped-call,unused-ignore]


def probe(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    numbers: bool = True,
) -> StateShape:
    """Step the optimizer twice on a tensor without bytes (on one of zeros, where it asks for ``numbers`` and may have
    them), and look at the state that it has made, and what the steps hold.

    ``options``: the entries of its parameter group; ``required``: what its constructor was given.

    Raises InputError for an optimizer that cannot take a tensor by itself, and for one whose state is more than bytes.
    """
    fused = bool(options.get("fused"))
    plain = {**options, "fused": False, "foreach": False}  # the fast forms refuse tensors without bytes
    options = {k: plain[k] for k in options}
    try:
        try:
            state, later, *held = _stepped(cls, options, required, torch.empty(shape, dtype=dtype, device="meta"))
        except (RuntimeError, NotImplementedError):  # some ask for numbers
            if not numbers:
                raise
            state, later, *held = _stepped(cls, options, required, torch.zeros(shape, dtype=dtype, device="cpu"))
    except Exception as error:
        said = str(error).partition("\n")[0]
        raise InputError(refusals.no_single_tensor(cls.__name__, f"{type(error).__name__}: {said}")) from error
    found = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    for name, value in (*found.items(), *((name, later[name]) for name in found if name in later)):
        if isinstance(value, torch.Tensor) and type(value) not in _PLAIN:
            raise InputError(refusals.subclass(cls.__name__, name, type(value).__name__))
    changed = [n for n, value in found.items() if getattr(later.get(n, value), "shape", None) != value.shape]
    if changed:
        raise InputError(
            f"{cls.__name__} keeps a state {changed[0]!r} that has another shape after each step; a streamed model's "
            f"optimizer keeps its state in places of one size. Instead: make it yourself, {cls.__name__}"
            "(model.parameters(), ...), its state in memory, or use another, such as AdamW, SGD or Adagrad"
        )
    streamed = {id(later.get(name)) for name in found}
    apart = {id(t): t for t in tree_leaves(later) if isinstance(t, torch.Tensor) and t.dim() > 0}
    return StateShape(
        tuple((name, tuple(value.shape), value.dtype) for name, value in found.items() if value.dim() > 0),
        # torch's fused forms keep theirs on the device, and capturable ones.
        sum(1 for value in found.values() if value.dim() == 0 and (fused or value.is_meta)),
        0 if fused else held[0],
        0 if fused else held[1],
        tuple((tuple(t.shape), t.dtype) for key, t in apart.items() if key not in streamed),
    )


def _stepped(
    cls: OptimizerClass, options: Mapping[str, Any], required: Mapping[str, Any], tensor: torch.Tensor
) -> tuple[dict[str, Any], dict[str, Any], int, int]:
    """The state after a first step and after another; the most bytes that the first made, and that the other made."""
    parameter = torch.nn.Parameter(tensor)
    parameter.grad = torch.zeros_like(parameter)
    optimizer = cls([{**options, "params": [parameter]}], **required)
    with uncompiled(), MadeBytes() as first:
        optimizer.step()
    state = dict(optimizer.state.get(parameter, {}))
    later = MadeBytes()
    with contextlib.suppress(Exception), uncompiled(), later:  # some cannot go on from zeros
        optimizer.step()
    return state, dict(optimizer.state.get(parameter, {})), first.peak_nbytes, later.peak_nbytes


def is_elementwise(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
) -> bool:
    """Whether the optimizer treats each element by itself: two steps on small tensors and on two pieces of each end in
    the same bits, and so does all the state, which is of the tensor's shape.

    ``options``, ``required``: as for `probe`; the learning rate is one that shows. False for optimizers that look at
    whole tensors (norms, factors, rows), whatever they may be called.
    """
    if "lr" in options:
        shown = torch.full_like(options["lr"], 1e-2) if isinstance(options["lr"], torch.Tensor) else 1e-2
        options = {**options, "lr": shown}
    with torch.random.fork_rng(devices=[device] if is_accelerator(device) else [], device_type=device.type):
        return all(_treats_alike(cls, options, required, dtype, device, shape, cut) for shape, cut in _TRIED)


_TRIED = ((7, 150), 512), ((8, 640), 1024), ((350, 300), 4096)
"""Shapes, and where they are cut: rules may look at how many elements there are (8-bit ones begin at 4096)."""


def _treats_alike(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    dtype: torch.dtype,
    device: torch.device,
    shape: tuple[int, ...],
    cut: int,
) -> bool:
    """A tensor of this shape and its two pieces."""
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(shape, generator=generator, device="cpu").to(device, dtype) for _ in range(3))
    try:
        whole = _after(cls, options, required, start, gradients)
        pieces = [
            _after(cls, options, required, start.flatten()[part], [g.flatten()[part] for g in gradients])
            for part in (slice(cut), slice(cut, None))
        ]
    except Exception:  # it takes no tensor of one dimension, say
        return False
    if any(piece.keys() != whole.keys() for piece in pieces):
        return False
    return all(_same(value, [piece[name] for piece in pieces], start.shape) for name, value in whole.items())


def _after(
    cls: OptimizerClass,
    options: Mapping[str, Any],
    required: Mapping[str, Any],
    start: torch.Tensor,
    gradients: Sequence[torch.Tensor],
) -> dict[str, Any]:
    """The tensor (under the name of none of its state) and the state after a step for each gradient."""
    parameter = torch.nn.Parameter(start.clone())
    optimizer = cls([{**options, "params": [parameter]}], **required)
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return {"": parameter.detach(), **optimizer.state.get(parameter, {})}


def _same(whole: Any, pieces: Sequence[Any], shape: torch.Size) -> bool:
    """Whether the pieces of a state, put together, are the state of the whole."""
    if not isinstance(whole, torch.Tensor) or whole.dim() == 0:
        if whole is None:
            return all(piece is None for piece in pieces)
        on_cpu = functools.partial(torch.as_tensor, device="cpu")
        return all(torch.equal(on_cpu(whole), on_cpu(piece)) for piece in pieces)
    return whole.shape == shape and torch.equal(whole.flatten(), torch.cat([piece.flatten() for piece in pieces]))
