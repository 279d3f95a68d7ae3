"""`StreamedOptimizer`: any torch optimizer that treats tensors independently, on a streamed model."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from tapestream.errors import GradientError, InputError
from tapestream.executor.blocks import BlockStore, Updater
from tapestream.ir.actions import Kind, Value
from tapestream.optim.rule import MASTER, Rule
from tapestream.optim.state import OptimizerClass, StateShape, probe
from tapestream.storage.layout import Layout

_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Handle(Protocol):
    """What the optimizer needs of a streamed model."""

    store: BlockStore
    update: str | None

    def outside_parameters(self) -> list[nn.Parameter]: ...
    def attach(self, optimizer: "StreamedOptimizer") -> None: ...
    def run_step(self) -> None: ...


class StreamedOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` on the blocks of a streamed model, one at a time, and on what lies outside them.

    ``param_groups`` are those of the torch optimizer: learning-rate schedulers work. State lives where the parameters live; ``state[p]``
    shows it there.
    """

    def __init__(
        self,
        handle: Handle,
        optimizer_class: OptimizerClass,
        groups: Iterable[Any],
        *,
        update: str,
        master: str | None,
        options: Mapping[str, Any],
    ) -> None:
        if update not in ("step", "backward"):
            raise InputError(f"update={update!r} was asked for; it is 'step' or 'backward'")
        if master not in ("auto", None):
            raise InputError(
                f"master={master!r} was asked for; it is 'auto' (fp32 masters for 16-bit parameters) or None"
            )
        self._handle, self._class = handle, optimizer_class
        listed = _as_groups(groups)
        template = _template(optimizer_class, listed, options)
        super().__init__(
            [{**made, "params": given["params"]} for made, given in zip(template.param_groups, listed, strict=True)],
            dict(template.defaults),
        )
        self.update = update
        parameters = [p for group in self.param_groups for p in group["params"]]
        self._masters = frozenset(id(p) for p in parameters if master == "auto" and p.dtype in _SIXTEEN_BITS)
        self._options = dict(options)
        self._rule = Rule(optimizer_class, self._options, lambda: self.param_groups, self._masters)
        self._shapes: dict[object, StateShape] = {}
        self._lay_out(parameters)
        outside = {id(p) for p in handle.outside_parameters()}
        self._outside = self._resident_optimizer([p for p in parameters if id(p) in outside])
        handle.attach(self)
        handle.store.updater = Updater(self._rule.run)

    def state_nbytes(self, parameter: torch.Tensor) -> int:
        """Bytes of state that this parameter has or will have, its fp32 master included."""
        if not any(parameter is p for group in self.param_groups for p in group["params"]):
            return 0
        return self._shape(parameter).nbytes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update what ``update="backward"`` has not updated yet; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.update == "step":
            self._handle.run_step()
        if self._outside is not None:
            self._refresh(self._outside)
            self._outside.step()
        self._show_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a saved state to where the state lives."""
        super().load_state_dict(state_dict)
        loaded, self.state = dict(self.state), type(self.state)(dict)
        for block in self._handle.store.blocks:
            value = Value(Kind.OPTIMIZER_STATE, block.index)
            views = block.state_views(self._handle.store.memory_of(value)) if block.state_slots else []
            for i, parameter in enumerate(block.parameters):
                found = loaded.pop(parameter, None)
                if found is None:
                    continue
                mine = {name: v for (j, name), v in zip(block.state_slots, views, strict=True) if j == i}
                for name, view in mine.items():
                    if name in found:
                        view.copy_(found[name])
                self._rule.restored(parameter, {k: v for k, v in found.items() if k not in mine})
            self._handle.store.write_home(value)
        if self._outside is not None:
            for parameter, found in loaded.items():
                self._outside.state[parameter] = found
        self._show_state()

    def __repr__(self) -> str:
        first = self.param_groups[0]
        how = "fused" if first.get("fused") else "foreach" if first.get("foreach") else "for-loop"
        return f"Streamed({self._class.__module__}.{self._class.__qualname__}, {how}, update={self.update!r}) {super().__repr__()}"

    # -- inside ---------------------------------------------------------------------------------------------------

    def _shape(self, parameter: torch.Tensor) -> StateShape:
        options = next(g for g in self.param_groups if any(parameter is p for p in g["params"]))
        wide = id(parameter) in self._masters
        dtype = torch.float32 if wide else parameter.dtype
        key = (parameter.shape, dtype, id(options))
        found = self._shapes.get(key)
        if found is None:
            plain = {k: v for k, v in options.items() if k != "params"}
            required = {k: v for k, v in self._options.items() if k not in ("fused", "foreach")}
            found = self._shapes[key] = probe(self._class, plain, required, parameter.shape, dtype)
        if wide:
            found = StateShape((*found.tensors, (MASTER, tuple(parameter.shape), torch.float32)))
        return found

    def _lay_out(self, parameters: list[torch.Tensor]) -> None:
        mine = {id(p) for p in parameters}
        for block in self._handle.store.blocks:
            slots: list[tuple[int, str]] = []
            tensors: list[tuple[tuple[int, ...], torch.dtype]] = []
            for i, parameter in enumerate(block.parameters):
                if id(parameter) in mine and parameter.requires_grad:
                    for name, shape, dtype in self._shape(parameter).tensors:
                        slots.append((i, name))
                        tensors.append((shape, dtype))
            block.state_layout = Layout.of(tensors) if tensors else None
            block.state_slots = tuple(slots)

    def _resident_optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer | None:
        if not parameters:
            return None
        mine = {id(p) for p in parameters}
        wide = [p for p in parameters if id(p) in self._masters]
        if wide:
            return _Mastered(self._class, self._options, self.param_groups, mine, self._masters)
        groups = [
            {**g, "params": chosen} for g in self.param_groups if (chosen := [p for p in g["params"] if id(p) in mine])
        ]
        return self._class(groups, **self._options)

    def _refresh(self, inner: torch.optim.Optimizer) -> None:
        """Hyperparameters as they are now (schedulers change those of the outer optimizer)."""
        for group in inner.param_groups:
            first = group["params"][0]
            origin = getattr(inner, "origin", {}).get(id(first), first)
            outer = next(g for g in self.param_groups if any(origin is p for p in g["params"]))
            group.update({k: v for k, v in outer.items() if k != "params"})

    def _show_state(self) -> None:
        store = self._handle.store
        for block in store.blocks:
            value = Value(Kind.OPTIMIZER_STATE, block.index)
            if not block.state_slots or not store.exists(value):
                views: list[torch.Tensor] = []
            else:
                views = block.state_views(store.memory_of(value))
            for i, parameter in enumerate(block.parameters):
                scalars = self._rule.scalars.get(id(parameter))
                if scalars is not None:
                    tensors = {name: v for (j, name), v in zip(block.state_slots, views, strict=False) if j == i}
                    self.state[parameter] = {**scalars, **tensors}
        if self._outside is not None:
            for parameter, found in self._outside.state.items():
                self.state[getattr(self._outside, "origin", {}).get(id(parameter), parameter)] = found


class _Mastered(torch.optim.Optimizer):
    """Plain mixed-precision training for parameters outside the blocks: fp32 masters updated, 16-bit parameters copied from them."""

    def __init__(
        self,
        cls: OptimizerClass,
        options: Mapping[str, Any],
        groups: list[dict[str, Any]],
        mine: set[int],
        masters: frozenset[int],
    ) -> None:
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.origin: dict[int, torch.Tensor] = {}
        listed = []
        for group in groups:
            targets = []
            for p in (p for p in group["params"] if id(p) in mine):
                target = p.detach().float().clone() if id(p) in masters else p
                if target is not p:
                    self.pairs.append((p, target))
                    self.origin[id(target)] = p
                targets.append(target)
            if targets:
                listed.append({**group, "params": targets})
        self.inner = cls(listed, **options)
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of the inner optimizer on the masters."""
        for parameter, target in self.pairs:
            target.grad = None if parameter.grad is None else parameter.grad.float()
        self.inner.step()
        with torch.no_grad():
            for parameter, target in self.pairs:
                target.grad = None
                parameter.copy_(target)


def _as_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(groups)
    if not listed:
        raise InputError("the optimizer got no parameters; is every parameter of the model frozen?")
    if not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    return [{**group, "params": list(group["params"])} for group in listed]


def _template(cls: OptimizerClass, listed: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer on tensors of one element: checks the options and fills in the defaults without any state of size."""
    stand_ins = [
        {**group, "params": [nn.Parameter(torch.zeros(1, dtype=p.dtype)) for p in group["params"]]} for group in listed
    ]
    try:
        return cls(stand_ins, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{cls.__name__} does not take these options: {error}") from error


class SteppedGradient(torch.Tensor):
    """What ``.grad`` shows after ``update="backward"``: the gradient was used and is gone. Reading it raises."""

    @staticmethod
    def standing_for(parameter: torch.Tensor) -> "SteppedGradient":
        """A gradient of the parameter's shape that takes no bytes."""
        base = torch.zeros((), dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)
        return base.as_subclass(SteppedGradient)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Allow what ``zero_grad`` and printing shapes do, refuse the rest."""
        name = getattr(func, "__name__", str(func))
        if name in _HARMLESS:
            if name in ("zero_", "detach_", "requires_grad_"):
                return args[0]
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise GradientError(
            f"{name} was called on the gradient of a streamed parameter, but with update='backward' each block's gradient is used as soon as it "
            "arrives and then gone. Clipping by global norm, GradScaler and reading .grad need update='step'"
        )


_HARMLESS = frozenset(
    (
        "zero_",
        "detach_",
        "requires_grad_",
        "__get__",
        "__set__",
        "size",
        "dim",
        "numel",
        "is_floating_point",
        "__repr__",
    )
)
