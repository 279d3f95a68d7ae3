"""`StreamedOptimizer`: any torch optimizer that treats tensors independently, on a streamed model."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import nn

from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore, Updater
from tapestream.ir.actions import Kind, Value
from tapestream.optim.outside import Outside
from tapestream.optim.rule import MASTER, Rule
from tapestream.optim.state import OptimizerClass, StateShape, probe
from tapestream.storage.blocks import ParameterBlock
from tapestream.storage.layout import Layout

Update: TypeAlias = Literal["step", "backward"]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Handle(Protocol):
    """What the optimizer needs of a streamed model."""

    store: BlockStore
    update: Literal["step", "backward"] | None

    def check_idle(self, what: str) -> None: ...
    def outside_parameters(self) -> list[nn.Parameter]: ...
    def attach(self, optimizer: "StreamedOptimizer", updater: Updater) -> None: ...
    def run_step(self) -> None: ...


class StreamedOptimizer(torch.optim.Optimizer):
    """``optimizer_class`` on the blocks of a streamed model, one at a time, and on what lies outside them.

    ``param_groups`` are those of the torch optimizer: learning-rate schedulers work. State lives where the parameters
    live; ``state[p]``
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
        handle.check_idle("ts.optimizer()")
        self._handle, self._class = handle, optimizer_class
        listed = _as_groups(groups)
        template = _template(optimizer_class, listed, options)
        super().__init__(
            [{**made, "params": given["params"]} for made, given in zip(template.param_groups, listed, strict=True)],
            dict(template.defaults),
        )
        self.update: Update = "step" if update == "step" else "backward"
        parameters = self._listed()
        self._masters = frozenset(id(p) for p in parameters if master == "auto" and p.dtype in _SIXTEEN_BITS)
        self._options = dict(options)
        self._rule = Rule(optimizer_class, self._options, lambda: self.param_groups, self._masters)
        self._shapes: dict[object, StateShape] = {}
        self._shown: dict[torch.Tensor, tuple[object, list[torch.Tensor]]] = {}
        self._lay_out(parameters)
        outside = {id(p) for p in handle.outside_parameters()}
        mine = [p for p in parameters if id(p) in outside]
        self._outside = Outside(self._class, self._options, self.param_groups, mine, self._masters) if mine else None
        handle.attach(self, Updater(self._rule.run, update == "backward"))

    def state_nbytes(self, parameter: torch.Tensor) -> int:
        """Bytes of state that this parameter has or will have, its fp32 master included."""
        if not any(parameter is p for group in self.param_groups for p in group["params"]):
            return 0
        return self._shape(parameter).nbytes

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what ``update="backward"`` has not updated yet; returns the closure's value."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.update == "step":
            self._handle.run_step()
        if self._outside is not None:
            self._outside.step(self.param_groups)
        self._show_state()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a saved state to where the state lives; nothing is rounded, fp32 masters included."""
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": groups})
        numbers = (number for group in groups for number in group["params"])
        loaded = {p: state_dict["state"].get(n) for p, n in zip(self._listed(), numbers, strict=True)}
        self.state.clear()
        self._shown.clear()
        self._rule.forget()
        for block in self._handle.store.blocks:
            views = self._views(block) if any(loaded.get(p) for p in block.parameters) else []
            for i, parameter in enumerate(block.parameters):
                found = loaded.pop(parameter, None)
                if found is not None:
                    mine = {name: v for (j, name), v in zip(block.state_slots, views, strict=True) if j == i}
                    self._rule.restored(parameter, _written(mine, found))
        if self._outside is not None:
            self._outside.restore({p: found for p, found in loaded.items() if found is not None})
        self._show_state()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused once the optimizer is made: the state of all blocks has its place already."""
        if hasattr(self, "update"):
            raise InputError(
                "add_param_group: the optimizer of a streamed model knows its parameters from the start; make a new "
                "one with "
                "tapestream.optimizer(model, ..., groups=[...])"
            )
        super().add_param_group(param_group)

    def __deepcopy__(self, _: object) -> Any:
        raise InputError(
            "the optimizer of a streamed model cannot be copied: its state lies with the model's blocks. Copy or save "
            "state_dict(), or make another with tapestream.optimizer()"
        )

    __reduce_ex__ = __deepcopy__

    def __repr__(self) -> str:
        first = self.param_groups[0]
        how = "fused" if first.get("fused") else "foreach" if first.get("foreach") else "for-loop"
        name = f"{self._class.__module__}.{self._class.__qualname__}"
        return f"Streamed({name}, {how}, update={self.update!r}) {super().__repr__()}"

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

    def _show_state(self) -> None:
        store = self._handle.store
        for block in store.blocks:
            exists = block.state_slots and store.exists(Value(Kind.OPTIMIZER_STATE, block.index))
            views = self._views(block) if exists else []
            for i, parameter in enumerate(block.parameters):
                scalars = self._rule.scalars.get(id(parameter))
                shown, mine = self._shown.get(parameter), self.state.get(parameter)
                if scalars is None or (shown and mine and shown[0] is scalars and shown[1] is views):
                    continue
                tensors = {name: v for (j, name), v in zip(block.state_slots, views, strict=False) if j == i}
                self.state[parameter] = {**scalars, **tensors}
                self._shown[parameter] = scalars, views
        if self._outside is not None:
            self.state.update(self._outside.shown())

    def _listed(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _views(self, block: ParameterBlock) -> list[torch.Tensor]:
        store = self._handle.store
        return store.state_views(block.index, store.memory_of(Value(Kind.OPTIMIZER_STATE, block.index)))


def _written(views: Mapping[str, torch.Tensor], found: Mapping[str, Any]) -> dict[str, Any]:
    """Copy what has a place into it; returns copies of the rest."""
    for name, view in views.items():
        if name in found:
            view.copy_(found[name])
    return {name: copy.deepcopy(value) for name, value in found.items() if name not in views}


def _as_groups(groups: Iterable[Any]) -> list[dict[str, Any]]:
    listed = list(groups)
    if not listed:
        raise InputError("the optimizer got no parameters; is every parameter of the model frozen?")
    if not isinstance(listed[0], dict):
        listed = [{"params": listed}]
    return [{**group, "params": list(group["params"])} for group in listed]


def _template(cls: OptimizerClass, listed: list[dict[str, Any]], options: Mapping[str, Any]) -> torch.optim.Optimizer:
    """The optimizer on tensors of one element: checks the options and fills in the defaults without any state of
    size."""
    stand_ins = [
        {**group, "params": [nn.Parameter(torch.zeros(1, dtype=p.dtype)) for p in group["params"]]} for group in listed
    ]
    try:
        return cls(stand_ins, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{cls.__name__} does not take these options: {error}") from error
