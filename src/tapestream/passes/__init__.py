"""Schedule in, Schedule out: where parameter blocks live, and when their copies start."""

from tapestream.passes.hoist import hoist
from tapestream.passes.parameters import stream_parameters
from tapestream.passes.residency import choose_resident, traffic

__all__ = ["choose_resident", "hoist", "stream_parameters", "traffic"]
