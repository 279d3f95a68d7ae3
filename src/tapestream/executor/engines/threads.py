"""`threads`: copies between RAM and disk beside compute, by the kernel or on a thread for each pair of tiers."""

import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_all
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TypeAlias

import torch

from tapestream.errors import InputError
from tapestream.executor.engines.flight import Flight
from tapestream.executor.engines.protocol import EngineStatistics, Lane, Ticket
from tapestream.storage import Region
from tapestream.storage.kernel_queue import KernelQueue, Pending, open_queue
from tapestream.storage.transfer import copy_bytes

_Job: TypeAlias = tuple[Future[None], Callable[[], None]]


class Worker:
    """A daemon thread that runs jobs in order; it ends after `close` or when the object is garbage collected."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run ``job`` after those submitted before; the future has its exception, if any."""
        future: Future[None] = Future()
        self._jobs.put((future, job))
        return future

    def close(self) -> None:
        """End the thread after the jobs submitted so far."""
        self._end()
        self._thread.join()


class DiskLanes:
    """Copies that end in, or start from, RAM and that the calling thread need not make: the kernel does where it can,
    else a `Worker` for each lane."""

    def __init__(self) -> None:
        self._workers: dict[Lane, Worker] = {}
        self._futures: dict[Ticket, Future[None]] = {}
        self._queue: KernelQueue | None = None
        self._asked = False
        self._pending: dict[Ticket, Pending] = {}
        self._process = os.getpid()

    def start(self, ticket: Ticket, before: Callable[[], None] | None = None) -> None:
        """Copy, after calling ``before`` on the lane's thread."""
        self._check_process()
        if not self._asked:
            self._queue, self._asked = open_queue(), True
        pending = _begun(ticket, self._queue) if self._queue is not None and before is None else None
        if pending is not None:
            self._pending[ticket] = pending
            return

        def job() -> None:
            if before is not None:
                before()
            transfer(ticket.source, ticket.target, ticket.nbytes)

        worker = self._workers.get(ticket.lane)
        if worker is None:
            source, target = ticket.lane
            worker = self._workers[ticket.lane] = Worker(f"tapestream {source.name} to {target.name}")
        self._futures[ticket] = worker.submit(job)

    def wait(self, ticket: Ticket, flight: Flight) -> None:
        """Block, with the GIL released, until the copy has ended, and end its flight; raises what ended it.
        Interrupted, it is still under way."""
        start = perf_counter()
        try:
            self._finish(ticket)
        except Exception as error:  # not an interrupt
            flight.end(ticket)
            flight.failed(ticket, error)
            raise
        finally:
            flight.waited_since(start)
        flight.end(ticket)

    def _finish(self, ticket: Ticket) -> None:
        """Nothing for what is not under way."""
        self._check_process()
        pending, future = self._pending.get(ticket), self._futures.get(ticket)
        if future is not None:
            future.exception()
            del self._futures[ticket]
            future.result()
        elif pending is not None and self._queue is not None:
            done = self._queue.finish(pending)
            del self._pending[ticket]
            if done != ticket.nbytes:
                transfer(ticket.source, ticket.target, ticket.nbytes)  # which says what is wrong, if it still is

    def _check_process(self) -> None:
        """Raise InputError in a child that was forked: it has none of the threads, and the files are its parent's."""
        if os.getpid() != self._process:
            raise InputError(
                "a forked child process asked for data in files, which belong to its parent; start the process with "
                "the method 'spawn' and make the model there, or give the child a plain copy"
            )

    def abandon(self) -> None:
        """Drop the copies that have not begun and block until those that have are over, whatever their result."""
        if self._queue is not None:
            self._queue.drain()
        self._pending.clear()
        wait_for_all([future for future in self._futures.values() if not future.cancel()])
        self._futures.clear()

    def close(self) -> None:
        """Abandon, then end the threads."""
        if self._queue is not None:
            self._queue.close()  # waits for what is under way; to drain it first would take as long again
        self.abandon()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()


class ThreadsEngine:
    """Copies run beside compute on one daemon thread per lane, made when the lane is first used."""

    name = "threads"

    def __init__(self) -> None:
        self._flight = Flight()
        self._lanes = DiskLanes()

    def copy(self, source: Region, target: Region, nbytes: int | None = None) -> Ticket:
        """See `CopyEngine.copy`."""
        ticket = self._flight.begin(source, target, nbytes)
        self._lanes.start(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> None:
        """See `CopyEngine.wait`."""
        self._lanes.wait(ticket, self._flight)

    def compute_begins(self, regions: Sequence[Region]) -> None:
        """See `CopyEngine.compute_begins`."""
        self._flight.check_arrived(regions)

    def compute_ended(self, regions: Sequence[Region]) -> None:
        """Nothing to do: compute on the CPU is over when its call returns."""

    def hand_over(self, regions: Sequence[Region]) -> None:
        """Nothing to do: what `wait` has returned for is over."""

    def on_host(self, regions: Sequence[Region]) -> Callable[[], None]:
        """See `CopyEngine.on_host`: what `wait` has returned for is over."""
        self.compute_begins(regions)
        return lambda: None

    def release(self, region: Region) -> None:
        """See `CopyEngine.release`. Raises GradientError while a copy uses the region."""
        self._flight.check_untouched(region)

    def abandon(self) -> None:
        """See `CopyEngine.abandon`."""
        self._flight.clear()
        self._lanes.abandon()

    def close(self) -> None:
        """See `CopyEngine.close`."""
        self._flight.clear()
        self._lanes.close()

    def statistics(self) -> EngineStatistics:
        """See `CopyEngine.statistics`."""
        return self._flight.statistics()


def transfer(source: Region, target: Region, nbytes: int) -> None:
    """Copy bytes between two regions of any tiers now, on this thread. Raises StorageError when a file fails."""
    if source.extent is not None:
        here = target.tensor is not None and target.tensor.is_cpu
        landing = target.memory[:nbytes] if here else torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        source.extent.read_into(landing)
        if target.extent is not None:
            target.extent.write_from(landing)
        elif not here:
            target.memory[:nbytes].copy_(landing)
    elif target.extent is not None:
        target.extent.write_from(source.memory[:nbytes].cpu())
    elif source.memory.is_cpu and target.memory.is_cpu:
        copy_bytes(target.memory[:nbytes], source.memory[:nbytes])
    else:
        target.memory[:nbytes].copy_(source.memory[:nbytes])


def _begun(ticket: Ticket, queue: KernelQueue) -> Pending | None:
    source, target = ticket.source, ticket.target
    if source.extent is None and target.extent is not None:
        return target.extent.start("write", source.memory, ticket.nbytes, queue)
    if source.extent is not None and target.extent is None:
        return source.extent.start("read", target.memory, ticket.nbytes, queue)
    return None


def _work(jobs: "SimpleQueue[_Job | None]") -> None:
    while (item := jobs.get()) is not None:
        future, job = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            job()
        except BaseException as error:  # it belongs to whoever waits, and the lane goes on
            future.set_exception(error)
        else:
            future.set_result(None)
        del item, future, job  # an idle thread must not keep regions alive
