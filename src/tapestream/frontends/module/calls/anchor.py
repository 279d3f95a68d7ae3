"""What makes the parameters of streamed blocks part of the graph, and refuses uses of them beside it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge

from tapestream.errors import GradientError


class Anchor(torch.autograd.Function):
    """Makes parameters part of the graph, so that asking for the gradient of one reaches the blocks."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.parameters = parameters
        return root.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> Any:
        for parameter in filter(hooked, ctx.parameters):  # by hooks that were registered since
            _let_pass(parameter._backward_hooks)
            _let_pass(getattr(parameter, "_post_accumulate_grad_hooks", None))
        return (None,) * (1 + len(ctx.parameters))


def anchored(root: torch.Tensor, parameters: Iterable[torch.nn.Parameter]) -> tuple[torch.Tensor, tuple[Node, Node]]:
    """An anchor below ``root`` with those ``parameters`` that take gradients; the nodes of both."""
    reached = [p for p in parameters if p.requires_grad and not hooked(p)]
    anchor: torch.Tensor = Anchor.apply(root, *reached)  # type: ignore[no-untyped-call]
    assert root.grad_fn is not None
    assert anchor.grad_fn is not None
    return anchor, (root.grad_fn, anchor.grad_fn)


def _let_pass(hooks: dict[int, Any] | None) -> None:
    """They have seen the parameter's gradient, and are not to see the one that is None after it."""
    if hooks:
        kept = dict(hooks)
        hooks.clear()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: hooks.update({**kept, **hooks}))


def watching(parameters: Mapping[str, torch.nn.Parameter], root: Node) -> list[Node]:
    """The nodes where gradients arrive of ``parameters`` (by name) that their modules' calls alone may make; they would
    go without being held."""
    with torch._C.DisableTorchFunctionSubclass():
        nodes = [get_gradient_edge(p).node for p in parameters.values()]
    for name, node in zip(parameters, nodes, strict=True):
        node.register_prehook(_refusing(name, root))
    return nodes


def _refusing(name: str, root: Node) -> Callable[[Any], None]:
    """A hook of the node where gradients of a parameter arrive that its module's calls do not make."""

    def refuse(gradients: Any) -> None:
        if gradients[0] is not None and torch._C._will_engine_execute_node(root):
            raise GradientError(
                f"{name!r} is streamed with its module (a block, an embedding, a head), but was used otherwise than by "
                "calling that module, in one backward with such a call. Call the module; or, with update='step', run a "
                "separate backward for that use (a penalty on weights); or use stream(..., loss_chunks='auto') for a "
                "loss of the head's weight; or keep it on the device (blocks=[...] names the modules to stream, "
                "home='device' streams none)"
            )

    return refuse


def hooked(parameter: torch.nn.Parameter) -> bool:
    """Whether an edge to the parameter's node would let its hooks see a gradient that is None."""
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)
