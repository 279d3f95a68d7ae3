"""What a step of a `Subject` costs, found on fake tensors."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tapestream.cli import huggingface
from tapestream.cli.subject import Subject
from tapestream.costs import Profile
from tapestream.models.outline import Outline
from tapestream.models.outlining import outline


def costs_of(subject: Subject, device: str) -> "Costs":
    """``device``: cuda or cpu, whose kernels differ in what they keep."""
    with torch.device("meta"):
        model = subject.make()
    huggingface.without_packing(model)
    return Costs(subject, model, device)


@dataclass(frozen=True, slots=True)
class Costs:
    """What is known of a model before it exists. ``known``: outlines made so far."""

    subject: Subject
    model: nn.Module
    device: str
    known: dict[tuple[int, bool], Outline] = field(default_factory=dict)

    def outline(self, batch: int, moves: bool) -> Outline:
        """Of a step of ``batch`` samples; ``moves``: whether blocks may leave the device."""
        if (batch, moves) not in self.known:
            with torch.device("meta"):
                args, kwargs = self.subject.arguments(batch)
            blocks = self.subject.blocks or None
            found = outline(self.model, args, kwargs, device=self.device, blocks=blocks, moves=moves)
            self.known[batch, moves] = found
        return self.known[batch, moves]

    def profiles(self, batch: int, **rates: Any) -> tuple[Profile, ...]:
        """Of a step of ``batch`` samples; ``rates`` as `Outline.profiles` takes them."""
        return self.outline(batch, True).profiles(**rates)

    def facts(self, batch: int) -> dict[str, Any]:
        """The model's size, for people and for JSON."""
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        config = self.subject.config
        if config is not None and not self.subject.blocks:
            return {
                "layers": config.layers, "width": config.width, "heads": config.heads,
                "vocabulary": config.vocabulary, "parameters": config.parameters, "dtype": dtype,
            }  # fmt: skip
        found = next((one for (size, _), one in self.known.items() if size == batch), None) or self.outline(batch, True)
        chains = [[k for k in segment.positions if k < found.wide] for segment in found.segments]
        return {
            "class": type(self.model).__name__, "layers": sum(map(len, chains)),
            "chains": sum(map(bool, chains)), "parameters": found.parameters, "dtype": dtype,
        }  # fmt: skip
