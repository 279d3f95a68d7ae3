"""What a streamed model's optimizer refuses, in words: calls in an order that would train something else."""

from tapestream.errors import GradientError, InputError


def not_stepped(what: str) -> GradientError:
    """``what`` comes while blocks are a step ahead of the rest of the model."""
    return GradientError(
        f"{what} came after a backward without its optimizer.step(): with update='backward' that backward has "
        "updated the blocks already, so gradients cannot be accumulated over several backwards, and no step "
        "can be left out; call optimizer.step() after each backward, give all micro-batches to "
        "ts.accumulate(model, micro_batches, loss), or use update='step'"
    )


def written_into(optimizer: str) -> GradientError:
    """The last step has changed gradients that are still there."""
    return GradientError(
        f"a forward came after optimizer.step() without zero_grad(), but {optimizer} writes into "
        "gradients, which of a streamed model lie elsewhere than where it steps: call optimizer.zero_grad() "
        "before the forward"
    )


def not_zeroed() -> GradientError:
    """The last step's gradients are still there, those of blocks left out."""
    return GradientError(
        "a forward came after optimizer.step() without zero_grad(): gradients would be accumulated, except "
        "those of blocks, which update='backward' updates at once; call optimizer.zero_grad() before it"
    )


def gone() -> GradientError:
    """What a step would use was used before the state was loaded."""
    return GradientError(
        "step() came after a state was loaded over the updates of the last backward (update='backward'), and "
        "the gradients of blocks are gone; run a backward first"
    )


def made_by_hand(shape: tuple[int, ...], block: int) -> GradientError:
    """A step would leave out a gradient that no backward has made."""
    return GradientError(
        f"step() found a gradient of a parameter of shape {shape} in block {block} that no backward of this model has "
        "made: with update='backward' blocks are updated within their backward alone, so that it would be left out; "
        "set it to None, or use update='step'"
    )


def replaced(what: str) -> InputError:
    """``what`` was called on an optimizer that another has replaced."""
    return InputError(
        f"{what} was called on an optimizer whose state is gone: another tapestream.optimizer() was made for "
        "this model since. Use that one; for parts of the model with options "
        "of their own make one optimizer with groups=[{'params': [...], 'lr': ...}, ...]"
    )


def differs(name: str, found: str, *, draws: bool) -> str:
    """Stepped part by part, an optimizer gives other bits."""
    what = "draws random numbers, tensor after tensor" if draws else "looks across tensors"
    return (
        f"{name} {what}: a small copy of its groups, stepped part by part as a streamed model is, does "
        f"not end as in one step of all tensors ({found}). Instead: {_by_yourself(name)}"
    )


def batches(name: str, *, alone: bool) -> str:
    """An optimizer stacks several parameters; ``alone``: not with ``foreach=False``."""
    instead = f"give ts.optimizer(model, {name}, ...) foreach=False, with which it does not; or " if alone else ""
    return (
        f"{name} looks across tensors: it makes one tensor of several parameters (a batch of matrices), and kernels of "
        f"batches that a streamed model has not there together have other bits. Instead: {instead}{_by_yourself(name)}"
    )


def no_single_tensor(name: str, found: str) -> str:
    """Its step could not be run on one tensor without numbers."""
    return f"{name} could not be tried on a single tensor ({found}). Instead: {_by_yourself(name)}"


def subclass(name: str, key: str, kind: str) -> str:
    """Bytes of a state do not make it: low-bit state has codes and scales inside, and looks as if it were fp32."""
    return (
        f"{name} keeps a state {key!r} that is a {kind}; the state of a streamed model's optimizer moves as plain "
        f"tensors, and would be others afterwards. Instead: {_by_yourself(name)}"
    )


def _by_yourself(name: str) -> str:
    return (
        f"make it yourself, {name}(model.parameters(), ...), which steps all tensors at once, its state in memory; or "
        "use an optimizer that treats tensors independently, such as AdamW, SGD or Adagrad"
    )
