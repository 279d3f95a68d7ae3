"""Options that several commands share, so that they are called and explained alike."""

from pathlib import Path
from typing import Annotated

import typer

from tapestream.cli.checks import OPTIMIZERS

Model = Annotated[
    str,
    typer.Argument(
        help="gpt, resnet or dranet with --layers and --width, or a published size: gpt3-175b, resnet50, dranet101."
    ),
]
Target = Annotated[
    str,
    typer.Argument(
        help="'gpt' with --layers and --width, a published size such as gpt3-175b, a folder with a Hugging Face "
        "config.json, or module:factory, a Python function that returns an nn.Module or (module, example_batch).",
    ),
]
Layers = Annotated[int | None, typer.Option(min=1, help="Transformer blocks.")]
Width = Annotated[int | None, typer.Option(min=1, help="Hidden size: numbers per token between blocks.")]
TrainedLayers = Annotated[
    int | None,
    typer.Option(
        "--layers", min=1, help="Transformer blocks, or layers of a ResNet as papers count them, such as 250002."
    ),
]
TrainedWidth = Annotated[
    int | None,
    typer.Option("--width", min=1, help="Hidden size of a GPT, or channels of a ResNet's first stage."),
]
Heads = Annotated[
    int | None, typer.Option(min=1, help="Attention heads; by default of size 64, or of 128 from width 2048 on.")
]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read images beside this one; by default none.")
]
Budget = Annotated[str | None, typer.Option(help="Bytes allowed on the device, such as 12GiB.")]
HostBudget = Annotated[str | None, typer.Option(help="Bytes allowed in RAM when the device is a GPU.")]
Home = Annotated[str, typer.Option(help="Where blocks live between uses: auto, device, host or disk.")]
Folder = Annotated[Path | None, typer.Option(help="Folder on the disk where blocks live; emptied at the end.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps.")]
Data = Annotated[
    str | None,
    typer.Option(
        help="Text: a folder or file, or stdlib, Python's own library. Images: a folder with one subfolder per class, "
        "or digits, scikit-learn's. Segmentation: a folder with images and masks, or shapes, which are drawn.",
    ),
]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Samples = Annotated[
    int | None, typer.Option("--batch", min=1, help="Samples per step; by default 1, or the example's.")
]
Tokens = Annotated[
    int | None, typer.Option("--seq", min=1, help="Tokens per sequence; by default 2048, or the model's own.")
]
Vocabulary = Annotated[
    int | None, typer.Option(min=1, help="Vocabulary of a GPT, in tokens; by default GPT-2's 50257.")
]
Blocks = Annotated[
    list[str] | None,
    typer.Option(help="Class or name of the blocks to stream, if they are not found; may be repeated."),
]
Dtype = Annotated[str, typer.Option(help="fp32 or bf16 (with fp32 masters).")]
Batch = Annotated[
    int | None, typer.Option(min=1, help="Samples per step; by default 2 sequences, 16 images, 4 for segmentation.")
]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens per sequence; by default 256.")]
Size = Annotated[int | None, typer.Option(min=4, help="Pixels of an image's side.")]
Classes = Annotated[int | None, typer.Option(min=2, help="Labels in the masks of a folder.")]
Optimizer = Annotated[str, typer.Option(help=f"One of PyTorch's: {', '.join(OPTIMIZERS[:-1])} or {OPTIMIZERS[-1]}.")]
PlannedOptimizer = Annotated[
    str, typer.Option(help=f"{', '.join(OPTIMIZERS[:5])}, another of PyTorch's, timm's or pytorch_optimizer's by name.")
]
Update = Annotated[
    str, typer.Option(help="step: update after backward. backward: update each block as its gradient arrives.")
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, max=2**63 - 1, help="Seed of initial values, dropout and the order of data: equal seeds give equal runs."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
