"""What a step of a `Subject` costs, found on fake tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tapestream.cli import huggingface
from tapestream.cli.subject import Subject
from tapestream.costs import Profile
from tapestream.frontends.module.blocks import find_blocks
from tapestream.frontends.outlines.lengthened import lengthened
from tapestream.frontends.outlines.outline import Outline
from tapestream.frontends.outlines.outlining import outline
from tapestream.frontends.outlines.question import Variant
from tapestream.models.adapters import adapt


def costs_of(subject: Subject, device: str) -> "Costs":
    """``device``: cuda or cpu, whose kernels differ in what they keep."""
    return Costs(subject, _made(subject, None), device)


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of a model before it exists. ``model``: what is outlined; ``known``: outlines made so far."""

    subject: Subject
    model: nn.Module
    device: str
    known: dict[Variant, Outline] = field(default_factory=dict)

    def outline(self, asked: Variant) -> Outline:
        """Of one step."""
        if asked not in self.known:
            with torch.device("meta"):
                args, kwargs = self.subject.arguments(asked.batch)
            model = self.model if asked.lora is None else _made(self.subject, asked.lora)
            found = outline(
                model, args, kwargs, device=self.device, blocks=self.subject.blocks or None, moves=asked.moves,
                loss_chunks=asked.loss_chunks, tables=asked.tables or None,
            )  # fmt: skip
            shallow = self.subject.shallow
            self.known[asked] = found if shallow is None else lengthened(found, shallow.layer, shallow.left_out)
        return self.known[asked]

    def profiles(self, batch: int, **rates: Any) -> tuple[Profile, ...]:
        """Of a step of ``batch`` samples; ``rates`` as `Outline.profiles` takes them."""
        return self.outline(Variant(batch)).profiles(**rates)

    def facts(self, batch: int) -> dict[str, Any]:
        """The model's size, for people and for JSON."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        config = self.subject.config
        if config is not None and not self.subject.blocks:
            return {
                "layers": config.layers, "width": config.width, "heads": config.heads,
                "vocabulary": config.vocabulary, "parameters": config.parameters, "dtype": dtype,
            }  # fmt: skip
        made = (one for asked, one in self.known.items() if asked.batch == batch and asked.lora is None)
        found = next(made, None) or self.outline(Variant(batch))
        chains = [[k for k in segment.positions if k < found.wide] for segment in found.segments]
        return {
            "class": type(self.model).__name__, "layers": sum(map(len, chains)),
            "chains": sum(map(bool, chains)), "parameters": found.parameters, "dtype": dtype,
        }  # fmt: skip


def _made(subject: Subject, lora: int | None) -> nn.Module:
    """What is outlined, on meta, with adapters of rank ``lora``."""
    with torch.device("meta"):
        model = (subject.shallow or subject).make()
    huggingface.without_packing(model)
    return model if lora is None else adapt(model, find_blocks(model, subject.blocks or None), lora)
