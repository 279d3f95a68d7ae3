"""Ready networks and data for examples, tests and benchmarks; they use the public API only."""

from tapestream.models.gpt import GPT, Block, GPTConfig
from tapestream.models.text import Batches, load_bytes, standard_library_bytes

__all__ = ["GPT", "Batches", "Block", "GPTConfig", "load_bytes", "standard_library_bytes"]
