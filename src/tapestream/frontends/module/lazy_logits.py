"""`LazyLogits`: logits that a model's head did not make yet; the cross entropy of them is `linear_cross_entropy`.

`compute_lazily` gives a head of class Linear a subclass of its class that returns such logits where gradients are on.
What models do with logits before the cross entropy (cut off rows, cap, widen, flatten) is written down and done chunk
by chunk; anything else gets the logits themselves, made at that moment by the operations of plain PyTorch, and kept.
"""

import functools
from collections.abc import Callable, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tapestream.errors import GradientError, InputError
from tapestream.frontends.loss import ChunkLoss, Chunks, Pointwise, Reduction, autocast_dtype, cast_dtype
from tapestream.frontends.module.projection import Projection, Within


class LazyLogits(Tensor):
    """Logits (..., vocabulary) of ``rows`` (..., width) after ``pointwise`` operations.

    Shape, dtype and device can be asked for. ``origin``: the logits that these follow from, and how; None for the
    head's own. ``made``: the real ones once something needed them, and their version then.
    """

    projection: Projection
    rows: Tensor
    pointwise: tuple[Pointwise, ...]
    origin: "tuple[LazyLogits, Pointwise] | None"
    made: tuple[Tensor, int] | None

    @staticmethod
    def of(
        projection: Projection,
        rows: Tensor,
        dtype: torch.dtype,
        pointwise: tuple[Pointwise, ...] = (),
        origin: "tuple[LazyLogits, Pointwise] | None" = None,
    ) -> "LazyLogits":
        """A tensor of no bytes."""
        shape = (*rows.shape[:-1], len(projection.weight))
        found: LazyLogits = Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=dtype, device=rows.device, requires_grad=True
        )
        found.projection, found.rows, found.pointwise, found.origin = projection, rows, pointwise, origin
        found.made = None
        with torch._C.DisableTorchFunctionSubclass():
            found.register_hook(_refuse)  # type: ignore[no-untyped-call]
        return found

    def after(self, operation: Pointwise, dtype: torch.dtype | None = None) -> "LazyLogits":
        """After ``operation`` on every logit by itself."""
        operations = (*self.pointwise, operation)
        return LazyLogits.of(self.projection, self.rows, dtype or self.dtype, operations, (self, operation))

    def seen_as(self, rows: Tensor, operation: Pointwise) -> "LazyLogits":
        """After ``operation``, which rearranges or drops rows and makes of the rows of hidden states ``rows``."""
        return LazyLogits.of(self.projection, rows, self.dtype, self.pointwise, (self, operation))

    def is_lazy(self) -> bool:
        """Whether neither these logits nor those they follow from were made."""
        logits = self
        while logits.made is None and logits.origin is not None:
            logits = logits.origin[0]
        return logits.made is None

    def materialised(self) -> Tensor:
        """The logits, the same tensor every time. Raises GradientError where they are no longer known."""
        if self.made is None:
            with torch.inference_mode(False), torch.enable_grad():
                made = self.projection.logits() if self.origin is None else self.origin[1](self.origin[0]._unchanged())
            self.made = made, made._version
        return self.made[0]

    def _unchanged(self) -> Tensor:
        made = self.materialised()
        if self.made is not None and self.made[1] != made._version:
            raise GradientError(
                "logits of a model streamed with loss_chunks were changed in place, then a tensor made from them "
                "before the change was read; make that tensor after the change, or pass loss_chunks=None"
            )
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, LazyLogits) and first.is_lazy():
            if func in _ASKED:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            # Where gradients are off this may be the forward of an autograd Function, whose backward must be called.
            found = _followed(func, first, args[1:], kwargs) if torch.is_grad_enabled() else None
            if found is not None:
                return found
        watched = pytree.tree_leaves(_watched(func, args, kwargs))
        if any(isinstance(leaf, LazyLogits) and leaf.projection.used for leaf in watched):
            raise GradientError(
                "the gradient of logits was asked for, but their loss was computed in chunks, which never hold it as a "
                "whole; ask before the loss is computed, or pass loss_chunks=None to stream()"
            )
        args, kwargs = pytree.tree_map_only(LazyLogits, LazyLogits.materialised, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise GradientError(
            f"{func} got logits of a model streamed with loss_chunks otherwise than from Python (by a backward hook of "
            "the model, say); pass it logits.clone(), or loss_chunks=None to stream()"
        )


def compute_lazily(head: nn.Linear, chunks: Chunks, within: Callable[[], Within] | None = None) -> None:
    """From now on ``head`` returns LazyLogits where gradients are on, and its hooks do not need its output.

    ``within`` is asked at each call for what runs the functions that read the weight.
    """
    base = type(head)

    @functools.wraps(base.forward)
    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        if is_lazy(self, (x,), {}):
            projection = Projection(x, self.weight, self.bias, chunks, None if within is None else within())
            return LazyLogits.of(projection, x, projection.dtype)
        return base.forward(self, x)

    head.__class__ = type(base.__name__, (base,), {"__module__": base.__module__, "forward": forward})


def is_lazy(head: nn.Linear, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a head given to `compute_lazily` returns LazyLogits."""
    hooked = head._forward_hooks or head._backward_hooks or head._backward_pre_hooks
    fits = len(args) == 1 and not kwargs and _fits(args[0], head.weight, head.bias)
    return not hooked and torch.is_grad_enabled() and fits


def find_head(model: nn.Module, name: str | None, blocks: Sequence[nn.Module]) -> nn.Linear:
    """The linear layer that makes the logits: ``name`` as in ``named_modules()``, or what
    ``model.get_output_embeddings()`` says. Raises InputError where there is none outside the blocks, or it is more
    than nn.Linear."""
    if name is None:
        ask = getattr(model, "get_output_embeddings", None)
        head = ask() if callable(ask) else None
    else:
        head = dict(model.named_modules()).get(name)
    asked = "get_output_embeddings()" if name is None else f"head={name!r}"
    found = f"which in this {type(model).__name__} is {'nothing' if head is None else f'a {type(head).__name__}'}"
    if not isinstance(head, nn.Linear) or getattr(head.forward, "__func__", None) is not nn.Linear.forward:
        raise InputError(
            f"loss_chunks needs a head whose forward is nn.Linear's own and looked for it at {asked}, {found}; name "
            "the layer that makes the logits with head='name.of.module', or pass loss_chunks=None"
        )
    if any(head is module for block in blocks for module in block.modules()):
        raise InputError(
            f"loss_chunks needs a head outside the blocks, but {asked} lies in one; leave it out of blocks=[...], or "
            "pass loss_chunks=None"
        )
    return head


def _fits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the product needs gradients and will work: if not, plain PyTorch shall say why."""
    operands = [hidden, weight] if bias is None else [hidden, weight, bias]
    cast = autocast_dtype(hidden.device.type)
    return (
        _is_plain(hidden)
        and hidden.dim() > 1
        and hidden.is_floating_point()
        and hidden.shape[-1] == weight.shape[1]
        and len({cast_dtype(t.dtype, cast) for t in operands}) == 1
        and any(t.requires_grad for t in operands)
    )


def _is_plain(tensor: Tensor) -> bool:
    """Whether it is no tensor of somebody's own class; that it may be without bytes does not matter."""
    return type(tensor) in (Tensor, FakeTensor)


def _refuse(gradient: Tensor) -> Tensor:
    raise GradientError(
        "a gradient arrived at logits that were never computed: a custom autograd Function took them in place of a "
        "tensor; pass it logits.clone(), or loss_chunks=None to stream()"
    )


def _watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    """What ``func`` wants the gradients of."""
    if func in (Tensor.register_hook, Tensor.retain_grad):
        return args[0]
    if func in (torch.autograd.grad, torch.autograd.backward):
        return args[1:2], kwargs.get("inputs")
    return None


def _followed(func: Any, logits: LazyLogits, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """What ``func`` gives of ``logits`` without making them; None where that is not known."""

    def operation(tensor: Tensor) -> Tensor:
        found: Tensor = func(tensor, *args, **kwargs)
        return found

    if func is F.cross_entropy:
        return _cross_entropy(logits, *args, **kwargs)
    if kwargs:
        return None
    match args:
        case () if func in _UNARY:
            return logits.after(operation)
        case () if func is Tensor.float:
            return logits.after(operation, torch.float32)
        case (torch.dtype() as dtype,) if func is Tensor.to and dtype.is_floating_point:
            return logits.after(operation, dtype)
        case (int() | float(),) if func in _SCALED:
            return logits.after(operation)
        case (torch.device() as device,) if func is Tensor.to and device == logits.device:
            return logits.seen_as(logits.rows, operation)
        case () if func is Tensor.contiguous:
            return logits.seen_as(logits.rows, operation)
        case _:
            rows = _SEEN[func](logits, args) if func in _SEEN else None
            return None if rows is None else logits.seen_as(rows, operation)


def _cross_entropy(
    logits: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    usual = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum", "none")
    fits = logits.dim() == 2 and target.dtype == torch.int64 and target.shape == logits.shape[:1]
    if not (usual and fits and _is_plain(target)):
        return None
    loss = ChunkLoss(logits.projection.cast, logits.pointwise, ignore_index, reduction, label_smoothing)
    return logits.projection.loss(loss, logits.rows, target)


def _reshaped(logits: LazyLogits, shape: tuple[Any, ...]) -> Tensor | None:
    """Rows for a view of ``shape`` (given as such or as one tuple) whose last dimension is still the vocabulary."""
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], tuple) else shape
    if sizes[-1:] != logits.shape[-1:] or not all(isinstance(size, int) for size in sizes):
        return None
    return logits.rows.reshape(*sizes[:-1], logits.rows.shape[-1])


def _flattened(logits: LazyLogits, dims: tuple[Any, ...]) -> Tensor | None:
    return logits.rows.flatten(*dims) if dims in ((0, -2), (0, logits.dim() - 2)) else None


def _cut(logits: LazyLogits, index: tuple[Any, ...]) -> Tensor | None:
    """Rows for slices of any dimension but the last, as in ``logits[..., :-1, :]`` or ``logits[:, 1:]``."""
    parts = index[0] if isinstance(index[0], tuple) else index
    if not all(isinstance(part, (slice, EllipsisType)) for part in parts):
        return None
    slices = [part for part in parts if part is not ...]
    reaches_last = len(slices) == logits.dim() or (... in parts and parts[-1] is not ...)
    if reaches_last and slices[-1] != slice(None):
        return None
    found: Tensor = logits.rows[parts]
    return found


_PROPERTIES = ("shape", "dtype", "device", "ndim", "requires_grad", "layout", "nbytes", "is_cuda")
_ASKED = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES]
    + [Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.get_device]
)
_UNARY = frozenset({torch.tanh, Tensor.tanh})
_SCALED = frozenset({Tensor.div, Tensor.__truediv__, torch.div, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, torch.mul})
_SEEN: dict[Any, Callable[[LazyLogits, tuple[Any, ...]], Tensor | None]] = {
    Tensor.view: _reshaped,
    Tensor.reshape: _reshaped,
    torch.reshape: _reshaped,
    Tensor.flatten: _flattened,
    torch.flatten: _flattened,
    Tensor.__getitem__: _cut,
}
