"""`StreamedOptimizer`: any torch optimizer that treats tensors independently, on a streamed model."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, TypeAlias

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.accelerator.memory import rounded_nbytes
from tapestream.costs import Budget, Profile
from tapestream.errors import GradientError, InputError
from tapestream.executor.blocks import BlockStore, Updater
from tapestream.ir.actions import Kind, Tier
from tapestream.optim.grad_scaler import Scaled
from tapestream.optim.groups import as_groups, template
from tapestream.optim.outside import Outside
from tapestream.optim.parts import Member, part_limits, state_parts
from tapestream.optim.rule import Rule
from tapestream.optim.showing import Showing
from tapestream.optim.shown import StateInParts
from tapestream.optim.state import OptimizerClass, StateShape
from tapestream.optim.tried import Tried
from tapestream.storage.blocks import StatePart

Update: TypeAlias = Literal["step", "backward"]
_SIXTEEN_BITS = (torch.float16, torch.bfloat16)


class Given(Protocol):
    """What the optimizer needs of a plan that the user brought."""

    @property
    def budget(self) -> Budget: ...
    @property
    def profile(self) -> Profile: ...


class Handle(Protocol):
    """What the optimizer needs of a streamed model."""

    store: BlockStore
    budget: Budget
    optimizer: "StreamedOptimizer | None"

    @property
    def given(self) -> "Given | None": ...

    update: Literal["step", "backward"] | None

    def check_idle(self, what: str) -> None: ...
    def attach(self, optimizer: "StreamedOptimizer", updater: Updater) -> None: ...
    def run_step(self) -> None: ...


class StreamedOptimizer(Scaled, torch.optim.Optimizer):
    """``optimizer_class`` on the blocks of a streamed model, one at a time, and on what lies outside them.

    ``param_groups`` are those of the torch optimizer: learning-rate schedulers work. State lives where the parameters
    live, in parts of at most a sixteenth of the device budget, and ``state[p]`` shows it there: as views, or as
    `StateInParts` where a parameter is so large that it was cut.
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
        listed = as_groups(groups)
        small = template(optimizer_class, listed, options)
        filled = [{**made, "params": given["params"]} for made, given in zip(small.param_groups, listed, strict=True)]
        try:
            super().__init__(filled, dict(small.defaults))
        except (TypeError, ValueError) as error:
            raise InputError(f"an optimizer cannot take these groups of parameters: {error}") from error
        self.update: Update = "step" if update == "step" else "backward"
        parameters = self._listed()
        self._mine = frozenset(map(id, parameters))
        self._used = self._gone = False
        self._check_alone()
        self._masters = frozenset(id(p) for p in parameters if master == "auto" and p.dtype in _SIXTEEN_BITS)
        self._options = dict(options)
        self._rule = Rule(optimizer_class, self._options, lambda: self.param_groups, self._masters)
        self._tried = Tried(
            optimizer_class, self._options, lambda: self.param_groups, self._masters, handle.store.device
        )
        inside = {id(p) for block in handle.store.blocks for p in block.parameters}
        mine = [p for p in parameters if id(p) not in inside]
        self._outside = Outside(self._class, self._options, self.param_groups, mine, self._masters) if mine else None
        self._lay_out()
        self._showing = Showing(handle.store, self._rule.scalars)
        handle.attach(self, Updater(self._rule.run, update == "backward"))

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
        found = self._tried.shape(parameter).tensors if id(parameter) in self._mine else ()
        sizes = (torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in found)
        return sum(rounded_nbytes(nbytes, self._handle.store.device) for nbytes in sizes)

    def scalar_nbytes(self) -> int:
        """Bytes of an accelerator that scalars of the state take: they stay there, those of streamed parameters too."""
        device = self._handle.store.device
        if not is_accelerator(device):
            return 0
        found = (self._tried.shape(p).scalars for group in self.param_groups for p in group["params"])
        return sum(found) * rounded_nbytes(1, device)

    def state_tensors(self, parameter: torch.Tensor) -> Sequence[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of the tensors that its state has, or will have, its fp32 master included."""
        return self._tried.shape(parameter).tensors if parameter.requires_grad else ()

    def bytes_per_second(self) -> float | None:
        """Bytes that updates of blocks read and write per second, tried on a tensor like their largest parameters;
        None where that is not known."""
        trained = [p for block in self._handle.store.blocks for p in block.parameters if p.requires_grad]
        mine = [p for p in trained if id(p) in self._mine]
        return self._tried.bytes_per_second(max(mine, key=lambda p: p.nbytes)) if mine else None

    def cut_finer(self) -> bool:
        """Cut the state into smaller parts, which updates need less memory for; what it holds stays. Returns whether
        there was anything to cut. No call may be under way."""
        store = self._handle.store
        if not self._finer:
            return False
        cut = self._cut(self._finer.pop())
        if all(block.state_parts == parts for block, parts in zip(store.blocks, cut, strict=True)):
            return False
        store.settle()
        store.place(frozenset())
        for block, parts in zip(store.blocks, cut, strict=True):
            saved = self._showing.saved(block)
            store.drop(Kind.OPTIMIZER_STATE, block.index)
            block.state_parts = parts
            self._showing.follow(block)
            for parameter, found in saved.items():
                self._showing.written(parameter, found)
                self._rule.restored(parameter, self._rule.scalars[id(parameter)], self._showing.pieces_of(parameter))
        self.state.clear()
        self._show_state()
        return True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update what ``update="backward"`` has not updated yet; returns the closure's value."""
        self._check_current("step()")
        if self._gone and not self._rule.updated:
            raise GradientError(
                "step() came after a state was loaded over the updates of the last backward (update='backward'), and "
                "the gradients of blocks are gone; run a backward first"
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._handle.run_step()
        if self._outside is not None:
            self._outside.step(self.param_groups)
        self._used, self._rule.updated, self._gone = True, False, False
        self._show_state()
        return loss

    def check_stepped(self, what: str) -> None:
        """Raise GradientError where ``what`` comes while blocks are a step ahead of the rest of the model."""
        if self.update == "backward" and self._rule.updated:
            raise GradientError(
                f"{what} came after a backward without its optimizer.step(): with update='backward' that backward has "
                "updated the blocks already, so gradients cannot be accumulated over several backwards, and no step "
                "can be left out; call optimizer.step() after each backward, or use update='step'"
            )

    def check_forward(self) -> None:
        """Raise GradientError where a forward comes too early, or gradients of the last step are still there."""
        self.check_stepped("a forward")
        if not torch.is_grad_enabled():
            return
        if self.update == "backward" and self._outside is not None and self._outside.has_taken():
            raise GradientError(
                "a forward came after optimizer.step() without zero_grad(): gradients would be accumulated, except "
                "those of blocks, which update='backward' updates at once; call optimizer.zero_grad() before it"
            )

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
            key: {name: shown(value) for name, value in entries.items()} for key, entries in found["state"].items()
        }
        return found

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

    def _check_alone(self) -> None:
        """Raise InputError where one that was made for other parameters is still to be used: two at a time, each with
        a part of the model, as plain PyTorch has them, would be taken for one that replaces the other."""
        other = self._handle.optimizer
        if other is not None and not other._used and other._mine.isdisjoint(self._mine):
            raise InputError(
                f"an optimizer for {len(self._mine)} parameters of a streamed model was asked for, but the model has "
                f"one for {len(other._mine)} others that was never stepped; there is one at a time, and a new one "
                "replaces it: make one with groups=[{'params': [...], 'lr': ...}, {'params': [...], ...}], or, for "
                "different classes, use torch's own for the smaller part (its state stays in memory)"
            )

    def _check_current(self, what: str) -> None:
        if self._handle.optimizer is not self:
            raise InputError(
                f"{what} was called on an optimizer whose state is gone: another tapestream.optimizer() was made for "
                "this model since. Use that one; for parts of the model with options "
                "of their own make one optimizer with groups=[{'params': [...], 'lr': ...}, ...]"
            )

    def _lay_out(self) -> None:
        store = self._handle.store
        mine = {id(p) for p in self._listed()}
        members = [
            [self._member(i, p) for i, p in enumerate(block.parameters) if id(p) in mine] for block in store.blocks
        ]
        largest = max((sum(one.nbytes for one in block) for block in members), default=0)
        self._members = members
        # What never moves needs no parts; a plan that was given knows those that it was made with.
        given = self._handle.given
        budget = (self._handle.budget if given is None else given.budget).device_nbytes
        limits = part_limits(None if store.home is Tier.DEVICE else budget, largest)
        cuts = [self._cut(limit) for limit in limits or (None,)]
        known = None if given is None else [cost.state_parts for cost in given.profile.blocks]
        sizes = [[tuple(part.nbytes for part in parts) for parts in cut] for cut in cuts[1:]]
        chosen = 1 if known is not None and known in sizes else 0
        self._finer = [] if chosen else list(limits[1:])
        store.settle()  # not before: until here the one that this one replaces may still be needed
        store.place(frozenset())
        store.drop(Kind.OPTIMIZER_STATE)
        for block, parts in zip(store.blocks, cuts[chosen], strict=True):
            block.state_parts = parts

    def _cut(self, limit: int | None) -> list[tuple[StatePart, ...]]:
        """The parts of every block for a limit of their bytes."""
        cut = []
        for block, members in zip(self._handle.store.blocks, self._members, strict=True):
            large = [one for one in members if limit is not None and one.nbytes > limit]
            divisible = {one.number for one in large if self._tried.may_be_cut(block.parameters[one.number])}
            members = [replace(one, divisible=one.number in divisible) for one in members]
            cut.append(state_parts(members, limit, together=self._together))
        return cut

    @property
    def _together(self) -> bool:
        """Whether the rule makes temporaries of all tensors at once: its foreach form does, the default on a GPU."""
        default = self._handle.store.device.type != "cpu"
        asked = [g.get("foreach") for g in self.param_groups if not g.get("fused")]
        return any(default if foreach is None else foreach for foreach in asked)

    def _member(self, number: int, parameter: torch.Tensor) -> Member:
        shape, dtype = tuple(parameter.shape), self._tried.target_dtype(parameter)
        if not parameter.requires_grad:  # its state, if it ever has any, is kept with the scalars
            return Member(number, shape, StateShape(()), 0)
        nbytes = parameter.numel() * dtype.itemsize
        temporary = 0 if self._tried.group_of(parameter).get("fused") else nbytes  # fused rules make none
        return Member(
            number, shape, self._tried.shape(parameter), temporary, nbytes if dtype is not parameter.dtype else 0
        )

    def _show_state(self) -> None:
        self._showing.show(self.state)
        if self._outside is not None:
            self.state.update(self._outside.shown())

    def _listed(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]
