"""What surrounds a run besides its inputs."""

import numpy

from tapestream.runner.ambient import HostGenerators, host_mark


def test_a_normally_distributed_number_that_waits_is_part_of_numpys_state() -> None:
    """NumPy draws them in pairs: the second leaves the words alone from which the first was made."""
    numpy.random.seed(0)
    numpy.random.standard_normal()
    before, mark = HostGenerators.capture(), host_mark()
    second = numpy.random.standard_normal()
    assert host_mark() != mark
    assert not before.equals(HostGenerators.capture())
    before.restore()
    assert before.equals(HostGenerators.capture())
    assert numpy.random.standard_normal() == second


def test_what_numpy_remembers_of_a_distribution_is_no_state() -> None:
    """Binomial draws prepare for the next with the same numbers; no state says so, and setting one leaves it."""
    numpy.random.seed(0)
    before = HostGenerators.capture()
    numpy.random.binomial(77, 0.4, 3)
    assert not before.equals(HostGenerators.capture())
    before.restore()
    assert before.equals(HostGenerators.capture())


def test_other_generators_are_seen_too() -> None:
    held = numpy.random.get_bit_generator()  # type: ignore[attr-defined]
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))  # type: ignore[attr-defined]
        before = HostGenerators.capture()
        assert before.equals(HostGenerators.capture())
        first = numpy.random.standard_normal()
        assert not before.equals(HostGenerators.capture())
        before.restore()
        assert numpy.random.standard_normal() == first
    finally:
        numpy.random.set_bit_generator(held)  # type: ignore[attr-defined]
