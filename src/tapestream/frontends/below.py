"""`Below`: what lies below the device beside parameter blocks: a folder, host memory, the links and their speeds."""

import functools
import math
import os
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from tapestream.accelerator.device import is_accelerator
from tapestream.costs import Budget, Machine, Profile
from tapestream.errors import BudgetError, InputError
from tapestream.executor.engines import CopyEngine, EngineStatistics, make_engine
from tapestream.executor.travel.cargo import has_storage, head_of
from tapestream.executor.travel.parcel import Parcels
from tapestream.frontends.available import host_limit
from tapestream.ir.actions import Tier
from tapestream.planning.auto import make_plan
from tapestream.planning.measure import measure_machine
from tapestream.planning.plan import Plan
from tapestream.storage.disk import DiskFolder
from tapestream.storage.pool import Pool

NEVER_MOVE = frozenset(
    ("store_all", "periodic", "bisection", "revolve", "rotor", "binomial", "mixed", "online", "least_peak", "join")
)
"""Planners that do not ask how fast the links are."""
_HOMES = ("auto", "device", "host", "disk")


class Below:
    """The tiers where a chain on ``device`` may put what it keeps. Nothing is made or measured before it is needed.

    ``home`` is the slowest tier that may be used: "device" (none below), "host" (GPU only), "disk" (needs ``folder``;
    on a GPU by way of the host, which is used too), "auto" (the slowest there is). ``machine`` None: speeds are
    measured. ``beside``: the pool that shares the budget. Raises InputError for a home that cannot be.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        home: str,
        folder: str | os.PathLike[str] | None,
        budget: Budget,
        machine: Machine | None,
        engine: str,
        beside: Pool | None = None,
    ) -> None:
        self.device = device
        host = is_accelerator(device) or engine == "fake_streams"
        check_home(home, folder, host=host)
        self.tiers = frozenset(
            tier for tier, there in ((Tier.HOST, host), (Tier.DISK, folder is not None and home != "host")) if there
        )
        if home == "device":
            self.tiers = frozenset()
        self._path, self._budget, self._given, self._engine, self._beside = folder, budget, machine, engine, beside
        self._machine: Machine | None = None
        self._opened: tuple[Pool, CopyEngine] | None = None
        self._folder: DiskFolder | None = None
        self._left: deque[Parcels] = deque()

    def machine(self) -> Machine:
        """The links among these tiers: given, or measured once in a process, in about two seconds."""
        if self._machine is None:
            measured = self._given
            if measured is None:
                self._open()  # makes the folder
                path = self._path if Tier.DISK in self.tiers else None
                within = _power_of_four(self._budget.device_nbytes) if is_accelerator(self.device) else None
                measured = _measured(self.device, None if path is None else os.path.realpath(path), within)
            there = {Tier.DEVICE, *self.tiers}
            links = {lane: link for lane, link in measured.links.items() if there.issuperset(lane)}
            self._machine = replace(measured, links=links)
        return self._machine

    def host_nbytes(self) -> int | None:
        """Bytes of host memory that may be used; None where there is no such tier."""
        return host_limit(self._budget) if Tier.HOST in self.tiers else None

    def parcels(self, fixed: Iterable[torch.Tensor]) -> Parcels:
        """For one call. What lies in the same memory as one of ``fixed`` (the caller's), or not on the device, does
        not move. Raises StorageError where the folder cannot be used."""
        pool, engine = self._open()
        self.settle()
        heads = frozenset(head_of(t) for t in fixed if has_storage(t))
        return Parcels(pool, engine, lambda tensor, head: head in heads or self.elsewhere(tensor))

    def elsewhere(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on another device. A GPU may have been asked for without its number."""
        own, its = self.device, tensor.device
        return its.type != own.type or own.index not in (None, its.index)

    def leave(self, parcels: Parcels) -> None:
        """Give back what a call holds that is being garbage-collected: at the next call, as it is no time to wait for
        copies, nor, at the end of the program, for PyTorch to do anything at all."""
        parcels.leave()
        self._left.append(parcels)

    def settle(self) -> None:
        """Give back what calls have left that are gone."""
        while self._left:
            self._left.pop().close()

    def close(self) -> None:
        """Drop everything and remove the files, as garbage collection would."""
        self.settle()
        if self._opened is not None:
            pool, engine = self._opened
            engine.close()
            pool.close()
        if self._folder is not None:
            self._folder.close()

    def statistics(self) -> EngineStatistics:
        """What was moved, and how long calls were blocked, since the chain was made."""
        return EngineStatistics({}, 0, 0.0) if self._opened is None else self._opened[1].statistics()

    def _open(self) -> tuple[Pool, CopyEngine]:
        if self._opened is None:
            if self._path is not None and Tier.DISK in self.tiers:
                self._folder = DiskFolder(self._path)
            limits = {Tier.DEVICE: None, Tier.HOST: self.host_nbytes(), Tier.DISK: self._budget.disk_nbytes}
            pin = is_accelerator(self.device)
            pool = Pool(self.device, folder=self._folder, limits=limits, pin=pin, beside=self._beside)
            self._opened = pool, make_engine(self._engine, self.device)
        return self._opened


@functools.cache
def _measured(device: torch.device, path: str | None, within_nbytes: int | None) -> Machine:
    return measure_machine(device, path, within_nbytes=within_nbytes)


def _power_of_four(budget: int | None) -> int | None:
    """A part of the budget to measure in, one of few: a measurement takes seconds."""
    return None if budget is None else 4 ** max(6, int(math.log(max(1, budget), 4)) - 1)


def check_home(home: str, folder: object, *, host: bool) -> None:
    """Raise InputError for a home that cannot be."""
    check_folder(folder)
    if home not in _HOMES:
        raise InputError(f"home={home!r} was asked for; homes are 'auto', 'device', 'host' and 'disk'")
    if home == "host" and not host:
        raise InputError(
            "home='host' was asked for on the CPU, where the device's memory is the host's; use home='disk' with "
            "folder=..., or home='auto'"
        )
    if home == "disk" and folder is None:
        raise InputError("home='disk' was asked for without a folder; add folder='path/on/a/fast/disk'")
    if home in ("device", "host") and folder is not None:
        raise InputError(f"home={home!r} leaves nothing for folder={str(folder)!r}; use home='disk', or no folder")


def check_folder(folder: object) -> None:
    """Raise InputError for what cannot be the name of a folder."""
    if not isinstance(folder, str | os.PathLike | None) or folder == "":
        raise InputError(f"folder={folder!r} was given; it is the path of a folder, a str or pathlib.Path")


def plan_with(below: Below, profile: Profile, room: Budget, planner: str, knobs: dict[str, Any]) -> Plan:
    """The plan within ``room``, with the tiers that there are. Links are measured only where that may help."""
    if not below.tiers or planner in NEVER_MOVE:
        return _plan_without_tiers(profile, room, planner, knobs)
    if planner == "auto" and not knobs:
        with suppress(BudgetError):
            plan = make_plan(profile, room, Machine())
            if plan.simulation.forwards == profile.runs:
                return plan
    return make_plan(profile, room, below.machine(), planner=planner, **knobs)


def _plan_without_tiers(profile: Profile, room: Budget, planner: str, knobs: dict[str, Any]) -> Plan:
    try:
        return make_plan(profile, room, Machine(), planner=planner, **knobs)
    except InputError:
        plan = None
        with suppress(InputError, BudgetError):  # as if there were links and copies took no time
            plan = make_plan(profile, room, None, planner=planner, **knobs)
        if plan is None:
            raise
        if plan.simulation.bytes_moved:
            raise _nowhere(planner) from None
        return plan


def check_lanes(plan: Plan, below: Below) -> None:
    """Raise InputError where a plan moves something to a tier that there is not."""
    used = {tier for lane in plan.simulation.bytes_moved for tier in lane}
    if not used <= {Tier.DEVICE, *below.tiers}:
        raise _nowhere(plan.planner)


def _nowhere(planner: str) -> InputError:
    return InputError(
        f"planner {planner!r} moves states to a slower tier, and this chain has none; add folder='path/on/a/fast/disk' "
        "(on a GPU, host memory is one), or use a planner that only recomputes, such as 'rotor' or 'auto'"
    )
