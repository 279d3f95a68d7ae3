"""Gradients of any size in the memory you have: exact backpropagation under a byte budget.

    import tapestream as ts

What to differentiate, within ``budget=``:

    stream      a network whose parameters, gradients and optimizer state move between GPU, RAM and disk
    Chain       functions that are called one after the other
    Join        chains that run side by side and meet
    Loop        one step, any number of times
    Program     any code that calls PyTorch, as it is
    linear_cross_entropy   a head and its loss, in chunks

Training a streamed model:

    optimizer   an optimizer of PyTorch's, over parameters that are elsewhere
    GradScaler  loss scaling for it
    accumulate  several micro-batches, block by block
    unstream    make it a plain model again
    save, load  a run that goes on where it stopped
    to_dcp, from_dcp       exchange with torch.distributed.checkpoint
    Peers, whole, sum_over_ranks, LightningStrategy        several processes

Before, and afterwards:

    plan        what a step would take, and what would help, before anything is allocated
    verify      are these the gradients of plain PyTorch, and is this within the budget?
    report      what a call took, and who held it
    measure_machine        how fast copies are here
    track_memory           bytes that code allocates
    recomputing            is this a recompute?

Values:

    Budget, Home, Machine, Link, Tier      how much, where, how fast
    Plan, Schedule, Simulation             what is done when, and what that takes
    Profile, StageCost, BlockCost          what stages and parameter blocks cost
    planners, simulate                     each published algorithm by name, and the judge of their schedules

Errors, and a warning:

    TapestreamError  the class of all these errors
    BudgetError      it does not fit: the least that does, and what would help
    BudgetExceeded   the warning: more was held than allowed, and by whom
    GradientError    a gradient would have been wrong
    InputError       this cannot be done as it was asked for
    ScheduleError    a schedule breaks a rule
    StorageError     a disk is full, or a file or another rank is gone
"""

from typing import TYPE_CHECKING, Any

from tapestream.late import offer

if TYPE_CHECKING:
    from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
    from tapestream.errors import (
        BudgetError,
        BudgetExceeded,
        GradientError,
        InputError,
        ScheduleError,
        StorageError,
        TapestreamError,
    )
    from tapestream.frontends.chain import Chain
    from tapestream.frontends.join import Join
    from tapestream.frontends.lightning import LightningStrategy
    from tapestream.frontends.loop.loop import Loop
    from tapestream.frontends.loss import linear_cross_entropy
    from tapestream.frontends.module.accumulating.accumulate import accumulate
    from tapestream.frontends.module.homes.home import Home
    from tapestream.frontends.module.optimizer import optimizer
    from tapestream.frontends.module.stream import stream, unstream
    from tapestream.frontends.module.whole import whole
    from tapestream.frontends.plan import plan, verify
    from tapestream.frontends.program.program import Program
    from tapestream.frontends.report import report
    from tapestream.frontends.saving.dcp import from_dcp, to_dcp
    from tapestream.frontends.saving.save import load, save
    from tapestream.ir import Schedule, Tier
    from tapestream.optim.grad_scaler import GradScaler
    from tapestream.peers.peers import Peers
    from tapestream.peers.sums import sum_over_ranks
    from tapestream.planners import planners
    from tapestream.planning.measure import measure_machine
    from tapestream.planning.plan import Plan
    from tapestream.runner.ambient import recomputing
    from tapestream.simulate import Simulation, simulate
    from tapestream.storage.meter import track_memory

    __version__: str

_HOMES = {
    "BlockCost": "tapestream.costs",
    "Budget": "tapestream.costs",
    "Link": "tapestream.costs",
    "Machine": "tapestream.costs",
    "Profile": "tapestream.costs",
    "StageCost": "tapestream.costs",
    "BudgetError": "tapestream.errors",
    "BudgetExceeded": "tapestream.errors",
    "GradientError": "tapestream.errors",
    "InputError": "tapestream.errors",
    "ScheduleError": "tapestream.errors",
    "StorageError": "tapestream.errors",
    "TapestreamError": "tapestream.errors",
    "Chain": "tapestream.frontends.chain",
    "Join": "tapestream.frontends.join",
    "LightningStrategy": "tapestream.frontends.lightning",
    "Loop": "tapestream.frontends.loop.loop",
    "linear_cross_entropy": "tapestream.frontends.loss",
    "accumulate": "tapestream.frontends.module.accumulating.accumulate",
    "Home": "tapestream.frontends.module.homes.home",
    "optimizer": "tapestream.frontends.module.optimizer",
    "stream": "tapestream.frontends.module.stream",
    "sum_over_ranks": "tapestream.peers.sums",
    "unstream": "tapestream.frontends.module.stream",
    "whole": "tapestream.frontends.module.whole",
    "plan": "tapestream.frontends.plan",
    "report": "tapestream.frontends.report",
    "verify": "tapestream.frontends.plan",
    "Program": "tapestream.frontends.program.program",
    "from_dcp": "tapestream.frontends.saving.dcp",
    "to_dcp": "tapestream.frontends.saving.dcp",
    "load": "tapestream.frontends.saving.save",
    "save": "tapestream.frontends.saving.save",
    "Schedule": "tapestream.ir",
    "Tier": "tapestream.ir",
    "GradScaler": "tapestream.optim.grad_scaler",
    "Peers": "tapestream.peers.peers",
    "planners": "tapestream.planners",
    "measure_machine": "tapestream.planning.measure",
    "Plan": "tapestream.planning.plan",
    "recomputing": "tapestream.runner.ambient",
    "Simulation": "tapestream.simulate",
    "simulate": "tapestream.simulate",
    "track_memory": "tapestream.storage.meter",
}

__all__ = [
    "BlockCost",
    "Budget",
    "BudgetError",
    "BudgetExceeded",
    "Chain",
    "GradScaler",
    "GradientError",
    "Home",
    "InputError",
    "Join",
    "LightningStrategy",
    "Link",
    "Loop",
    "Machine",
    "Peers",
    "Plan",
    "Profile",
    "Program",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "StageCost",
    "StorageError",
    "TapestreamError",
    "Tier",
    "accumulate",
    "from_dcp",
    "linear_cross_entropy",
    "load",
    "measure_machine",
    "optimizer",
    "plan",
    "planners",
    "recomputing",
    "report",
    "save",
    "simulate",
    "stream",
    "sum_over_ranks",
    "to_dcp",
    "track_memory",
    "unstream",
    "verify",
    "whole",
]

if not TYPE_CHECKING:  # for which names that there are not would all be there
    _offered, __dir__ = offer(__name__, _HOMES)

    def __getattr__(name: str) -> Any:
        return _version() if name == "__version__" else _offered(name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tapestream")
    except PackageNotFoundError:  # run from its source, with PYTHONPATH
        return "of no version"
