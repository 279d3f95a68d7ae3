"""`torch.func`'s transforms inside a program: the outermost call of each is one operation, which a replay makes again.

What autograd saves inside for the program's own graph is dropped and made again as that of other operations. What a
transform saves for a gradient that it takes itself lives as long as that.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch._functorch import apis, eager_transforms
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from tapestream.executor.program.calls.foreign import Foreign, shown_of
from tapestream.executor.program.calls.hidden import Hidden
from tapestream.executor.program.calls.patterns import tensors_of
from tapestream.executor.program.calls.seams import REPLACED, Listener, Transform, listener_now
from tapestream.executor.program.calls.values import written
from tapestream.runner.checkpointing import heard_through_transforms

_VJP: Callable[..., Any] = eager_transforms._vjp_with_argnums


def vjp(function: Callable[..., Any], *primals: Any, **options: Any) -> Any:
    """``torch.func.vjp``, of which a replay may have to make the second half alone."""
    hidden = Hidden(shown_of((Foreign(function),)))
    with _Seeing(hidden):
        results, pullback, *more = _VJP(function, *primals, **options)
    hidden.end(tensors_of((primals, results), []))
    return results, Pullback(pullback, Again(function, primals, options, hidden)), *more


class Again:
    """What a vjp gave to call with cotangents: the very thing while the program holds it, made again later."""

    __slots__ = ("__weakref__", "_function", "_hidden", "_options", "_primals", "_versions", "made")

    def __init__(self, function: Callable[..., Any], primals: Any, options: dict[str, Any], hidden: Hidden) -> None:
        self._function, self._primals, self._options, self._hidden = function, primals, options, hidden
        self._versions = [(weakref.ref(t), t._version) for t in tensors_of(primals, [])]
        self.made: Callable[[], Pullback | None] = _gone

    def __call__(self, cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        """The products. Raises GradientError where what they are made of was written into since."""
        pullback = self.made()
        plain = self._plain() if pullback is None else pullback.plain
        return plain(cotangents, retain_graph, create_graph)

    def _plain(self) -> Callable[..., Any]:
        name = "torch.func.vjp"
        self._hidden.check(name, (Foreign(self._function),))
        self._hidden.check_unwritten(name, written(self._versions))
        with torch.enable_grad(), saved_tensors_hooks(torch.Tensor.detach, _itself), heard_through_transforms():
            found: Callable[..., Any] = _VJP(self._function, *self._primals, **self._options)[1]
        return found


class Pullback:
    """What a program gets of a vjp to call with cotangents: each call is one operation."""

    __slots__ = ("__weakref__", "again", "plain")

    def __init__(self, plain: Callable[..., Any], again: Again) -> None:
        self.plain, self.again = plain, again
        again.made = weakref.ref(self)

    def __call__(self, cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        """The products."""
        listener = _listener()
        if listener is None:
            return self.plain(cotangents, retain_graph, create_graph)
        return listener.opaque(_PULLED, (self.again, cotangents, retain_graph, create_graph))


def _gone() -> None:
    return None


def _pulled(again: Again, *given: Any) -> Any:
    return again(*given)


_PULLED = Transform(_pulled)


def _listener() -> Listener | None:
    """Who hears of transforms that begin here; nobody inside of others."""
    if torch.compiler.is_dynamo_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return None
    return listener_now()


def _heard(function: Callable[..., Any], taken: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """``function``, a transform, as one operation where somebody listens; ``taken``: what runs then, in its place."""
    transform = Transform(taken or function)

    def call(*args: Any, **kwargs: Any) -> Any:
        listener = _listener()
        if listener is None:
            return function(*args, **kwargs)
        # A pullback would hold all that it was made of.
        given = tuple(one.again if isinstance(one, Pullback) else one for one in args)
        return listener.opaque(transform, given, kwargs)

    return call


# Where each is looked up when it is called: those that were made before the program, too.
REPLACED.extend(
    [
        (apis, "vmap_impl", _heard),
        (eager_transforms, "grad_impl", _heard),
        (eager_transforms, "grad_and_value_impl", _heard),
        (eager_transforms, "_jvp_with_argnums", _heard),
        (eager_transforms, "_vjp_with_argnums", partial(_heard, taken=vjp)),
    ]
)


class _Seeing(TorchFunctionMode):
    """Sees what torch calls inside are given."""

    only_watches = True

    def __init__(self, hidden: Hidden) -> None:
        super().__init__()
        self._hidden = hidden

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._hidden.see(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def _itself(saved: Any) -> Any:
    return saved
