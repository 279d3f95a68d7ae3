"""Text: what is read, and batches that are the same each time and go on where they stopped."""

from pathlib import Path

import pytest
import torch

from tapestream.errors import InputError
from tapestream.models import Batches, load_bytes, standard_library_bytes

DATA = torch.arange(200, dtype=torch.uint8)


def test_standard_library_is_source_without_tests_and_packages() -> None:
    data = standard_library_bytes()
    text = data.numpy().tobytes()
    assert data.dtype == torch.uint8
    assert 5e6 < data.numel() < 5e7
    assert b"class OrderedDict(dict)" in text
    assert b"class TestLongMessage" not in text  # of unittest's own tests
    assert b"tapestream" not in text
    assert torch.equal(data, standard_library_bytes())


def test_load_bytes_reads_a_file_and_a_folder_in_order(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"second")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.md").write_bytes(b"first ")
    (tmp_path / "c.bin").write_bytes(b"\0binary")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    assert bytes(load_bytes(tmp_path)) == b"first second"
    assert bytes(load_bytes(str(tmp_path / "b.txt"))) == b"second"
    assert bytes(load_bytes(tmp_path / "c.bin")) == b"\0binary"  # asked for by name


def test_load_bytes_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file or folder"):
        load_bytes(tmp_path / "nowhere")
    with pytest.raises(InputError, match="holds no text"):
        load_bytes(tmp_path)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(InputError, match=r"empty\.txt holds no text"):
        load_bytes(tmp_path / "empty.txt")


def test_batches_are_windows_of_the_data_shifted_by_one() -> None:
    tokens, targets = next(Batches(DATA, batch=5, sequence=7, seed=1))
    assert tokens.shape == targets.shape == (5, 7)
    assert tokens.dtype == targets.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)  # the data counts upwards


def test_every_place_is_reached_the_last_included() -> None:
    batches = Batches(DATA[:5], batch=64, sequence=3)
    assert set(next(batches)[0][:, 0].tolist()) == {0, 1}
    tokens, targets = next(Batches(DATA[:4], batch=2, sequence=3))
    assert tokens.tolist() == [[0, 1, 2]] * 2
    assert targets.tolist() == [[1, 2, 3]] * 2


def test_batches_are_deterministic_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    left, right, other = (Batches(DATA, 4, 9, seed=seed) for seed in (3, 3, 4))
    drawn = [next(left)[0] for _ in range(4)]
    torch.rand(3, generator=torch.Generator())
    assert all(torch.equal(tokens, next(right)[0]) for tokens in drawn)
    assert not torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], next(other)[0])
    assert torch.equal(before, torch.get_rng_state())


def test_batches_resume() -> None:
    batches = Batches(DATA, 4, 9, seed=3)
    for _ in range(3):
        next(batches)
    state = batches.state_dict()
    expected = [next(batches)[0] for _ in range(3)]
    resumed = Batches(DATA, 4, 9, seed=3)
    resumed.load_state_dict(state)
    assert all(torch.equal(tokens, next(resumed)[0]) for tokens in expected)


@pytest.mark.parametrize("other", [Batches(DATA, 4, 8), Batches(DATA, 4, 9, seed=1), Batches(DATA[1:], 4, 9)])
def test_a_state_of_other_batches_is_refused(other: Batches) -> None:
    batches = Batches(DATA, 4, 9)
    with pytest.raises(InputError, match="does not fit"):
        batches.load_state_dict(other.state_dict())
    with pytest.raises(InputError, match="does not fit"):
        batches.load_state_dict({**batches.state_dict(), "drawn": -1})


def test_the_same_text_is_asked_for_byte_for_byte() -> None:
    one, other = (Batches(torch.arange(200, dtype=torch.uint8) % n, 2, 16) for n in (7, 8))
    state = one.state_dict()
    with pytest.raises(InputError, match="byte for byte"):
        other.load_state_dict(state)
    other.load_state_dict({name: value for name, value in state.items() if name != "checksum"})  # of an earlier version
    with pytest.raises(InputError, match="does not fit"):
        one.load_state_dict({name: value for name, value in state.items() if name != "nbytes"})


@pytest.mark.parametrize(
    ("data", "batch", "sequence", "message"),
    [
        (DATA, 1, 200, r"needs 201 bytes of text, there are 200.*at most 199"),
        (DATA, 0, 4, "at least 1"),
        (DATA.long(), 1, 4, "uint8"),
        (DATA.view(2, 100), 1, 4, "one-dimensional"),
    ],
)
def test_impossible_batches_are_refused(data: torch.Tensor, batch: int, sequence: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Batches(data, batch, sequence)
