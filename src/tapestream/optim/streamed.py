"""`StreamedOptimizer`: any torch optimizer that treats tensors independently, on a streamed model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import rounded_nbytes
from tapestream.errors import InputError
from tapestream.ir.actions import Kind, Tier
from tapestream.optim import refusals
from tapestream.optim.arrangement import Arrangement
from tapestream.optim.grad_scaler import Scaled
from tapestream.optim.groups import as_groups, check_alone, check_choices, template
from tapestream.optim.handle import Handle
from tapestream.optim.late_state import LateState
from tapestream.optim.leftover import Leftover
from tapestream.optim.outside import Outside
from tapestream.optim.placed import Placed
from tapestream.optim.shown import StateInParts
from tapestream.optim.state import OptimizerClass
from tapestream.optim.steps import Steps
from tapestream.planning.where import check_where, go_on
from tapestream.runner.stage import parameter_ids

Update: TypeAlias = Literal["step", "backward"]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class StreamedOptimizer(Scaled, LateState, Placed, torch.optim.Optimizer):
    """``optimizer_class`` on the blocks of a streamed model, one at a time, and on what lies outside them.

    ``param_groups`` are those of the torch optimizer: learning-rate schedulers work. State lives where the parameters
    live, in parts of at most a sixteenth of the device budget, and ``state[p]`` shows it there: as views, or as
    `StateInParts` where a parameter is so large that it was cut. ``takes_all``: the groups are all parameters that take
    gradients, those too that do so later. ``where``: blocks are updated, see `tapestream.optimizer`.
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
        takes_all: bool = False,
        where: str = "auto",
    ) -> None:
        check_choices(update, master)
        self.where = check_where(where, handle.store.homes, direct=handle.store.copies.direct)
        handle.check_idle("ts.optimizer()")
        self._handle, self._class, self.model = handle, optimizer_class, handle.model
        listed = as_groups(groups)
        small = template(optimizer_class, listed, options)
        filled = [{**made, "params": given["params"]} for made, given in zip(small.param_groups, listed, strict=True)]
        try:
            super().__init__(filled, dict(small.defaults))
        except (TypeError, ValueError) as error:
            raise InputError(f"an optimizer cannot take these groups of parameters: {error}") from error
        self.update: Update = "step" if update == "step" else "backward"
        parameters = self._listed()
        self._mine, self._count = set(map(id, parameters)), len(parameters)
        self._takes_all, self._adopted = takes_all, set[int]()
        self.behind = self._used = self._gone = False
        other = handle.optimizer
        check_alone(self._mine, None if other is None or other._used else other._mine)
        self._master, self._masters, self._options = master, set[int](), dict(options)
        self._widen(parameters)
        groups_now = lambda: self.param_groups  # noqa: E731
        self._steps = steps = Steps(
            optimizer_class, self._options, groups_now, self._masters, handle.store.device, self.where, self.update,
            go_on=go_on(handle.store.homes),
        )  # fmt: skip
        self._tried, self._common, self._inner, self._rule = steps.tried, steps.common, steps.inner, steps.rule
        away = bool(self._masters) or handle.store.homes[Kind.GRADIENT] is not Tier.DEVICE
        self._leftover = Leftover(steps.way.writes_gradients and away and self.update == "step")
        self._outside: Outside | None = None
        self._take_outside(parameters)
        self._arrangement = Arrangement(handle, self._rule, self._tried, groups_now, hosted=self.where == "host")
        self._showing = self._arrangement.showing
        handle.attach(self, self._steps.updater)

    @property
    def optimizer_class(self) -> OptimizerClass:
        """The torch optimizer that it was made with."""
        return self._class

    @property
    def reads_below(self) -> bool:
        """See `Scaled`."""
        store = self._handle.store
        return is_accelerator(store.device) and store.homes[Kind.GRADIENT] is not Tier.DEVICE

    def state_nbytes(self, parameter: torch.Tensor) -> int:
        """Bytes of state that this parameter has or will have, its fp32 master included."""
        if id(parameter) not in self._mine:
            return 0
        found = self._tried.shape(parameter)
        sizes = (torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in found.tensors)
        return found.beside_nbytes + sum(rounded_nbytes(nbytes, self._handle.store.device) for nbytes in sizes)

    def scalar_nbytes(self) -> int:
        """Device bytes of what is not streamed of blocks' state, and of scalars that lie on an accelerator."""
        device, beside = self._handle.store.device, self._arrangement.beside_nbytes
        if not is_accelerator(device):
            return beside
        found = (self._tried.shape(p).scalars for group in self.param_groups for p in group["params"])
        return beside + sum(found) * rounded_nbytes(1, device)

    def state_tensors(self, parameter: torch.Tensor) -> Sequence[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of the tensors that its state has, or will have, its fp32 master included."""
        return self._tried.shape(parameter).tensors if parameter.requires_grad else ()

    def cut_finer(self) -> bool:
        """Cut the state into smaller parts, which updates need less memory for; what it holds stays. Returns whether
        there was anything to cut. No call may be under way."""
        if not self._arrangement.cut_finer():
            return False
        self.state.clear()
        self._show_state()
        return True

    def follow(self, *, live: bool) -> bool:
        """Take over parameters that take gradients since they were last looked at: those that are in no group, where
        none were given, and a place for the state of all. Returns whether anything was done; with ``live`` calls places
        wait for the next call, or for the step: see `behind`.

        Raises InputError where ``live`` calls still await their backward and a parameter is in no group.
        """
        late = self._late()
        if late and live:
            raise InputError(
                f"requires_grad of {next(iter(late))!r} was switched on between a forward and its backward, which ends "
                "before the optimizer can take it over; call backward() first"
            )
        self.settle()
        if late:
            self._adopted |= {id(p) for p in late.values()}
            among = {id(p) for p in (*self.param_groups[0]["params"], *late.values())}
            self.param_groups[0]["params"][:] = [p for p in self._handle.model.parameters() if id(p) in among]
            self._take(list(late.values()))
        self.behind = live and self._arrangement.is_behind()
        if self.behind or not (self._arrangement.follow() or late):
            return False
        self.state.clear()
        self._show_state()
        self._handle.replan()
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what ``update="backward"`` has not updated yet; returns the closure's value."""
        self._check_current("step()")
        if sum(len(group["params"]) for group in self.param_groups) != self._count:
            raise InputError(
                "param_groups of a streamed model's optimizer were given parameters, or lost some, in place; use "
                "optimizer.add_param_group({'params': [...]}), and requires_grad_(False) for what is not to be trained"
            )
        if self._gone and not self._rule.updated:
            raise refusals.gone()
        loss = None
        if closure is not None:
            self._tried.check_closure()
            with torch.enable_grad():
                loss = closure()
        anew = self._follow_gradients()
        self._steps.begin()
        if self.update == "backward":
            self._arrangement.check_no_gradients()
        if self._steps.late:
            self._hide_state()
        try:
            self._handle.run_step(anew=anew)
            if self._outside is not None:
                self._outside.step(self.param_groups)
            self._inner.finish(self.param_groups)
        finally:
            self._steps.drop()
        self._used, self._rule.updated, self._gone = True, False, False
        self._leftover.note(self._listed())
        if not self._steps.late:
            self._show_state()
        return loss

    def check_stepped(self, what: str) -> None:
        """Raise GradientError where ``what`` comes while blocks are a step ahead of the rest of the model."""
        if self.update == "backward" and self._rule.updated:
            raise refusals.not_stepped(what)

    def check_forward(self) -> None:
        """Raise GradientError where a forward comes too early, or gradients of the last step are still there."""
        self.check_stepped("a forward")
        if not torch.is_grad_enabled():
            return
        if self._leftover.is_there():
            raise refusals.written_into(self._class.__name__)
        if self.update == "backward" and self._outside is not None and self._outside.has_taken():
            raise refusals.not_zeroed()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write a saved state to where the state lives; nothing is rounded, fp32 masters included."""
        self._check_current("load_state_dict()")
        self._gone = self._gone or self._rule.updated
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": {}, "param_groups": groups})
        numbers = (number for group in groups for number in group["params"])
        loaded = {p: state_dict["state"].get(n) for p, n in zip(self._listed(), numbers, strict=True)}
        self.state.clear()
        self._showing.forget()
        self._rule.forget()
        self._steps.load(state_dict)
        self._load_places(state_dict)
        for parameter, found in list(loaded.items()):
            pieces = self._showing.pieces_of(parameter)
            if pieces:
                del loaded[parameter]
            if pieces and found is not None:
                self._rule.restored(parameter, self._showing.written(parameter, found), pieces)
        if self._outside is not None:
            self._outside.restore({p: found for p, found in loaded.items() if found is not None})
        self._used = True
        self._show_state()

    def state_dict(self) -> dict[str, Any]:
        """As torch has it, every state an ordinary whole tensor: views of what lives at home, but copies of the state
        of parameters that were cut (where it lives on disk these are on disk too, not in memory)."""
        return self._state(self._showing.whole)

    def state_in_parts(self) -> dict[str, Any]:
        """The same, but what lies in parts is not put together where these follow each other in row-major order."""
        whole = self._showing.whole
        return self._state(lambda v: v if isinstance(v, StateInParts) and v.pieces else whole(v))

    def _state(self, shown: Callable[[Any], Any]) -> dict[str, Any]:
        self._check_current("state_dict()")
        found = super().state_dict()
        found["state"] = {
            key: {name: shown(value) for name, value in entries.items()} if isinstance(key, int) else entries
            for key, entries in found["state"].items()
        }
        return found | self._steps.saved() | self._saved_places()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's. What was thawed since the optimizer was made, and not updated since, may be given a group.

        Raises InputError between a forward and its backward, and for a group that the optimizer does not take.
        """
        if not hasattr(self, "update"):  # by the constructor
            super().add_param_group(param_group)
            return
        self._check_current("add_param_group()")
        self._handle.check_idle("add_param_group()")
        listed = as_groups([param_group])
        filled = template(self._class, listed, self._options).param_groups[0] | {"params": listed[0]["params"]}
        given = {id(p) for p in listed[0]["params"] if id(p) in self._adopted and not self._has_state(p)}
        first = self.param_groups[0]["params"]
        first[:], before = [p for p in first if id(p) not in given], list(first)
        try:
            super().add_param_group(filled)
        except (TypeError, ValueError) as error:
            first[:] = before
            raise InputError(
                f"an optimizer cannot take this group of parameters: {error}. What is thawed is updated with the "
                "first group's options unless its own is added before: do so before the forward"
            ) from error
        self._take(listed[0]["params"])
        self._inner.follow(self._tried.again())
        self._arrangement.follow()
        self._handle.replan()

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

    def settle(self) -> None:
        """Wait for updates that go on after their step. Raises GradientError where one has failed."""
        if self._handle.optimizer is self:
            self._handle.store.copies.on_host.finish()
            self._steps.let_go()

    def _late(self) -> dict[str, torch.Tensor]:
        others = self._takes_all and not self._mine.issuperset(parameter_ids(self._handle.model))  # a fast look first
        named = self._handle.model.named_parameters() if others else ()
        return {name: p for name, p in named if p.requires_grad and id(p) not in self._mine}

    def _follow_gradients(self) -> bool:
        """Take over what has a gradient and no place for the state that a step would make: it was thawed between two
        forwards, or the gradient was made by hand. Returns whether there was any."""
        if not (any(p.grad is not None for p in self._late().values()) or self._arrangement.cannot_step()):
            return False
        self._handle.check_idle("step(), with gradients of parameters that were frozen when the last forward began,")
        return self.follow(live=False)

    def _check_current(self, what: str) -> None:
        self.settle()
        if self._handle.optimizer is not self:
            raise refusals.replaced(what)

    def _take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take note of parameters that are in a group now."""
        self._mine |= set(map(id, parameters))
        self._count = len(self._listed())
        self._widen(parameters)
        self._rule.regroup()
        self._take_outside(parameters)

    def _has_state(self, parameter: torch.Tensor) -> bool:
        outside = self._outside is not None and self._outside.has_state(parameter)
        return outside or id(parameter) in self._rule.scalars

    def _widen(self, parameters: Sequence[torch.Tensor]) -> None:
        wide = self._master == "auto"
        self._masters |= {id(p) for p in parameters if wide and p.dtype in _SIXTEEN_BITS}

    def _take_outside(self, parameters: Sequence[torch.Tensor]) -> None:
        inside = {id(p) for block in self._handle.store.blocks for p in block.parameters}
        mine = [p for p in parameters if id(p) not in inside]
        if self._outside is None and mine:
            self._outside = Outside(self._inner, self.param_groups, mine, self._masters)
        elif self._outside is not None:
            self._outside.add(self.param_groups, mine)

    def _show_state(self) -> None:
        self._showing.show(self.state)
        if self._outside is not None:
            self.state.update(self._outside.shown())
        self.state.update(self._common.state)

    def _listed(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
