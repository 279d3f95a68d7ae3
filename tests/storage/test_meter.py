"""What `track_memory` and `watch_memory` count."""

import pytest
import torch

from tapestream.errors import InputError
from tapestream.storage.meter import MemoryMeter, track_memory, watch_memory


def test_peak_end_and_rise() -> None:
    with track_memory() as meter:
        kept = torch.empty(100)
        torch.empty(1000)
    assert (meter.peak_nbytes, meter.rise_nbytes, meter.end_nbytes) == (4400, 4400, 400)
    assert kept.nbytes == 400


def test_room_that_the_section_makes_first_does_not_hide_what_it_takes() -> None:
    with watch_memory() as watch:
        before = torch.empty(1000)
        with watch.measured() as meter:
            del before
            after = torch.empty(600)
    assert (meter.peak_nbytes, meter.rise_nbytes, meter.end_nbytes) == (0, 2400, -1600)
    assert after.nbytes == 2400


def freed(nbytes: int) -> MemoryMeter:
    """Within one watch, make a tensor and measure only its end."""
    with watch_memory() as watch:
        made = torch.empty(nbytes, dtype=torch.uint8)
        with watch.measured() as meter:
            del made
    return meter


def test_sizes_of_earlier_measurements_are_forgotten_within_a_watch() -> None:
    for size in range(400, 4000, 40):
        with track_memory():  # what lies at these addresses is known from here on, and freed unseen
            known = [torch.empty(size, dtype=torch.uint8) for _ in range(20)]
        del known
        assert freed(640).end_nbytes == -640


def test_a_pause_is_not_seen_and_ends() -> None:
    with watch_memory() as watch:
        with watch.paused():
            assert not torch._C._autograd._profiler_enabled()
            torch.empty(1000)
        with watch.measured() as meter:
            torch.empty(10)
    assert [nbytes for _, nbytes in meter.samples] == [40, 0]
    assert not torch._C._autograd._profiler_enabled()


def test_a_failing_section_leaves_nothing_on() -> None:
    with pytest.raises(ZeroDivisionError), watch_memory() as watch, watch.measured():
        raise ZeroDivisionError
    with track_memory() as meter:
        torch.empty(1)
    assert meter.peak_nbytes == 4


def test_inside_a_profiler_it_is_refused() -> None:
    with track_memory(), pytest.raises(InputError, match="profiler"), watch_memory():
        pass
