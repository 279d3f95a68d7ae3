"""Functions that keep on their context what their backward needs, beside what they save: nobody could drop that. Such
a call keeps its arguments alone, and its backward makes the call again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from tapestream.accelerator.memory import storage_nbytes
from tapestream.capture.python_state import walk
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.seams import Apply
from tapestream.executor.program.calls.values import address_of
from tapestream.runner.ambient import Autocast, HostGenerators, TorchGenerators, unchanged_generators
from tapestream.runner.guards import check_differentiated_once


class Rerun(Apply):
    """``cls.apply`` that keeps nothing on its context but its arguments. ``nbytes``: what the last call would have
    kept, and its backward makes again; ``hidden``: what it used beside its arguments."""

    __slots__ = ("hidden", "nbytes")
    nbytes: int
    hidden: Hidden

    def __init__(self, cls: Any, hidden: Hidden) -> None:
        super().__init__(cls)
        object.__setattr__(self, "hidden", hidden)
        object.__setattr__(self, "nbytes", 0)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Function."""
        tensors = [t for t in args if isinstance(t, torch.Tensor)]
        others = [None if isinstance(t, torch.Tensor) else t for t in args]
        places = [isinstance(t, torch.Tensor) for t in args]
        return _Rerun.apply(self, others, places, *tensors)  # type: ignore[no-untyped-call]

    def plainly(self, *args: Any) -> Any:
        """The Function itself, in a graph of its own."""
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, _same):
            return super().__call__(*args)


class _Rerun(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Rerun, others: list[Any], places: list[bool], *tensors: torch.Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.others, ctx.places = function, others, places
        ctx.needs = [t.requires_grad for t in tensors]
        ctx.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        ctx.autocast = Autocast.capture(ctx.device)
        torchs, hosts = TorchGenerators.capture(ctx.device), HostGenerators.capture()
        found = function.plainly(*_given(others, places, tensors, ctx.needs))
        same = torchs.equals(TorchGenerators.capture(ctx.device)) and hosts.equals(HostGenerators.capture())
        ctx.generators = () if same else (torchs, hosts)
        ctx.save_for_backward(*tensors)
        leaves = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        object.__setattr__(function, "nbytes", kept_nbytes(leaves, ()))
        results = [t.detach() for t in leaves]
        ctx.mark_non_differentiable(*(b for a, b in zip(leaves, results, strict=True) if not a.requires_grad))
        return results[0] if isinstance(found, torch.Tensor) else tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        check_differentiated_once(
            f"autograd.Function {ctx.function.__name__}, which keeps tensors on its context,",
            "use save_for_backward in it",
        )
        ctx.function.hidden.check_tensors(ctx.function.__name__)
        given = _given(ctx.others, ctx.places, ctx.saved_tensors, ctx.needs)
        with _as_then(ctx), ctx.autocast.entered(cache=False):
            found = ctx.function.plainly(*given)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        pairs = [(t, g) for t, g in zip(found, cotangents, strict=True) if g is not None and t.requires_grad]
        wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        del found
        if not pairs:
            return (None,) * (3 + len(ctx.needs))
        roots, seeds = zip(*pairs, strict=True)
        gradients = iter(torch.autograd.grad(roots, wanted, seeds, allow_unused=True))
        return (None, None, None, *(next(gradients) if need else None for need in ctx.needs))


@contextlib.contextmanager
def _as_then(ctx: Any) -> Iterator[None]:
    """Inside, random generators are as they were before the first run."""
    if not ctx.generators:
        yield
        return
    with unchanged_generators(ctx.device):
        for one in ctx.generators:
            one.restore()
        yield


def _given(others: list[Any], places: list[bool], tensors: Sequence[torch.Tensor], needs: list[bool]) -> list[Any]:
    """The arguments, each tensor a leaf of its own."""
    leaves = iter([t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)])
    return [next(leaves) if tensor else other for other, tensor in zip(others, places, strict=True)]


def kept_nbytes(results: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Bytes of tensors that a Function has put on its context as attributes, beside its arguments and parameters."""
    node: Any = next((t.grad_fn for t in results if isinstance(t.grad_fn, BackwardCFunction)), None)
    attributes = getattr(node, "__dict__", None)
    if not attributes:
        return 0
    known = {address_of(t) for t in (*args, *results) if isinstance(t, torch.Tensor)}
    found: dict[int, int] = {}
    for one in walk(list(attributes.values())):
        if isinstance(one, torch.Tensor) and not (one.is_leaf and one.requires_grad) and one.layout is torch.strided:
            address = address_of(one)
            if address not in known:
                found[address] = storage_nbytes(one.untyped_storage())
    return sum(found.values())


def can_rerun(result: Any, args: Sequence[Any], versions: Sequence[int]) -> bool:
    """Whether a call of a Function can be made again in its backward: it has written into none of its arguments, and
    neither gives them back nor is given tensors inside of others."""
    tensors = [t for t in args if isinstance(t, torch.Tensor)]
    inside = [t for one in args if not isinstance(one, torch.Tensor) for t in pytree.tree_leaves(one)]
    results = [result] if isinstance(result, torch.Tensor) else result
    flat = isinstance(results, tuple) and all(isinstance(t, torch.Tensor) for t in results)
    if not (isinstance(result, torch.Tensor) or flat) or any(isinstance(t, torch.Tensor) for t in inside):
        return False
    given = {address_of(t) for t in tensors}
    return [t._version for t in tensors] == list(versions) and not any(address_of(t) in given for t in results)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
