"""The judge of schedules: validity, peaks, makespan. Standard library only."""

from tapestream.simulate.result import Simulation
from tapestream.simulate.run import device_nbytes, simulate

__all__ = ["Simulation", "device_nbytes", "simulate"]
