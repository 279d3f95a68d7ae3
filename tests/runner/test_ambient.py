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
