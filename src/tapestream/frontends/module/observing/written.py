"""Parameters outside of blocks that a forward writes into: the profiled call must not be one more."""

import contextlib
from collections.abc import Iterator, Sequence

from torch import nn

from tapestream.errors import InputError


@contextlib.contextmanager
def parameters_unwritten(model: nn.Module, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Inside, embeddings among ``modules`` do not renormalise their weights. Raises InputError where a parameter of
    ``modules`` was written into all the same."""
    own = {id(p) for module in modules for p in module._parameters.values()}
    before = [(name, p, p._version) for name, p in model.named_parameters() if id(p) in own]
    norms = [(m, m.max_norm) for m in modules if isinstance(m, (nn.Embedding, nn.EmbeddingBag))]
    try:
        for module, _ in norms:
            module.max_norm = None
        yield
    finally:
        for module, norm in norms:
            module.max_norm = norm
    for name, parameter, version in before:
        if parameter._version != version:
            raise InputError(
                f"the model's forward changes its parameter {name!r} in place, and profiling runs it once more, so the "
                "change would count twice (it has been made once): change it before the forward or after the step"
            )
