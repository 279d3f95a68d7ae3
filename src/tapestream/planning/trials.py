"""What runs of a stage can do without."""

from dataclasses import replace

import torch

from tapestream.runner.runner import Runner
from tapestream.runner.state import State


def try_without_graph(runner: Runner, state: State, out: State) -> None:
    """Let forwards run under ``no_grad``, about twice as fast for small stages, where that gives the bits and
    strides of ``out``."""
    known = runner.traits[0]
    # Whether a floating output carries a gradient may depend on chance or data, so differ between the runs seen here;
    # claiming too much is harmless, too little is not.
    seen = (*zip(out.tensors, out.requires, strict=True), *zip(out.tensors, known.requires or (), strict=False))
    if known.calls_autograd or any((t.is_floating_point() or t.is_complex()) and not requires for t, requires in seen):
        return
    runner.traits = [replace(known, plain_forward=True)]
    try:
        plain = runner.forward(0, [state])
    except Exception:  # the stage differentiates something of its own, or looks at its graph
        runner.traits = [known]
        return
    same = plain.same_structure(out) and all(
        a.shape == b.shape and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(plain.tensors, out.tensors, strict=True)
    )
    if not same:
        runner.traits = [known]
