"""The kernel's own transfers: every byte arrives, memory is held until it has, and what cannot be begun is said so."""

import gc
import os
import random
import weakref

import pytest
import torch

from tapestream.storage import DiskFolder
from tapestream.storage.kernel_queue import KernelQueue, open_queue
from tapestream.storage.slabs import Room
from tapestream.storage.transfer import aligned_empty
from tapestream.system.kernel_calls import Order

PAGE = 4096


@pytest.fixture
def queue():
    queue = open_queue()
    if queue is None:
        pytest.skip("this system has no asynchronous I/O")
    yield queue
    queue.close()


@pytest.fixture
def folder(tmp_path):
    folder = DiskFolder(tmp_path)
    if not folder.granule:
        pytest.skip("this file system has no direct I/O")
    yield folder
    folder.close()


def some(nbytes, seed, shift=0):
    memory = aligned_empty(nbytes + shift)[shift:]
    return memory.random_(generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [0, 64, 512, 5])
@pytest.mark.parametrize("nbytes", [1, 100, PAGE, 5000, 2**18, 2**18 + 512, 2**20])
def test_bytes_arrive(queue, folder, nbytes, shift):
    extent, memory, back = folder.allocate(nbytes), some(nbytes, 0, shift), some(nbytes, 1, shift)
    for verb, through in (("write", memory), ("read", back)):
        pending = extent.start(verb, through, nbytes, queue)
        if pending is None:  # too much to copy
            assert nbytes > 2**19
            assert shift % folder.granule
            return
        assert queue.finish(pending) == nbytes
    assert torch.equal(back, memory)


def test_many_at_once_in_any_order(queue, folder):
    chance, sizes = random.Random(0), [random.Random(n).randint(1, 200_000) for n in range(100)]
    extents, values = [folder.allocate(n) for n in sizes], [some(n, n, 64) for n in sizes]
    for verb, through in (("write", values), ("read", backs := [torch.zeros_like(v) for v in values])):
        begun = {}
        for number, (extent, memory) in enumerate(zip(extents, through, strict=True)):
            begun[number] = extent.start(verb, memory, memory.nbytes, queue)
            if begun[number] is None:  # no room: as if nothing had happened
                del begun[number]
                (extent.write_from if verb == "write" else extent.read_into)(memory)
        assert len(begun) > 10
        for number in chance.sample(sorted(begun), len(begun)):
            assert queue.finish(begun[number]) == sizes[number]
    assert all(torch.equal(a, b) for a, b in zip(backs, values, strict=True))
    whole = folder.allocate(2**19)
    pending = whole.start("write", some(2**19, 0, 64), 2**19, queue)  # all of its memory is free again
    assert pending is not None
    queue.finish(pending)


def test_what_cannot_be_begun(queue, folder):
    extent, memory = folder.allocate(2 * PAGE), some(2 * PAGE, 0)
    assert extent.start("write", memory, 100, queue) is None  # the rest of the page is to stay
    mapping = extent.map()
    assert extent.start("read", memory, 2 * PAGE, queue) is None  # it may hold what the disk does not
    del mapping
    assert folder.allocate(5 * 2**20).start("read", some(5 * 2**20, 0), 5 * 2**20, queue) is None
    other = folder.allocate(PAGE)
    for _ in range(2):
        queue.close()
    assert other.start("read", memory, PAGE, queue) is None
    folder.close()
    assert other.start("read", memory, PAGE, queue) is None


def test_a_file_that_ends_early_and_one_that_is_gone(queue, folder):
    extent, memory = folder.allocate(2 * PAGE), some(2 * PAGE, 0)
    os.truncate(extent.path, PAGE)
    assert queue.finish(extent.start("read", memory, 2 * PAGE, queue)) == PAGE
    nowhere = queue.start(10**6, memory, 2 * PAGE, 0, write=False, granule=512)
    assert nowhere is None or queue.finish(nowhere) < 0


def test_memory_is_held_until_its_transfer_is_over(queue, folder):
    extent, memory = folder.allocate(2**20), some(2**20, 0)
    gone = weakref.ref(memory)
    assert extent.start("read", memory, 2**20, queue) is not None
    del memory
    gc.collect()
    assert gone() is not None  # by the queue itself
    last = extent.start("read", some(2**20, 0), 2**20, queue)
    while gone() is not None:
        assert last is not None
        queue.finish(last)
        last = extent.start("read", last.memory, 2**20, queue)


def test_a_queue_that_goes_waits_for_what_is_under_way(folder):
    extent, memory = folder.allocate(2**20), some(2**20, 0)
    for _ in range(20):
        queue = open_queue()
        if queue is None:
            pytest.skip("this system has no asynchronous I/O")
        extent.start("write", memory, 2**20, queue)
        del queue
        gc.collect()
        back = torch.empty_like(memory)
        extent.read_into(back)
        assert torch.equal(back, memory)
        memory = some(2**20, _ + 1)


def test_a_forked_child_does_not_use_its_parents_queue(queue, folder):
    extent, memory = folder.allocate(PAGE), some(PAGE, 0)
    child = os.fork()
    if child == 0:
        os._exit(0 if extent.start("write", memory, PAGE, queue) is None else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert queue.finish(extent.start("write", memory, PAGE, queue)) == PAGE


def test_a_system_without_it(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "toaster")
    assert open_queue() is None
    with pytest.raises(OSError, match="io_setup"):
        KernelQueue((10**6, 0, 0, 0))


@pytest.mark.parametrize("place", ["take", "give_back"])
def test_one_may_be_waited_for_in_the_midst_of_another(queue, folder, monkeypatch, place):
    """On one thread: garbage collection closes calls at any moment."""
    extents, known = [folder.allocate(5000) for _ in range(3)], getattr(Room, place)
    memories, pending = [some(5000, n, 64) for n in range(3)], []

    def waiting(room, *given):
        for one in pending:
            queue.finish(one)
        return known(room, *given)

    for extent, memory in zip(extents[:2], memories, strict=False):
        pending.append(extent.start("write", memory, 5000, queue))
    monkeypatch.setattr(Room, place, waiting)
    last = extents[2].start("write", memories[2], 5000, queue)
    assert queue.finish(last) == 5000
    assert [queue.finish(one) for one in pending] == [5000, 5000]
    monkeypatch.undo()
    for extent, memory in zip(extents, memories, strict=True):
        back = torch.empty_like(memory)
        extent.read_into(back)
        assert torch.equal(back, memory)
    assert queue._room.unused


class Interrupted(BaseException):
    """As KeyboardInterrupt is, but of nobody else's making."""


@pytest.mark.parametrize("number", ["_submit_number", "_collect_number"])
def test_an_interrupt_right_after_a_call_of_the_kernel(queue, folder, monkeypatch, number):
    """The memory stays until the kernel is done with it, and what arrived meanwhile is not lost."""
    extent, memory, call = folder.allocate(5000), some(5000, 0, 64), queue._call

    def interrupted(asked, *given):
        found = call(asked, *given)
        if asked == getattr(queue, number):
            raise Interrupted
        return found

    gone = weakref.ref(memory)
    monkeypatch.setattr(queue, "_call", interrupted)
    try:
        queue.finish(extent.start("write", memory, 5000, queue))
    except Interrupted as error:
        del error
    assert queue._pending or queue._arrived
    monkeypatch.undo()
    expected = memory.clone()
    del memory
    gc.collect()
    queue.drain()
    assert not queue._pending
    assert queue._room.unused
    gc.collect()
    assert gone() is None
    back = torch.empty_like(expected)
    extent.read_into(back)
    assert torch.equal(back, expected)
    assert queue.finish(extent.start("read", back, 5000, queue)) == 5000  # it goes on


def test_nobody_waits_for_ever(folder):
    """After close, and in a forked child, whoever waits is told, and does it again by hand."""
    for closes in (True, False):
        queue, extent, memory = open_queue(), folder.allocate(PAGE), some(PAGE, 0)
        if queue is None:
            pytest.skip("this system has no asynchronous I/O")
        pending = extent.start("read", memory, PAGE, queue)
        if closes:
            queue.close()
            assert queue.finish(pending) < 0
        else:
            child = os.fork()
            if child == 0:
                os._exit(0 if queue.finish(pending) < 0 else 1)
            assert os.waitpid(child, 0)[1] == 0
            assert queue.finish(pending) == PAGE


def test_writes_are_of_whole_pages(queue, folder, monkeypatch):
    """Others would wait for each other, and the computing thread for them."""
    seen, call = [], queue._call

    def noted(asked, *given):
        if asked == queue._submit_number:
            seen.append(Order.from_address(given[2][0]).nbytes)
        return call(asked, *given)

    monkeypatch.setattr(queue, "_call", noted)
    for nbytes in (1, 512, 5000, 3 * PAGE):
        extent, memory = folder.allocate(nbytes), some(nbytes, 0)
        queue.finish(extent.start("write", memory, nbytes, queue))
        back = torch.empty_like(memory)
        extent.read_into(back)
        assert torch.equal(back, memory)
    assert seen == [PAGE, PAGE, 2 * PAGE, 3 * PAGE]
