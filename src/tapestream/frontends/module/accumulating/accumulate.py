"""`accumulate`: the gradients of several micro-batches, with weights that come once for all of them."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.given import arguments_of
from tapestream.frontends.module.accumulating.accumulation import Kind
from tapestream.frontends.module.accumulating.fitness import why_not_calls, why_not_model
from tapestream.frontends.module.accumulating.joint_call import JointCall
from tapestream.frontends.module.accumulating.joint_costs import joint_seconds, planned_together, seconds_of_calls
from tapestream.frontends.module.accumulating.losses import checked
from tapestream.frontends.module.accumulating.pieces import ApartUnknown, DrawsUnknown, Unfit
from tapestream.frontends.module.accumulating.start import Start
from tapestream.frontends.module.calls.gathering import after_a_backward
from tapestream.frontends.module.calls.ready import check_ready
from tapestream.frontends.module.calls.refused import or_split
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.frontends.module.stream import handle_of
from tapestream.runner.ambient import TorchGenerators
from tapestream.runner.private import tensors_in

if TYPE_CHECKING:
    from tapestream.frontends.module.streamed import Streamed

Loss = Callable[[Any, Any], torch.Tensor]


def accumulate(model: nn.Module, micro_batches: Iterable[Any], loss: Loss) -> list[torch.Tensor]:
    """Add up the gradients of ``micro_batches``, and return their losses, detached, in order: the same bits as

        for micro_batch in micro_batches:
            loss(model(micro_batch), micro_batch).backward()

    leaves in gradients, losses, buffers and generators. ``model``: made by `stream`. A micro-batch is a tensor, a tuple
    or list of arguments of the model, or a mapping of arguments by name. ``loss`` gives a scalar for one micro-batch;
    divide by their number there for a mean.

    Where the plan says that it is faster, all micro-batches pass a block before the next block, forward and backward,
    so that weights move twice a step and not twice a micro-batch; the states of all lie in memory instead. Elsewhere,
    and where the bits would not be the same, they go one after the other; ``print(tapestream.report(model))`` says
    which it was, and why. With ``update="backward"`` blocks are updated once, with the sum, and where micro-batches
    cannot go together that raises InputError. The first step of a model that draws random numbers runs one after the
    other and learns how many.

    From GreedySnake (arXiv 2512.17570), which calls it vertical scheduling. Raises InputError for no micro-batch and
    for a loss that is no scalar, and what the model's call and ``backward()`` raise.
    """
    handle, given = handle_of(model), _checked(micro_batches, loss)
    if not torch.is_grad_enabled():
        raise InputError("accumulate was called inside no_grad(), where nothing is differentiated; call it outside")
    one_by_one = _OneByOne(handle, model, given, loss)
    if len(given) == 1:
        return one_by_one.run(None, "there is one")
    with handle._live.working():
        check_ready(handle)
        handle._live.make_way(handle.last)
    kind, why = None, why_not_model(handle, given)
    if why is None:
        found = _plans_in_parts(handle, given)
        kind = _kind_of(handle, found)
        losses = _together(handle, kind, found, one_by_one)
        if losses is not None:
            return losses
        why = kind.why
    if handle.update == "backward":
        raise InputError(
            f"accumulate with update='backward' updates each block once, after all micro-batches have passed it, which "
            f"these cannot do together: {why}; make the optimizer with update='step'"
        )
    return one_by_one.run(kind, why)


def _checked(micro_batches: Iterable[Any], loss: Loss) -> list[Any]:
    if isinstance(micro_batches, (torch.Tensor, Mapping, str)):
        example = ", such as batch.chunk(8)" if isinstance(micro_batches, torch.Tensor) else ""
        raise InputError(
            f"accumulate: micro_batches is a {type(micro_batches).__name__}, which is one batch; give a list of "
            f"micro-batches{example}"
        )
    if not callable(loss):
        raise InputError(
            f"accumulate: loss is a {type(loss).__name__}; give a function loss(output, micro_batch) of one micro-batch"
            " (a loss of all of them at once needs one batch: call model(batch) and backward())"
        )
    given = list(micro_batches)
    if not given:
        raise InputError("accumulate: there are no micro-batches; give at least one, or skip this step")
    return given


class _OneByOne:
    """The loop of plain PyTorch. ``keys``: of what each micro-batch draws."""

    def __init__(self, handle: "Streamed", model: nn.Module, given: Sequence[Any], loss: Loss) -> None:
        self._handle, self.given, self.loss = handle, given, loss
        self.forwards = [partial(_loss_of, model, loss, one) for one in given]
        self.keys = [tuple(t.shape for t in tensors_in([one])) for one in given]

    def run(self, kind: Kind | None, why: str | None) -> list[torch.Tensor]:
        """The losses, detached. Learns what forwards draw where they may go together."""
        handle, losses = self._handle, list[torch.Tensor]()
        learns = kind is not None and kind.joint is not None
        for key, forward in zip(self.keys, self.forwards, strict=True):
            before = TorchGenerators.capture(handle.device) if learns else None
            found = checked(forward())
            if before is not None:
                handle.accumulation.learn(key, before, TorchGenerators.capture(handle.device))
            torch.autograd.backward(found)
            losses.append(found.detach())
            del found
        handle.accumulation.say(len(self.given), why, None if kind is None else kind.seconds)
        return losses

    def rehearse(self) -> None:
        """Learn what each draws, by forwards that leave no trace."""
        for key, forward in zip(self.keys, self.forwards, strict=True):
            if key not in self._handle.accumulation.draws:
                before = TorchGenerators.capture(self._handle.device)
                checked(forward())
                self._handle.accumulation.learn(key, before, TorchGenerators.capture(self._handle.device))
                before.restore()


def _loss_of(model: nn.Module, loss: Loss, micro_batch: Any) -> torch.Tensor:
    args, kwargs = arguments_of(micro_batch)
    return loss(model(*args, **kwargs), micro_batch)


def _together(handle: "Streamed", kind: Kind, found: Sequence[Prepared], calls: _OneByOne) -> list[torch.Tensor] | None:
    """The losses, None where ``kind`` says why these micro-batches do not go together."""
    known, given = handle.accumulation.draws, tensors_in([calls.given])
    while kind.joint is not None:
        draws = [known.get(key) for key in calls.keys]
        if any(key in known and known[key] is None for key in calls.keys):
            kind.give_up("how many random numbers each of them draws is not the same each time")
            break
        start = Start(handle.model, handle.blocks, calls.loss, given, handle.device)
        try:
            losses = JointCall(handle, kind.joint, found, calls.forwards, draws, kind.apart_nbytes, start).run()
            handle.accumulation.say(len(found), None, kind.seconds)
            return losses
        except ApartUnknown as apart:
            start.restore(str(apart))
            kind.apart_nbytes = apart.nbytes
            _plan(handle, kind)
        except DrawsUnknown as unknown:
            start.restore(str(unknown))
            kind.why = str(unknown)
            if handle.update != "backward":
                break
            calls.rehearse()
        except Unfit as unfit:
            start.restore(str(unfit))
            kind.fail(str(unfit))
            break
    return None


def _plans_of(handle: "Streamed", given: Sequence[Any]) -> list[Prepared]:
    """Of each micro-batch by itself. Raises BudgetError where one of them does not fit."""
    found = []
    for one in given:
        args, kwargs = arguments_of(one)
        plan = partial(handle.prepare_for, args, kwargs)
        found.append(or_split(handle, handle.prepare_for, args, kwargs, plan))
    return found


def _plans_in_parts(handle: "Streamed", given: Sequence[Any]) -> list[Prepared]:
    """The same, with chains that end where work comes between blocks, which micro-batches that go together do each by
    itself; where that does not fit, those of calls."""
    found = _plans_of(handle, given)
    if not any(cut is not None for one in found for segment in one.segments for cut in segment.cuts):
        return found
    try:
        with handle.accumulation.parting():
            return _plans_of(handle, given)
    except BudgetError:
        return found


def _kind_of(handle: "Streamed", found: Sequence[Prepared]) -> Kind:
    """What is known of micro-batches with these plans."""
    distinct = {id(one): one for one in found}
    key, known = (frozenset(distinct), len(found)), handle.accumulation.kinds
    if key in known:
        return known[key]
    kind = handle.accumulation.add(key, Kind(list(distinct.values()), len(found)))
    kind.why = why_not_calls(handle, kind.found)
    if kind.why is None:
        _plan(handle, kind)
    return kind


def _plan(handle: "Streamed", kind: Kind) -> None:
    """Plan for all micro-batches together, and choose."""
    kind.together = kind.seconds = None
    try:
        together = planned_together(handle, kind.found, kind.count, kind.apart_nbytes)
    except BudgetError as error:
        if handle.update == "backward":
            raise error.saying(
                f"{error.message} (accumulate: with update='backward' all {kind.count} micro-batches pass a block "
                "before its update)"
            ) from None
        kind.why = f"together they need {error.least_nbytes or 'more'} bytes"
        return
    if handle.update != "backward":  # which updates blocks once, and has no other order
        kind.seconds = joint_seconds(together), _seconds_one_by_one(handle, kind)
        if kind.seconds[0] >= kind.seconds[1]:
            kind.why = "that is faster"
            return
    kind.together = together


def _seconds_one_by_one(handle: "Streamed", kind: Kind) -> float:
    first = max(seconds_of_calls([one]) for one in kind.found)
    try:
        others = [after_a_backward(handle, one, handle._beside) for one in kind.found]
    except BudgetError:  # beside the first one's gradients, the second does not fit
        return math.inf
    return first + (kind.count - 1) * max(seconds_of_calls([one]) for one in others)
