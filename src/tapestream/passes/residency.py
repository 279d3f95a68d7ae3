"""Which parameter-block values are worth keeping on the device."""

from collections import Counter
from typing import Literal

from tapestream.costs import Profile, UniformStages
from tapestream.ir import Kind, Value
from tapestream.passes.memory import block_values

UpdateMode = Literal["step", "backward"] | None


def choose_resident(profile: Profile, nbytes: int, *, update: UpdateMode) -> frozenset[Value]:
    """The block values to keep on the device within ``nbytes`` bytes: most saved traffic per byte first.

    Values of equal worth are taken spread over the chain, so that streamed blocks have computation of resident ones to
    hide behind. A larger ``nbytes`` gives a superset: the choice is a prefix of one fixed order.
    """
    sizes = dict(block_values(profile))
    chosen: list[Value] = []
    for value in worthiest_first(profile, update):
        nbytes -= sizes[value]
        if nbytes < 0:
            break
        chosen.append(value)
    return frozenset(chosen)


def traffic(profile: Profile, update: UpdateMode) -> dict[Value, int]:
    """How often each block value crosses the link in one step without recomputation when it is not resident."""
    uses = uses_of_blocks(profile)
    crossings: dict[Value, int] = {}
    for value, _ in block_values(profile):
        trained = profile.blocks[value.index].gradient_nbytes > 0 and update is not None
        match value.kind:
            case Kind.PARAMETERS:
                # Read by each forward and backward, read once more by a separate step, written by an update.
                crossings[value] = 2 * uses[value.index] + trained * (2 if update == "step" else 1)
            case Kind.BUFFERS:
                crossings[value] = 2 * uses[value.index]
            case Kind.GRADIENT:
                crossings[value] = {"step": 2, "backward": 0, None: 1}[update]
            case _:
                crossings[value] = 2 * trained
    return crossings


def uses_of_blocks(profile: Profile) -> Counter[int | None]:
    """How many stages use each block."""
    if isinstance(profile.stages, UniformStages):
        return Counter({profile.stages.cost.block: profile.stages.count})
    return Counter(cost.block for cost in profile.stages)


def worthiest_first(profile: Profile, update: UpdateMode) -> list[Value]:
    """The order in which `choose_resident` takes values; those that never cross a link are left out."""
    sizes, crossings = dict(block_values(profile)), traffic(profile, update)
    bits = len(profile.blocks).bit_length()
    order = {kind: number for number, kind in enumerate(Kind)}

    def key(value: Value) -> tuple[int, int, int, int, int]:
        spread = int(f"{value.index:0{bits}b}"[::-1], 2)
        return (-crossings[value], sizes[value], spread, order[value.kind], value.part)

    return sorted((value for value in sizes if crossings[value]), key=key)


def with_gradients(order: list[Value]) -> list[Value]:
    """The same values, each gradient right behind its parameters."""
    gradients = {value.index: value for value in order if value.kind is Kind.GRADIENT}
    paired: list[Value] = []
    for value in order:
        if value.kind is Kind.GRADIENT:
            continue
        paired.append(value)
        if value.kind is Kind.PARAMETERS and value.index in gradients:
            paired.append(gradients.pop(value.index))
    return paired + list(gradients.values())


def splits_a_pair(order: list[Value], count: int) -> bool:
    """Whether the first ``count`` values of a `with_gradients` order end between parameters and their gradient."""
    if not 0 < count < len(order):
        return False
    last, following = order[count - 1], order[count]
    return last.kind is Kind.PARAMETERS and following == Value(Kind.GRADIENT, last.index)
