"""Ready networks and data for examples, tests and benchmarks; they use the public API only."""

from tapestream.models.dranet import DRANet, DRANetConfig
from tapestream.models.folders import ClassFolders, MaskFolders
from tapestream.models.gpt import GPT, Block, GPTConfig
from tapestream.models.images import Digits, ImageBatches, Shapes
from tapestream.models.resnet import ResNet, ResNetConfig
from tapestream.models.text import Batches, load_bytes, standard_library_bytes

__all__ = [
    "GPT", "Batches", "Block", "ClassFolders", "DRANet", "DRANetConfig", "Digits", "GPTConfig", "ImageBatches",
    "MaskFolders", "ResNet", "ResNetConfig", "Shapes", "load_bytes", "standard_library_bytes",
]  # fmt: skip
