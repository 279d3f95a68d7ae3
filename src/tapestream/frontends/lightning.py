"""`LightningStrategy`: Lightning's Trainer in several processes, around modules that hold streamed models."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch import nn

from tapestream.errors import InputError
from tapestream.frontends.module.stream import is_streamed
from tapestream.frontends.module.whole import whole


class LightningStrategy(DDPStrategy):
    """As ``strategy="ddp"``, for a LightningModule whose trained parameters are all in models that were streamed with
    ``peers=``: these sum their gradients themselves, so nothing is wrapped around them.

    ``Trainer(strategy=ts.LightningStrategy(process_group_backend="gloo"))``; takes what DDPStrategy takes for the
    process group. Stream the model in ``configure_model()``, where the group is there. Raises InputError, before
    training, where a trained parameter is in no such model. Checkpoints have whole tensors, in the RAM of every rank
    where blocks are divided; `ts.save` writes such without that.
    """

    def configure_ddp(self) -> None:
        """Wrap nothing."""
        module = self.lightning_module
        assert module is not None
        inside = {id(p) for model in _streamed(module) for p in model.parameters()}
        left = [name for name, p in module.named_parameters() if p.requires_grad and id(p) not in inside]
        if left:
            raise InputError(
                f"{len(left)} trained parameters of this {type(module).__name__} ({left[0]!r} first) are in no model "
                "that was streamed, so that nobody would average their gradients; put them into the one that "
                "ts.stream() gets, or freeze them"
            )

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Of whole tensors."""
        with ExitStack() as read:
            for model in _streamed(self.lightning_module) if self.lightning_module is not None else ():
                read.enter_context(whole(model))
            found: dict[str, Any] = super().lightning_module_state_dict()
        return found

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """State lies where blocks do, and goes to no other device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def _streamed(module: nn.Module) -> Iterator[nn.Module]:
    return (one for one in module.modules() if is_streamed(one))
