"""Guards against silent errors: what crosses a stage's border unseen is refused by name."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import get_gradient_edge

from tapestream.capture.cells import Cell, among
from tapestream.capture.fused_steps import fused_steps
from tapestream.errors import GradientError, InputError


class Guard(torch.autograd.Function):
    """Stands between a stage's input and the stage: makes in-place operations on the input legal, and stops a
    backward from outside.

    The runner's own backward asks for the cotangent that arrives here and goes no further.
    """

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """``tensor`` itself, as a new tensor over the same bytes; ``root`` is any tensor that requires a gradient."""
        ctx.stage = name
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        """Raises GradientError: only a backward from outside comes through."""
        raise escaped(ctx.stage)


class Watch:
    """Stands at the borders of stages that are recorded as one graph, or before what a stage has saved; only the
    runner's own backward, while `open`, may pass."""

    __slots__ = ("open",)

    def __init__(self) -> None:
        self.open = False

    def stand_before(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        """Watch the state that the stage ``name`` is given."""
        for tensor in tensors:
            node = tensor.grad_fn
            if node is not None:
                node.register_prehook(functools.partial(self._pass, name))

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, a backward may pass."""
        before, self.open = self.open, True
        try:
            yield
        finally:
            self.open = before

    def check(self, name: str) -> None:
        """Raise GradientError where somebody else's backward asks for what the stage ``name`` has saved."""
        if not self.open:
            raise escaped(name)

    def _pass(self, name: str, cotangents: Any) -> None:
        if not self.open:
            raise escaped(f"{name}, or the state that it was given")


def written_since_saved(name: str) -> GradientError:
    """What the stage ``name`` has saved for its backward is not what it was."""
    return GradientError(
        f"a tensor that {name} saved for its backward was modified by an in-place operation afterwards; "
        "clone() it first"
    )


def escaped(name: str) -> GradientError:
    """A tensor made inside a stage was differentiated from outside."""
    return GradientError(
        f"backward reached the inside of {name}: a tensor made there was used outside without being returned by it. "
        "Return the tensor as part of the stage's output, or detach() it before storing it"
    )


Pack: TypeAlias = Callable[[torch.Tensor], Any]
Unpack: TypeAlias = Callable[[Any], torch.Tensor]
Mark: TypeAlias = tuple[int, int]
"""What tells that a tensor was written into, or given other bytes by ``tensor.data = ..``."""


_WITH_ADDRESS = (torch.Tensor, torch.nn.Parameter)


def mark(tensor: torch.Tensor) -> Mark:
    """The version counter and steps of fused optimizers, and the address (0 for tensors that have none: fake and sparse
    ones, those of `torch.func`)."""
    if type(tensor) in _WITH_ADDRESS:
        try:
            return tensor._version + fused_steps(tensor), tensor.data_ptr()
        except (NotImplementedError, RuntimeError):
            pass
    return tensor._version, 0


def check_versions(
    name: str, seen: Sequence[int | Mark], now: Sequence[int | Mark], what: str = "a state kept for"
) -> None:
    """Raise GradientError when a kept tensor was changed in place since."""
    if tuple(seen) != tuple(now):
        raise GradientError(
            f"{what} {name} was modified by an in-place operation after it was kept, or its .data was replaced, so "
            "recomputing would use the new values; clone() the tensor before changing it"
        )


def check_differentiated_once(what: str, instead: str) -> None:
    """Raise GradientError in a backward with ``create_graph=True``: what it returns has no graph, so that a penalty on
    a gradient would be lost unseen. (``once_differentiable`` lets pass a cotangent that is a constant.)"""
    if torch.is_grad_enabled():
        raise GradientError(
            f"{what} was differentiated with create_graph=True, but its gradients cannot be differentiated again; "
            f"leave create_graph out, or {instead}"
        )


_HOOKS_OF = "tapestream", "torch.utils.checkpoint"
PLACING = "torch.autograd.graph"
"""Where hooks are from that move saved tensors and change none (`save_on_cpu`)."""


def places(pack: Any) -> bool:
    """Whether a hook on saved tensors only moves them."""
    return str(getattr(pack, "__module__", "")).startswith(PLACING)


def refuse_hooks(name: str, *harmless: str) -> None:
    """Raise InputError where somebody's hooks on saved tensors are entered around a call that drops what is saved:
    they would not be called, or not for all. ``harmless``: modules whose hooks may as well be left out."""
    disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        raise InputError(
            f"{name} needs hooks on saved tensors, which are disabled here ({disabled!r}); call it outside of "
            "disable_saved_tensors_hooks and of torch.func's transforms"
        )
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if top is not None and not str(getattr(top[0], "__module__", "")).startswith((*_HOOKS_OF, *harmless)):
        raise InputError(
            f"{name} is called inside saved_tensors_hooks (save_on_cpu, say), which would miss the tensors that it "
            "saves; leave them out (folder= and home= say where tensors go), or enter them inside the function"
        )


@contextlib.contextmanager
def hooks_off(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks that users registered on parameters must see the sum once, when it leaves the chain, not every part. Those
    that are registered inside, by a run that is none of the user's, go."""
    before = [(leaf, leaf._backward_hooks) for leaf in leaves]
    for leaf, hooks in before:
        if hooks:
            leaf._backward_hooks = None
    try:
        yield
    finally:
        for leaf, hooks in before:
            if leaf._backward_hooks is not hooks:
                leaf._backward_hooks = hooks


def check_asked(function: Any, args: Sequence[Any], inputs: Container[int], name: str) -> None:
    """Raise InputError where the stage ``name`` asks whether one of its ``inputs`` (by id) is a leaf: in plain PyTorch
    the call's argument may be one, and what an earlier stage returns is none; here they cannot be told apart."""
    if function == _IS_LEAF and id(args[0]) in inputs and _asked_by_users():
        raise InputError(
            f"{name} asks whether its argument is a leaf (is_leaf), which it cannot see: a stage is cut off from the "
            "graph before it; ask before the call, and give the answer to the stage"
        )


def _asked_by_users() -> bool:
    """Whether it is users' code, not this library's or PyTorch's, that a mode hears of."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name in ("_asked_by_users", "check_asked", "__torch_function__"):
        frame = frame.f_back
    return frame is None or not str(frame.f_globals.get("__name__", "")).startswith(("tapestream.", "torch."))


_IS_LEAF: Any = torch.Tensor.is_leaf.__get__  # type: ignore[attr-defined]


def drop_hooks(leaves: Sequence[torch.Tensor]) -> None:
    """Inside `hooks_off`: those that a run has registered, which is none of the user's, go before its backward."""
    for leaf in leaves:
        if leaf._backward_hooks:
            leaf._backward_hooks = None


@contextlib.contextmanager
def refusing_backward(name: str, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Raise InputError where what runs inside adds to the ``.grad`` of one of ``leaves``, or sets it: it would do so in
    each recompute. The gradients are left where they are, which need not be the leaf's device."""

    def refuse(_: Any) -> None:
        raise _adds_to_gradients(name)

    nodes = [get_gradient_edge(leaf).node for leaf in leaves if leaf.requires_grad]  # held: leaves hold theirs weakly
    handles = [node.register_prehook(refuse) for node in nodes]
    before = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad._version) for leaf in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        del nodes
        written = [
            (leaf, was)
            for leaf, was, version in before
            if leaf.grad is not was or (was is not None and was._version != version)
        ]
        for leaf, was in written:
            if leaf.grad is not was:
                leaf.grad = was
    if written:
        raise _adds_to_gradients(name)


def _adds_to_gradients(name: str) -> InputError:
    return InputError(
        f"{name} calls backward(), or writes .grad, and would do so again whenever it is recomputed; use "
        "torch.autograd.grad there, or add it to the loss"
    )


def with_versions(name: str) -> tuple[Pack, Unpack]:
    """Hooks on saved tensors that give what was saved, and see what autograd does where there are none: that nothing
    has written into it. Detached: a saved output would hold the node that saves it."""

    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return tensor.detach(), tensor._version

    def unpack(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
        tensor, version = saved
        if tensor._version != version:
            raise written_since_saved(name)
        return tensor

    return pack, unpack


def with_copies_of(cells: Sequence[Cell], pack: Pack, unpack: Unpack) -> tuple[Pack, Unpack]:
    """The same hooks; of ``cells``, which hold something else when the recompute has ended, they get copies."""
    return (lambda tensor: pack(tensor.clone() if among(cells, tensor) else tensor)), unpack
