"""The Trainer of Hugging Face with micro-batches that pass each block of a streamed model together: same losses.

    python examples/finetune_accumulate.py --accumulate 8
    python examples/finetune_accumulate.py --accumulate 8 --stock --out runs/stock    # the same without tapestream

Weights move twice a step, not twice a micro-batch, where that is faster: the report at the end says which it was. What
is trained, and the other options, are those of finetune_trainer.py. Needs tapestream[transformers].
"""

from typing import Any

import finetune_trainer
import torch
from torch import nn
from transformers import Trainer

import tapestream as ts


class AccumulatingTrainer(Trainer):
    """For models that return their loss, divided by ``num_items_in_batch`` (language models do)."""

    _waiting: list[dict[str, Any]]
    _losses: list[torch.Tensor]

    def get_batch_samples(self, *arguments: Any, **named: Any) -> tuple[list[dict[str, Any]], Any]:
        """The micro-batches of the next step."""
        samples, items = super().get_batch_samples(*arguments, **named)
        self._waiting = [*samples]
        return samples, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        """The first one of a step makes the gradients of all; the others give their losses."""
        if self._waiting:
            model.train()
            given = [{**self._prepare_inputs(one), "num_items_in_batch": num_items_in_batch} for one in self._waiting]
            self._waiting = []
            self._losses = ts.accumulate(model, given, lambda output, _: output.loss)
        return self._losses.pop(0)


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    """Train as the command line says; returns all that the Trainer has logged."""
    given = finetune_trainer.parser(__doc__).parse_args(arguments)
    return finetune_trainer.main(arguments, Trainer if given.stock else AccumulatingTrainer)


if __name__ == "__main__":
    main()
