"""`Known`: the parameters that a model had when it was streamed."""

from torch import nn

from tapestream.errors import InputError


class Known:
    """None of them may be replaced, none may come or go."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._parameters = model, tuple(model.parameters())
        self._identities: tuple[int, ...] = ()  # of the parameters when they were last found to be those known

    def check(self, identities: tuple[int, ...]) -> None:
        """Raise InputError where that has happened. ``identities``: as `tapestream.runner.stage.mode_of` has them now;
        nothing is looked at while they stay."""
        if identities == self._identities:
            return
        named, known = list(self._model.named_parameters()), {id(p) for p in self._parameters}
        if {id(p) for _, p in named} != known:  # in another order where one was taken away and put back
            strange = next(
                (f"parameter {n!r} was replaced by another, or added," for n, p in named if id(p) not in known), ""
            )
            raise InputError(
                f"{strange or 'a parameter was removed'} after stream(), so it would not be streamed or trained; copy "
                "the values into the original parameter (load_state_dict without assign=True), or unstream, replace "
                "and stream again (a model that a trainer changes, such as with peft_config=, once the trainer is "
                "made); torch.func.functional_call around it needs a plain model"
            )
        self._identities = identities
