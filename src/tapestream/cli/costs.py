"""What a step of a `Subject` costs: by formula for our own GPTs, on fake tensors for all others."""

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from tapestream.cli import huggingface
from tapestream.cli.subject import Subject
from tapestream.costs import Profile
from tapestream.models import GPTConfig
from tapestream.models.estimate import estimate
from tapestream.models.outline import Outline
from tapestream.models.outlining import outline


class Costs(Protocol):
    """What is known of a model before it exists."""

    def profiles(self, batch: int, **rates: Any) -> tuple[Profile, ...]:
        """Of a step of ``batch`` samples, one for each chain of blocks; ``rates`` as `estimate` takes them."""

    def facts(self, batch: int) -> dict[str, Any]:
        """The model's size, for people and for JSON."""


def costs_of(subject: Subject, device: str) -> Costs:
    """``device``: cuda or cpu, whose kernels differ in what they keep. Raises InputError for an impossible length."""
    if subject.config is not None and not subject.blocks:
        return _Formula(subject.config, subject.sequence or 1)
    with torch.device("meta"):
        model = subject.make()
    huggingface.without_packing(model)
    return _Outlined(subject, model, device)


@dataclass(frozen=True, slots=True)
class _Formula:
    config: GPTConfig
    sequence: int

    def profiles(self, batch: int, **rates: Any) -> tuple[Profile, ...]:
        return (estimate(self.config, batch=batch, sequence=self.sequence, **rates),)

    def facts(self, batch: int) -> dict[str, Any]:
        config = self.config
        return {
            "layers": config.layers, "width": config.width, "heads": config.heads, "vocabulary": config.vocabulary,
            "parameters": config.parameters, "dtype": str(config.dtype).removeprefix("torch."),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Outlined:
    """``known``: outlines made so far, by batch."""

    subject: Subject
    model: nn.Module
    device: str
    known: dict[int, Outline] = field(default_factory=dict)

    def profiles(self, batch: int, **rates: Any) -> tuple[Profile, ...]:
        return self._outline(batch).profiles(**rates)

    def facts(self, batch: int) -> dict[str, Any]:
        found = self._outline(batch)
        return {
            "class": type(self.model).__name__, "layers": sum(len(s.stages) for s in found.segments),
            "chains": len(found.segments), "parameters": found.parameters,
            "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
        }  # fmt: skip

    def _outline(self, batch: int) -> Outline:
        if batch not in self.known:
            with torch.device("meta"):
                args, kwargs = self.subject.arguments(batch)
            blocks = self.subject.blocks or None
            self.known[batch] = outline(self.model, args, kwargs, device=self.device, blocks=blocks)
        return self.known[batch]
