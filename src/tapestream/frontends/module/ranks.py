"""More than one process, and what averages gradients over them: left alone where that is exact, refused by name
elsewhere."""

import sys
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from tapestream.costs import Machine, Profile
from tapestream.errors import InputError
from tapestream.executor.blocks import BlockStore
from tapestream.frontends.module.calls.anchor import hooked
from tapestream.frontends.module.calls.outside_sums import OutsideSums
from tapestream.frontends.module.one_plan import OnePlan, Shapes
from tapestream.frontends.module.plans.prepare import Prepared
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.optim.streamed import StreamedOptimizer
from tapestream.peers.agreement import Agreement
from tapestream.peers.divided import DividedBlocks
from tapestream.peers.exchange import Exchange, buffers_nbytes, gradients_nbytes
from tapestream.peers.peers import Peers
from tapestream.storage.blocks import ParameterBlock


class Ranks:
    """What a streamed model asks of the processes beside its own, and of DistributedDataParallel around or inside it.

    Ranks that train without a word to each other end with different models, and gradients of blocks that come and go
    never pass the hooks of DistributedDataParallel.
    """

    def __init__(
        self, model: nn.Module, store: BlockStore, peers: Peers | None, agreement: Agreement | None,
        divided: DividedBlocks | None = None,
    ) -> None:  # fmt: skip
        self.one_plan = None if agreement is None or divided is None else OnePlan(agreement, divided)
        self.shards = store.copies.shards.share.ranks if store.copies.shards is not None else 1
        self._model, self._store = model, store
        averaging = _averaging()
        self._inside = [m for m in model.modules() if averaging is not None and isinstance(m, averaging)]
        self.exchange: Exchange | None = None
        self._told = peers is not None
        if peers is not None and agreement is not None:
            most = len(list(model.parameters()))
            self.exchange = Exchange(agreement, peers.gradients, store.device, most, self._state)
            store.gradients.sharing = self.exchange
        self.outside = OutsideSums(self.exchange, store)

    # -- where blocks are divided: see `OnePlan` ---------------------------------------------------------------------

    def shapes(self, own: Shapes) -> Shapes:
        """Those that a plan for every rank's call must serve."""
        if self.one_plan is None:
            return own
        replaced = sorted((value.index, value.kind.value, number) for value, number, _ in self._store.replaced())
        return self.one_plan.shapes(own, self._state() + repr(replaced).encode())

    def machine(self, own: Machine) -> Machine:
        """The slowest of every link on any rank."""
        return own if self.one_plan is None else self.one_plan.machine(own)

    def profiles(self, own: list[Profile]) -> list[Profile]:
        """What holds for every rank."""
        return own if self.one_plan is None else self.one_plan.profiles(own)

    def begin(self, prepared: Prepared) -> None:
        """A call with these plans begins. Raises InputError, on every rank, where others have other plans."""
        if self.one_plan is not None:
            self.one_plan.begin(prepared)

    # -- sums --------------------------------------------------------------------------------------------------------

    def _state(self) -> bytes:
        """What must be the same on all ranks when a backward begins."""
        there = (self.outside.earlier.get(id(p), p.grad) is not None for p in self._model.parameters())
        return bytes(2 * p.requires_grad + had for p, had in zip(self._model.parameters(), there, strict=True))

    def exchanged_nbytes(self) -> list[int]:
        """Device bytes that summing each block's gradients may take beside them: those of a block that this rank has
        left out, as they are summed and as they go home. None in one process."""
        blocks = [] if self.exchange is None or self.one_plan is not None else self._store.blocks
        most = max((gradients_nbytes(block.parameters) for block in blocks), default=0)
        return [2 * most for _ in blocks]

    def buffers_nbytes(self, outside: Sequence[nn.Parameter]) -> int:
        """Device bytes of the buffers for all sums, those of parameters ``outside`` of blocks too."""
        if self.exchange is None:
            return 0
        inside = self._store.blocks if self.one_plan is None else []  # of shards, plans know what sums take
        every = (*(block.parameters for block in inside), outside)
        agreement = self.exchange.agreement
        return buffers_nbytes(every, agreement.size) + agreement.told_nbytes

    def followed(self, parameters: Iterable[nn.Parameter]) -> OutsideSums:
        """For a call that begins: who sums gradients of ``parameters``, which are in no block that moves."""
        self.outside.follow(parameters)
        return self.outside

    def check_step(self, parameters: Iterable[nn.Parameter], optimizer: StreamedOptimizer | None) -> None:
        """Raise GradientError, on every rank, where gradients of ``parameters`` are not the same on all, InputError
        where options of the optimizers are not."""
        self.outside.fail()
        if self.exchange is None or optimizer is None:
            return
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        said = f"{optimizer.optimizer_class.__name__}, update={optimizer.update!r}, where={optimizer.where!r}, {groups}"
        self.exchange.check_step([p.grad for p in parameters if p.grad is not None], said)

    def check_alone(self) -> None:
        """Raise InputError where a call is to train a model in one of several processes, and nobody said with whom."""
        if self._told:
            averaging = _averaging()
            if averaging is not None and (self._inside or averaging._active_ddp_module is not None):
                raise InputError(
                    f"a streamed {type(self._model).__name__} with peers= was called inside of "
                    "DistributedDataParallel, or holds one: leave it out, gradients are summed over ranks without it"
                )
            return
        group = sys.modules.get("torch.distributed")
        if group is None or not group.is_available() or not group.is_initialized():
            return
        processes = group.get_world_size()
        if processes > 1 and any(p.requires_grad for p in self._model.parameters()):
            raise InputError(
                f"a streamed {type(self._model).__name__} was called for training in a process group of {processes} "
                f"processes, {_APART}"
            )

    def check_seen(self, resident: Container[Value], *, alone: bool) -> None:
        """Raise InputError where DistributedDataParallel, in a group of one, would look for gradients before they are
        there. ``resident``: what stays on the device between steps; ``alone``: no other call awaits its backward."""
        averaging = _averaging()
        around = None if averaging is None else averaging._active_ddp_module
        for one in self._inside if around is None else [*self._inside, around]:
            averaged = {id(p) for p in one._module_parameters if p.requires_grad}
            if any(self._is_late(block, resident, averaged, alone) for block in self._store.blocks):
                raise InputError(
                    f"a streamed {type(self._model).__name__} was called inside of DistributedDataParallel, or holds "
                    "one, which looks for gradients of blocks before they are there; leave it out: in one process it "
                    "changes nothing"
                )

    def ignored(self, module: nn.Module) -> list[str]:
        """What DistributedDataParallel asks the outermost module for: names, as in ``state_dict()``, of parameters that
        it must leave alone. Raises InputError where there are several processes, and where none is left to it."""
        group = torch.distributed
        processes = group.get_world_size() if group.is_available() and group.is_initialized() else 1
        if processes > 1:
            raise InputError(
                "DistributedDataParallel was asked to average the gradients of a streamed "
                f"{type(self._model).__name__} over {processes} processes, {_SUMMED if self._told else _APART}"
            )
        inside = {id(p) for block in self._store.blocks for p in block.parameters}
        if all(id(p) in inside for p in module.parameters() if p.requires_grad):
            raise InputError(
                f"DistributedDataParallel was given a {type(module).__name__} of which all that is trained is "
                "streamed, which leaves nothing to it; leave it out: in one process it changes nothing"
            )
        return [name for name, p in module.named_parameters(remove_duplicate=False) if id(p) in inside]

    def _is_late(
        self, block: ParameterBlock, resident: Container[Value], averaged: Container[int], alone: bool
    ) -> bool:
        mine = [p for p in block.parameters if id(p) in averaged]
        on_device = self._store.home is Tier.DEVICE and not self._store.updates.eager
        stays = on_device or Value(Kind.GRADIENT, block.index) in resident
        return bool(mine) and not (stays and alone and not any(map(hooked, mine)))


def looks_of(model: nn.Module, blocks: Sequence[nn.Module]) -> list[str]:
    """What must be the same of a model on every rank that trains it: a line for each thing."""
    positions = {id(block): number for number, block in enumerate(blocks)}
    names = [f"block {positions[id(m)]} is {name}" for name, m in model.named_modules() if id(m) in positions]
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return [*names, *(f"{name}: {t.dtype} {list(t.shape)} requires_grad={t.requires_grad}" for name, t in tensors)]


_SUMMED = "which its peers= do without it: leave it out"
_APART = (
    "over which its gradients would not be averaged: say with whom it is trained, stream(..., peers=ts.Peers()). Runs "
    "that have nothing to do with each other start each without torch.distributed.init_process_group(). Calls under "
    "torch.no_grad() work in every process"
)


def _averaging() -> Any:
    """The class DistributedDataParallel, None where it is not loaded."""
    return getattr(sys.modules.get("torch.nn.parallel.distributed"), "DistributedDataParallel", None)
