"""Gradients of any size in the memory you have: exact backpropagation under a byte budget."""

from importlib.metadata import PackageNotFoundError, version

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.errors import (
    BudgetError,
    GradientError,
    InputError,
    ScheduleError,
    StorageError,
    TapestreamError,
)
from tapestream.frontends.chain import Chain
from tapestream.frontends.join import Join
from tapestream.frontends.loop.loop import Loop
from tapestream.frontends.loss import linear_cross_entropy
from tapestream.frontends.module.homes.home import Home
from tapestream.frontends.module.optimizer import optimizer
from tapestream.frontends.module.stream import stream, unstream
from tapestream.frontends.plan import plan, report, verify
from tapestream.frontends.program.program import Program
from tapestream.frontends.saving.save import load, save
from tapestream.ir import Schedule, Tier
from tapestream.optim.grad_scaler import GradScaler
from tapestream.planners import planners
from tapestream.planning.measure import measure_machine
from tapestream.planning.plan import Plan
from tapestream.runner.ambient import recomputing
from tapestream.simulate import Simulation, simulate
from tapestream.storage.meter import track_memory

try:
    __version__ = version("tapestream")
except PackageNotFoundError:  # run from its source, with PYTHONPATH
    __version__ = "of no version"

__all__ = [
    "BlockCost",
    "Budget",
    "BudgetError",
    "Chain",
    "GradScaler",
    "GradientError",
    "Home",
    "InputError",
    "Join",
    "Link",
    "Loop",
    "Machine",
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
    "track_memory",
    "unstream",
    "verify",
]
