"""Ways in which code reaches a thing, things that it may reach, and what plain PyTorch makes of both."""

import contextvars
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

WIDTH = 8
Use = Callable[[torch.Tensor, Any], torch.Tensor]
Step = Callable[[torch.Tensor], torch.Tensor]

GLOBALS: dict[str, list[Any]] = {}


class Box:
    """A plain object."""

    def __init__(self, value: Any = None) -> None:
        self.value = value


# -- ways ---------------------------------------------------------------------------------------------------------


def closure(use: Use, thing: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        return use(x, thing)

    return step


def default(use: Use, thing: Any) -> Step:
    def step(x: torch.Tensor, it: Any = thing) -> torch.Tensor:
        return use(x, it)

    return step


def keyword_default(use: Use, thing: Any) -> Step:
    def step(x: torch.Tensor, *, it: Any = thing) -> torch.Tensor:
        return use(x, it)

    return step


def in_list(use: Use, thing: Any) -> Step:
    things = [thing]
    return lambda x: use(x, things[0])


def in_dict(use: Use, thing: Any) -> Step:
    things = {"it": thing}
    return lambda x: use(x, things["it"])


def in_set(use: Use, thing: Any) -> Step:
    things = {thing}
    return lambda x: use(x, next(iter(things)))


def global_list(use: Use, thing: Any) -> Step:
    code = "def step(x):\n    return use(x, things[0])\n"
    space: dict[str, Any] = {"use": use, "things": [thing]}
    exec(code, space)  # a module of its own
    return space["step"]


def helper(use: Use, thing: Any) -> Step:
    code = "def helper():\n    return thing\n\n\ndef step(x):\n    return use(x, helper())\n"
    space: dict[str, Any] = {"use": use, "thing": thing}
    exec(code, space)
    return space["step"]


class Plain:
    def __init__(self, use: Use, thing: Any) -> None:
        self.use, self.thing = use, thing

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(x, self.thing)


def bound_method(use: Use, thing: Any) -> Step:
    return Plain(use, thing).step


def nested_objects(use: Use, thing: Any) -> Step:
    return Plain(lambda x, box: use(x, box.value.value.value), Box(Box(Box(thing)))).step


def function_attribute(use: Use, thing: Any) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        return use(x, step.thing)  # type: ignore[attr-defined]

    step.thing = thing  # type: ignore[attr-defined]
    return step


def partial(use: Use, thing: Any) -> Step:
    return functools.partial(lambda it, x: use(x, it), thing)


class Called(Plain):
    __call__ = Plain.step


def callable_object(use: Use, thing: Any) -> Step:
    return Called(use, thing)


def weak_reference(use: Use, thing: Any) -> Step:
    reference = weakref.ref(thing)
    KEPT.append(thing)
    return lambda x: use(x, reference())


KEPT: list[Any] = []


def class_attribute(use: Use, thing: Any) -> Step:
    kind = type("Kind", (), {"thing": Box(thing)})
    return lambda x: use(x, kind.thing.value)  # type: ignore[attr-defined]


def python_generator(use: Use, thing: Any) -> Step:
    def forever() -> Iterator[Any]:
        held = thing
        while True:
            yield held

    found = forever()
    next(found)
    return lambda x: use(x, next(found))


def by_property(use: Use, thing: Any) -> Step:
    holder = type("Holder", (), {"thing": property(lambda self: self._thing)})()
    holder._thing = thing
    return lambda x: use(x, holder.thing)


class Slotted:
    __slots__ = ("thing",)


def slots(use: Use, thing: Any) -> Step:
    slotted = Slotted()
    slotted.thing = thing
    return lambda x: use(x, slotted.thing)


def context_variable(use: Use, thing: Any) -> Step:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("thing")
    variable.set(thing)
    return lambda x: use(x, variable.get())


def thread_local(use: Use, thing: Any) -> Step:
    local = threading.local()
    local.thing = thing
    return lambda x: use(x, local.thing)


def namespace(use: Use, thing: Any) -> Step:
    found = types.SimpleNamespace(inner=types.SimpleNamespace(thing=thing))
    return lambda x: use(x, found.inner.thing)


def module_attribute(use: Use, thing: Any) -> Step:
    module = types.ModuleType("of_the_user")
    module.thing = thing  # type: ignore[attr-defined]
    return lambda x: use(x, module.thing)


WAYS = {
    way.__name__: way
    for way in (
        closure, default, keyword_default, in_list, in_dict, in_set, global_list, helper, bound_method, nested_objects,
        function_attribute, partial, callable_object, weak_reference, class_attribute, python_generator, by_property,
        slots, context_variable, thread_local, namespace, module_attribute,
    )
}  # fmt: skip


# -- things -------------------------------------------------------------------------------------------------------


def parameter() -> Any:
    return nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))


def use_parameter(x: torch.Tensor, it: Any) -> torch.Tensor:
    return torch.sin(x * it)


def native_buffer() -> Any:
    return nn.BatchNorm1d(WIDTH)


def use_native_buffer(x: torch.Tensor, it: Any) -> torch.Tensor:
    return torch.tanh(it(x)) * (1 + 0.01 * it.num_batches_tracked) + it.running_mean.clone()


def native_buffer_by_function(x: torch.Tensor, it: Any) -> torch.Tensor:
    return nn.functional.batch_norm(x, it.running_mean, it.running_var, it.weight, it.bias, training=True).sin()


def vector() -> Any:
    return torch.zeros(WIDTH)


def use_vector(x: torch.Tensor, it: Any) -> torch.Tensor:
    with torch.no_grad():
        it.mul_(0.9).add_(x.mean(0))
    return torch.sin(x) + it.clone() * x


def generator() -> Any:
    return torch.Generator().manual_seed(5)


def use_generator(x: torch.Tensor, it: Any) -> torch.Tensor:
    return torch.sin(x * torch.rand(WIDTH, generator=it))


def replaced() -> Any:
    return Box(torch.zeros(WIDTH))


def use_replaced(x: torch.Tensor, it: Any) -> torch.Tensor:
    it.value = it.value * 0.9 + x.detach().mean(0)
    return torch.sin(x) + it.value * x


def counter() -> Any:
    return Box(0)


def use_counter(x: torch.Tensor, it: Any) -> torch.Tensor:
    it.value += 1
    return torch.sin(x) * (1 + 0.01 * it.value)


def cached() -> Any:
    return Box()


def use_cached(x: torch.Tensor, it: Any) -> torch.Tensor:
    it.value = torch.sigmoid(x)
    return x * it.value


THINGS: dict[str, tuple[Callable[[], Any], Use]] = {
    "parameter": (parameter, use_parameter),
    "native buffer": (native_buffer, use_native_buffer),
    "native buffer by function": (native_buffer, native_buffer_by_function),
    "vector": (vector, use_vector),
    "generator": (generator, use_generator),
    "replaced": (replaced, use_replaced),
    "counter": (counter, use_counter),
    "cached": (cached, use_cached),
}
EXACT = ("parameter", "native buffer", "native buffer by function", "vector", "generator")
"""What is taken whatever leads to it."""


def left_in(thing: Any) -> list[Any]:
    """What a thing holds, to be compared."""
    if isinstance(thing, nn.Module):
        return [*(p.grad for p in thing.parameters()), *thing.buffers()]
    if isinstance(thing, torch.Generator):
        return [thing.get_state()]
    if isinstance(thing, nn.Parameter):
        return [thing.grad]
    value = thing.value if isinstance(thing, Box) else thing
    return [value.detach() if isinstance(value, torch.Tensor) else value]


class Block(nn.Module):
    """A block of a streamed model that reaches a thing that is none of its own."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(WIDTH, WIDTH), step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.step(self.linear(x))


class Network(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
