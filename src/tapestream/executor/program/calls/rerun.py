"""Functions that keep on their context what their backward needs, beside what they save: nobody could drop that. Such
a call keeps its arguments alone, and its backward makes the call again.
"""

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge, saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tapestream.accelerator.memory import storage_nbytes
from tapestream.capture.python_state import FIXED, walk
from tapestream.errors import GradientError
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.seams import Apply
from tapestream.executor.program.calls.values import address_of
from tapestream.runner.ambient import Autocast, HostGenerators, TorchGenerators, unchanged_generators
from tapestream.runner.guards import check_differentiated_once

_NO_TENSORS = frozenset(FIXED) - {torch.Tensor}
_GRAD = inspect.signature(torch.autograd.grad)


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

    def plainly(self, args: Sequence[Any], stands_for: "StandsFor") -> Any:
        """The Function itself, in a graph of its own."""
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, _same), stands_for:
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
        given = _given(others, places, tensors, ctx.needs)
        found = function.plainly(given, StandsFor(function.__name__, given, tensors))
        same = torchs.still() and hosts.equals(HostGenerators.capture())
        ctx.generators = () if same else (torchs, hosts)
        ctx.save_for_backward(*tensors)
        leaves = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        object.__setattr__(function, "nbytes", kept_nbytes(context_of(leaves), leaves, ()))
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
        saved = ctx.saved_tensors
        given = _given(ctx.others, ctx.places, saved, ctx.needs)
        stands_for = StandsFor(ctx.function.__name__, given, saved)
        with _as_then(ctx), ctx.autocast.entered(cache=False):
            found = ctx.function.plainly(given, stands_for)
        found = [found] if isinstance(found, torch.Tensor) else list(found)
        pairs = [(t, g) for t, g in zip(found, cotangents, strict=True) if g is not None and t.requires_grad]
        wanted = [t for t in given if isinstance(t, torch.Tensor) and t.requires_grad]
        del found
        if not pairs:
            return (None,) * (3 + len(ctx.needs))
        roots, seeds = zip(*pairs, strict=True)
        with stands_for:  # which is to hear of what is inside alone
            gradients = iter(_engine_run_backward(
                roots, seeds, False, False, tuple(wanted), allow_unreachable=True, accumulate_grad=False
            ))  # fmt: skip
        return (None, None, None, *(next(gradients) if need else None for need in ctx.needs))


class StandsFor(TorchFunctionMode):
    """While a Function runs that is given copies of its arguments, each a leaf of its own: a gradient that it takes
    inside of an argument is that of the argument, which its code may reach by another way (a module's parameter that
    is an argument, too), and not that of the copy alone."""

    only_watches = True

    def __init__(self, name: str, given: Sequence[Any], tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        copies = [t for t in given if isinstance(t, torch.Tensor)]
        pairs = [(a, b) for a, b in zip(copies, tensors, strict=True) if a.requires_grad]
        self._name = name
        self._held = [get_gradient_edge(copy).node for copy, _ in pairs]  # as long as their numbers are in use
        self._originals = {id(node): one for node, (_, one) in zip(self._held, pairs, strict=True)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not torch.autograd.grad:
            return func(*args, **kwargs)
        asked = _GRAD.bind(*args, **kwargs)
        asked.apply_defaults()
        inputs = asked.arguments["inputs"]
        listed = [inputs] if isinstance(inputs, (torch.Tensor, GradientEdge)) else list(inputs)
        originals = {k: one for k, t in enumerate(listed) if (one := self._original_of(t)) is not None}
        if not originals:
            return func(*args, **kwargs)
        also = {"inputs": [*listed, *originals.values()], "allow_unused": True, "materialize_grads": False}
        found = func(**(asked.arguments | also))
        return self._joined(found, listed, list(originals), asked.arguments)

    def _original_of(self, tensor: Any) -> torch.Tensor | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.requires_grad:
            return None
        return self._originals.get(id(get_gradient_edge(tensor).node))

    def _joined(self, found: Sequence[Any], listed: Sequence[Any], places: Sequence[int], asked: Any) -> Any:
        """Of each input the gradient that came by the copy, or by the argument."""
        gradients = list(found[: len(listed)])
        for place, other in zip(places, found[len(listed) :], strict=True):
            if gradients[place] is not None and other is not None:
                raise GradientError(
                    f"Program: autograd.Function {self._name} takes a gradient inside of an argument that it uses, and "
                    "reaches by another way, too; use ctx.save_for_backward in it for what it keeps on its context"
                )
            gradients[place] = other if gradients[place] is None else gradients[place]
        missing = [k for k, g in enumerate(gradients) if g is None]
        if missing and asked["materialize_grads"]:
            for k in missing:
                gradients[k] = torch.zeros_like(listed[k])
        elif missing and not asked["allow_unused"]:
            raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph. "
                               "Set allow_unused=True if this is the desired behavior.")  # fmt: skip
        return tuple(gradients)


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


def context_of(results: Sequence[torch.Tensor]) -> Any:
    """That of the Function which has given these, as far as that is the node of its results; None: it is not."""
    for tensor in results:
        if isinstance(tensor.grad_fn, BackwardCFunction):
            return tensor.grad_fn
    return None


def kept_nbytes(context: Any, results: Sequence[torch.Tensor], args: Sequence[Any]) -> int:
    """Bytes of tensors that a Function has put on its context as attributes, beside its arguments and parameters."""
    attributes = [one for one in getattr(context, "__dict__", {}).values() if type(one) not in _NO_TENSORS]
    if not attributes:
        return 0
    known = {address_of(t) for t in (*args, *results) if isinstance(t, torch.Tensor)}
    found: dict[int, int] = {}
    for one in walk(attributes):
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
