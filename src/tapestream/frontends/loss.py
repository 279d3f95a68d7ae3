"""`linear_cross_entropy`: the head's projection and its cross entropy, by chunks of rows, never all logits at once.

The forward keeps its arguments and nothing else; the backward makes each chunk's logits again, last chunk first, and
their gradient in their place. Kernels and order of sums are those of the same loop under plain autograd, whatever
cotangent arrives. (Gradients made in the forward would save one product in four, but they hold for a cotangent of 1
alone: scaling them afterwards rounds otherwise.)

What autograd would make as a whole beside its result is made by slices here: what a cross entropy keeps, by slices of a
chunk's rows, each of which is judged by itself; what a chunk adds to the gradient of the weight, by slices of that.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from tapestream.errors import GradientError, InputError

_LEAST_CHUNK_NBYTES = 2**20
_CHUNKS_IN_WEIGHT = 4
_SLICES = 16
_LEAST_SLICE_NBYTES = 2**20
_GRAIN = 1024  # rows: slices of the vocabulary start where vectors of any width do; thin ones sum in another order

Chunks: TypeAlias = int | Literal["auto"]
Reduction: TypeAlias = Literal["mean", "sum", "none"]
Pointwise: TypeAlias = Callable[[Tensor], Tensor]
"""What is done to each logit by itself."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    chunks: Chunks = "auto",
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    shift: bool = False,
) -> Tensor:
    """Cross entropy in nats of ``hidden @ weight.T + bias`` against ``labels``, without ever holding all the logits.

    ``hidden``: (..., width). ``weight``: (vocabulary, width). ``bias``: (vocabulary,). ``labels``: int64 (...).
    ``softcap``: logits become ``softcap * tanh(logits / softcap)``. ``shift``: next-token prediction; the row at
    position t is compared with the label at t + 1 of the last dimension, the last row with none. The result has the
    dtype of the logits, but at least float32. It is a scalar, or for ``reduction="none"`` of the shape of ``labels`` (0
    where ignored). ``"mean"`` divides by the number of labels that count: NaN if there are none, as in PyTorch.

    ``chunks``: the number of chunks of rows. "auto" makes a chunk's logits about as large as the largest of ``hidden``,
    a quarter of ``weight`` (each chunk reads its gradient to add to it, which must be worth that) and 1 MiB.

    Bits: those of ``sum(F.cross_entropy(F.linear(h, weight, bias).float(), y, reduction="sum")) / count`` over the
    chunks in order, for the loss and for every gradient. The gradient of a ``weight`` of 2 MiB or more is made by
    slices of at least 1,024 words. Its bits are the same if the matrix product of a slice is the slice of the product,
    as was found on CPUs. Under autocast the weight is cast once per call.

    Memory beside the arguments, with c the bytes of a chunk's logits in the result's dtype, and g those of ``weight``
    in the product's. Forward: 2c. Backward: the gradient of ``hidden``, c, g (if ``weight`` is trained), and the larger
    of 3/16 c and g/16 (and up to 2,046 words more), or up to 6 and 2 MiB if those are less. ``softcap`` adds up to c/8
    to the backward; autocast adds a cast of the weight, g, to both. Work: one matrix product in four is a recompute.

    Raises InputError for shapes, dtypes or options that cannot be used, IndexError (from PyTorch, on the CPU) for a
    label outside the vocabulary, GradientError in a backward with ``create_graph=True``.
    """
    _check_options(chunks, reduction, softcap)
    _check_shapes(hidden, weight, bias, labels, shift)
    if shift:
        labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    cast = autocast_dtype(hidden.device.type)
    _check_dtypes(hidden, weight, bias, labels, cast)
    loss = ChunkLoss(cast, _capped(softcap), ignore_index, reduction, label_smoothing)
    return by_chunks(loss, hidden, (weight, bias), labels, chunks)


def by_chunks(
    loss: "ChunkLoss", hidden: Tensor, head: tuple[Tensor, Tensor | None], labels: Tensor, chunks: Chunks
) -> Tensor:
    """`linear_cross_entropy` of arguments that are known to fit. ``head``: weight and bias."""
    flat = hidden.reshape(-1, hidden.shape[-1])
    if chunks == "auto":
        chunks = _auto_chunks(flat, head[0], _wide(loss.cast or hidden.dtype))
    rows = max(1, -(-len(flat) // chunks))
    found: Tensor = _Chunked.apply(flat, *head, labels.reshape(-1), loss, rows)  # type: ignore[no-untyped-call]
    if loss.reduction == "none":
        return found.view(labels.shape)
    return found / (labels != loss.ignore_index).sum() if loss.reduction == "mean" else found


def check_chunks(what: str, chunks: object) -> None:
    """Raise InputError, naming ``what``, unless ``chunks`` can be used."""
    if chunks != "auto" and (not isinstance(chunks, int) or isinstance(chunks, bool) or chunks < 1):
        raise InputError(f'{what}={chunks!r} is neither "auto" nor a positive integer; pass one')


@dataclass(frozen=True, slots=True)
class ChunkLoss:
    """The loss of one chunk. ``cast``: what autocast makes of the operands of a linear layer, None where it is off;
    ``pointwise``: what happens to logits before the cross entropy. ``reduction`` is that of all chunks together.

    ``head``: weight and bias as `lowered` leaves them; ``hidden``: (rows, width)."""

    cast: torch.dtype | None
    pointwise: tuple[Pointwise, ...]
    ignore_index: int
    reduction: Reduction
    label_smoothing: float

    def __call__(self, hidden: Tensor, head: Sequence[Tensor | None], labels: Tensor) -> Tensor:
        return self.of_logits(self.logits(hidden, head), labels)

    def logits(self, hidden: Tensor, head: Sequence[Tensor | None]) -> Tensor:
        """The head's own."""
        weight, bias = head
        assert weight is not None
        return F.linear(hidden.to(cast_dtype(hidden.dtype, self.cast)), weight, bias)

    def of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """A sum over the rows, or for ``reduction="none"`` the loss of each."""
        for operation in self.pointwise:
            logits = operation(logits)
        return F.cross_entropy(
            logits.to(_wide(logits.dtype)),
            labels,
            ignore_index=self.ignore_index,
            reduction="none" if self.reduction == "none" else "sum",
            label_smoothing=self.label_smoothing,
        )

    def differentiate(self, logits: Tensor, labels: Tensor, cotangent: Tensor) -> None:
        """Put the gradient of `of_logits` in the place of ``logits``."""
        for part in _slices(len(logits), logits.nbytes):
            leaf = logits[part].detach().requires_grad_()
            given = cotangent if cotangent.dim() == 0 else cotangent[part]
            logits[part] = torch.autograd.grad(self.of_logits(leaf, labels[part]), leaf, given)[0]


class _Chunked(torch.autograd.Function):
    """The sum of the losses of all rows, or each of them (``loss.reduction``), ``rows`` at a time."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, loss: ChunkLoss, rows: int
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.loss, ctx.rows = loss, rows
        with without_autocast(hidden.device.type):
            head = [lowered(t, loss.cast) for t in (weight, bias)]
            found = (loss(hidden[part], head, labels[part]) for part in _parts(hidden, rows))
            return torch.cat(list(found)) if loss.reduction == "none" else functools.reduce(torch.add, found)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Any:
        if torch.is_grad_enabled():  # once_differentiable would let a cotangent that is a constant pass
            raise GradientError(
                "linear_cross_entropy was differentiated with create_graph=True, and has no second derivative; leave "
                "create_graph out, or use F.cross_entropy(F.linear(hidden, weight, bias), labels)"
            )
        hidden, weight, bias, labels = ctx.saved_tensors
        loss, needs = ctx.loss, ctx.needs_input_grad
        of_hidden = hidden.new_empty(hidden.shape) if needs[0] else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        with torch.enable_grad(), without_autocast(hidden.device.type):
            head = [_leaf(lowered(weight, loss.cast), False), _leaf(lowered(bias, loss.cast), needs[2])]
            for part in reversed(_parts(hidden, ctx.rows)):
                h = _leaf(hidden[part], needs[0])
                assert h is not None
                logits = loss.logits(h, head)
                gradient = logits.detach()
                loss.differentiate(gradient, labels[part], cotangent if cotangent.dim() == 0 else cotangent[part])
                of_h, new = _gradients(logits, [h, head[1]], gradient)
                if of_hidden is not None:
                    of_hidden[part] = of_h
                of_bias = _added(of_bias, new)
                if needs[1]:
                    assert head[0] is not None
                    low = h.detach().to(cast_dtype(h.dtype, loss.cast))
                    of_weight = _with_product(of_weight, gradient, low, head[0])
                del logits, gradient  # or the next chunk's would lie beside them
        del head  # or the cast of weight would lie beside its gradient in its own dtype
        sums = zip((of_weight, of_bias), (weight, bias), strict=True)
        return of_hidden, *(None if total is None else total.to(t.dtype) for total, t in sums), None, None, None


def _parts(hidden: Tensor, rows: int) -> list[slice]:
    return [slice(start, start + rows) for start in range(0, max(1, len(hidden)), rows)]


def _leaf(tensor: Tensor | None, requires_grad: bool) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_(requires_grad)


def _slices(count: int, nbytes: int, grain: int = 1) -> list[slice]:
    """Of ``count`` rows of ``nbytes`` bytes together: about `_SLICES`, none without need below `_LEAST_SLICE_NBYTES`;
    they start at multiples of ``grain`` and, where there are several, hold at least as many rows."""
    most = max(1, min(_SLICES, nbytes // _LEAST_SLICE_NBYTES))
    rows = -(-max(1, count) // (most * grain)) * grain
    starts = range(0, count, rows)
    if len(starts) > 1 and count - starts[-1] < grain:
        starts = starts[:-1]
    return [slice(*ends) for ends in itertools.pairwise((*starts, count))]


def _gradients(output: Tensor, leaves: Sequence[Tensor | None], cotangent: Tensor) -> list[Tensor | None]:
    """Those of ``leaves`` (None where no gradient is asked for) from one chunk's ``output``."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    found = iter(torch.autograd.grad(output, wanted, cotangent) if wanted else ())
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _with_product(total: Tensor | None, gradient: Tensor, hidden: Tensor, weight: Tensor) -> Tensor:
    """``total`` and what the ``gradient`` of ``hidden @ weight.T`` adds to that of ``weight``, as autograd makes it."""
    if not weight.is_contiguous():
        new = (hidden.t() @ gradient).t()
        return new if total is None else total.add_(new)
    if total is None:
        return gradient.t() @ hidden
    parts = _slices(len(total), total.nbytes, _GRAIN)
    room = torch.empty_like(total[max(parts, key=lambda part: part.stop - part.start)])
    for part in parts:
        product = torch.mm(gradient[:, part].t(), hidden, out=room[: len(total[part])])
        total[part] += product
    return total


def _added(total: Tensor | None, new: Tensor | None) -> Tensor | None:
    return new if total is None or new is None else total.add_(new)


def _capped(softcap: float | None) -> tuple[Pointwise, ...]:
    return () if softcap is None else (lambda x: x / softcap, torch.tanh, lambda x: x * softcap)


def lowered(tensor: Tensor | None, cast: torch.dtype | None) -> Tensor | None:
    """``tensor`` as autocast hands it to a linear layer."""
    return None if tensor is None else tensor.to(cast_dtype(tensor.dtype, cast))


def cast_dtype(dtype: torch.dtype, cast: torch.dtype | None) -> torch.dtype:
    """That of an operand of ``dtype`` where autocast casts to ``cast``."""
    return dtype if cast is None or dtype == torch.float64 else cast


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)  # a bfloat16 sum over a vocabulary has three digits


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast casts to on devices of this kind; None where it is off."""
    available = torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if available and torch.is_autocast_enabled(kind) else None


def without_autocast(kind: str) -> contextlib.AbstractContextManager[Any]:
    """The casts are made by hand: the backward may run where autocast is off, and its cache may be off too."""
    available = torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else contextlib.nullcontext()


def _auto_chunks(hidden: Tensor, weight: Tensor, wide: torch.dtype) -> int:
    """As many as `linear_cross_entropy` says; ``weight`` counts since its gradient is in the peak anyway."""
    chunk_nbytes = max(hidden.nbytes, weight.nbytes // _CHUNKS_IN_WEIGHT, _LEAST_CHUNK_NBYTES)
    rows = max(1, chunk_nbytes // max(1, len(weight) * wide.itemsize))
    return max(1, -(-len(hidden) // rows))


def _check_options(chunks: object, reduction: str, softcap: float | None) -> None:
    check_chunks("linear_cross_entropy: chunks", chunks)
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f'linear_cross_entropy: reduction={reduction!r} is not known; pass "mean", "sum" or "none"')
    if softcap is not None and not softcap > 0:
        raise InputError(f"linear_cross_entropy: softcap={softcap!r} is not positive; pass None for no cap")


def _check_shapes(hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shift: bool) -> None:
    if weight.dim() != 2 or hidden.dim() < 1 or hidden.shape[-1] != weight.shape[1]:
        raise InputError(
            "linear_cross_entropy: hidden of shape (..., width) and weight of shape (vocabulary, width) were asked "
            f"for, found {tuple(hidden.shape)} and {tuple(weight.shape)}; pass the weight as nn.Linear keeps it"
        )
    if labels.shape != hidden.shape[:-1]:
        raise InputError(
            f"linear_cross_entropy: hidden of shape {tuple(hidden.shape)} asks for labels of shape "
            f"{tuple(hidden.shape[:-1])}, found {tuple(labels.shape)}; pass one label per row of hidden"
        )
    if shift and labels.dim() == 0:
        raise InputError(
            "linear_cross_entropy: shift=True needs a dimension of positions, found a single label; pass shift=False"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"linear_cross_entropy: weight of shape {tuple(weight.shape)} asks for a bias of shape "
            f"{tuple(weight.shape[:1])}, found {tuple(bias.shape)}; pass one number per word of the vocabulary"
        )


def _check_dtypes(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, cast: torch.dtype | None
) -> None:
    if labels.dtype != torch.int64:
        raise InputError(
            f"linear_cross_entropy: labels are class indices of torch.int64, found {labels.dtype}; pass labels.long()"
        )
    operands = [t.dtype for t in (hidden, weight, bias) if t is not None]
    if len({cast_dtype(dtype, cast) for dtype in operands}) > 1 or not hidden.is_floating_point():
        raise InputError(
            "linear_cross_entropy: hidden, weight and bias must have one floating-point dtype (or run under autocast), "
            f"found {', '.join(map(str, operands))}; cast one of them"
        )
