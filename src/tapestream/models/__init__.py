"""Ready networks and data for examples, tests and benchmarks; they use the public API only."""

from typing import TYPE_CHECKING

from tapestream.late import offer

if TYPE_CHECKING:
    from tapestream.models.dranet import DRANet
    from tapestream.models.folders import ClassFolders, MaskFolders
    from tapestream.models.gpt import GPT, Block, GPTConfig
    from tapestream.models.images import Digits, ImageBatches, Shapes
    from tapestream.models.resnet import ResNet
    from tapestream.models.shapes import DRANetConfig, ResNetConfig
    from tapestream.models.text import Batches, load_bytes, standard_library_bytes

_HOMES = {
    "DRANet": "tapestream.models.dranet",
    "DRANetConfig": "tapestream.models.shapes",
    "ClassFolders": "tapestream.models.folders",
    "MaskFolders": "tapestream.models.folders",
    "GPT": "tapestream.models.gpt",
    "Block": "tapestream.models.gpt",
    "GPTConfig": "tapestream.models.gpt",
    "Digits": "tapestream.models.images",
    "ImageBatches": "tapestream.models.images",
    "Shapes": "tapestream.models.images",
    "ResNet": "tapestream.models.resnet",
    "ResNetConfig": "tapestream.models.shapes",
    "Batches": "tapestream.models.text",
    "load_bytes": "tapestream.models.text",
    "standard_library_bytes": "tapestream.models.text",
}

__all__ = [
    "GPT", "Batches", "Block", "ClassFolders", "DRANet", "DRANetConfig", "Digits", "GPTConfig", "ImageBatches",
    "MaskFolders", "ResNet", "ResNetConfig", "Shapes", "load_bytes", "standard_library_bytes",
]  # fmt: skip

if not TYPE_CHECKING:  # for which names that there are not would all be there
    __getattr__, __dir__ = offer(__name__, _HOMES)
