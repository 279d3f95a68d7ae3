"""Bytes of many tensors in turn: whatever mixture lies in files and in RAM, they are those that the tensors show."""

import itertools

import pytest
import torch

from tapestream.errors import StorageError
from tapestream.storage import DiskFolder
from tapestream.storage.mapped import place_of
from tapestream.storage.read_ahead import pieces_of

LARGE = 9 * 2**20 + 4 * 1001  # several pieces, and no whole pages


@pytest.fixture(params=[True, False], ids=["direct", "buffered"])
def folder(tmp_path, request):
    folder = DiskFolder(tmp_path / "scratch", direct=request.param)
    yield folder
    folder.close()


def filled(extent, seed=0):
    """A mapping of the extent, which holds random numbers, not all of them on the disk yet."""
    extent.write_from(torch.zeros(extent.nbytes, dtype=torch.uint8))
    return extent.map().random_(generator=torch.Generator().manual_seed(seed))


def found(tensors, **more):
    """The bytes that came for each tensor, and in which order."""
    came = {name: [] for name, _ in tensors}
    order = []
    for name, piece in pieces_of(tensors, **more):
        assert piece.dtype is torch.uint8
        assert 0 < piece.numel() <= 2**24
        came[name].append(piece.clone())
        order.append(name)
    assert [name for name, _ in itertools.groupby(order)] == [name for name, t in tensors if t.numel()]
    return {name: torch.cat(pieces) if pieces else torch.empty(0).byte() for name, pieces in came.items()}


def check(tensors):
    for name, piece in found(tensors).items():
        expected = dict(tensors)[name].detach().contiguous().view(-1).view(torch.uint8)
        assert torch.equal(piece, expected), name


def test_tensors_that_follow_each_other_in_one_file(folder):
    memory = filled(folder.allocate(2 * LARGE))
    sizes = [4, 4096, 17 * 4, 2**20, 12, LARGE, 8, 300_000]
    starts = list(itertools.accumulate(sizes, initial=64))
    check(
        [
            (f"{i}", memory[at : at + n].view(torch.float32))
            for i, (at, n) in enumerate(zip(starts, sizes, strict=False))
        ]
    )


def test_tensors_in_any_order_and_overlapping(folder):
    generator = torch.Generator().manual_seed(1)
    memories = [filled(folder.allocate(n), seed) for seed, n in enumerate((LARGE, 4096, 100, 5 * 2**20))]
    tensors = []
    for i in range(60):
        memory = memories[int(torch.randint(len(memories), (), generator=generator))]
        a, b = sorted(torch.randint(memory.numel() + 1, (2,), generator=generator).tolist())
        tensors.append((f"{i}", memory[a:b]))
    check(tensors)


def test_files_and_ram_mixed(folder):
    memory = filled(folder.allocate(LARGE))
    square = memory[: 2**20].view(torch.float32).view(512, 512)
    check([
        ("whole", memory), ("ram", torch.randn(1000)), ("columns", square.t()), ("empty", memory[:0]),
        ("one", memory[5:6]), ("row", square[3]), ("large ram", torch.randn(5 * 2**20)), ("number", torch.tensor(3.0)),
        ("parameter", torch.nn.Parameter(square)), ("half", square[:, :256]),
    ])  # fmt: skip


def test_what_was_written_last_comes(folder):
    extent = folder.allocate(LARGE)
    memory = filled(extent)
    for value in range(3):
        memory[value * 2**20 :].fill_(value)
        check([("all", memory)])
        extent.write_from(torch.full((4096,), 9 + value, dtype=torch.uint8))
        check([("all", memory)])


def test_parts_come_in_their_order(folder):
    memory = filled(folder.allocate(LARGE))
    whole = torch.empty(0)
    pieces = [memory[4096:8192], torch.arange(7, dtype=torch.uint8), memory[:4096]]
    came = torch.cat([piece.clone() for _, piece in pieces_of([("whole", whole)], lambda _: pieces)])
    assert torch.equal(came, torch.cat(pieces))


def test_a_place_is_known_while_its_mapping_lives(folder):
    extent = folder.allocate(LARGE)
    memory = filled(extent)
    assert place_of(memory[100:200]) == (extent, 100)
    assert place_of(memory[4096:8192].view(torch.float32)[3:]) == (extent, 4108)
    assert place_of(memory.clone()) is None
    address = memory.data_ptr()
    del memory
    assert extent.address is None
    others = [torch.zeros(LARGE, dtype=torch.uint8) for _ in range(4)]  # one may come to lie there
    assert all(place_of(other) is None for other in others), address


def test_a_file_cut_short_is_named(folder):
    extent = folder.allocate(LARGE)
    memory = filled(extent)
    if not extent.direct:
        pytest.skip("a mapping cut short ends the process")
    extent.path.write_bytes(b"short")
    with pytest.raises(StorageError, match="cut short"):
        list(pieces_of([("all", memory)]))
