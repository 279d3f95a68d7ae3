"""The judge of schedules: validity, peaks, makespan. Standard library only."""

from tapestream.simulate.result import Simulation
from tapestream.simulate.run import simulate

__all__ = ["Simulation", "simulate"]
