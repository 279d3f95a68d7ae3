"""What one stage and one parameter block cost."""

from dataclasses import dataclass, replace
from typing import Self

from tapestream.costs.checks import duration, whole
from tapestream.errors import InputError
from tapestream.ir.actions import Kind, Tier


@dataclass(frozen=True, slots=True)
class StageCost:
    """One stage: seconds and bytes.

    ``output_nbytes``: the state that it makes, without the storages listed in ``Profile.carried``. ``saved_nbytes``:
    what autograd saves inside the stage, beyond states and parameters. ``reads_input``, ``reads_output``: whether
    backward reads state k, state k+1. ``forward_extra_nbytes``, ``backward_extra_nbytes``: transient bytes at the peak
    of a run, beyond input, output, saved tensors, cotangents and the gradient block. The value for backward is negative
    if these are never all there at once: it is at least minus the bytes of the saved tensors, which backward frees, and
    of the output's cotangent, which it uses up. ``cotangent_nbytes``: bytes of the cotangent of the *output* (None:
    ``output_nbytes``). ``block``: the parameter block that the stage uses (None: none). ``record_seconds``,
    ``record_extra_nbytes``: of a run that keeps its saved tensors (None: those of a forward). ``gradient_nbytes``:
    parameter gradients that this backward is the first to make, if they are to count and belong to no block; they stay
    until the end of the step. ``reads_parameters``: whether backward reads the parameters of ``block`` (an embedding's
    does not). ``saved_storages``: how many copies it takes to move the saved tensors. ``inside_nbytes``: bytes of
    results that a forward may keep for a later Record, which then takes ``inside_seconds`` less. All of them are among
    the saved tensors.
    """

    forward_seconds: float
    backward_seconds: float
    output_nbytes: int
    saved_nbytes: int
    reads_input: bool = True
    reads_output: bool = False
    forward_extra_nbytes: int = 0
    backward_extra_nbytes: int = 0
    cotangent_nbytes: int | None = None
    block: int | None = None
    record_seconds: float | None = None
    record_extra_nbytes: int | None = None
    gradient_nbytes: int = 0
    reads_parameters: bool = True
    saved_storages: int = 1
    inside_nbytes: int = 0
    inside_seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, seconds in (("forward_seconds", self.forward_seconds), ("backward_seconds", self.backward_seconds)):
            duration("StageCost", name, seconds)
        whole("StageCost", "output_nbytes", self.output_nbytes)
        whole("StageCost", "saved_nbytes", self.saved_nbytes)
        whole("StageCost", "forward_extra_nbytes", self.forward_extra_nbytes)
        whole("StageCost", "gradient_nbytes", self.gradient_nbytes)
        whole("StageCost", "saved_storages", self.saved_storages)
        if self.record_seconds is not None:
            duration("StageCost", "record_seconds", self.record_seconds)
        for name in ("cotangent_nbytes", "block", "record_extra_nbytes"):
            if (value := getattr(self, name)) is not None:
                whole("StageCost", name, value)
        if self.backward_extra_nbytes != 0:
            least = -self.saved_nbytes - self.cotangent_bytes  # what saved tensors and cotangent take
            whole("StageCost", "backward_extra_nbytes", self.backward_extra_nbytes, least)
        whole("StageCost", "inside_nbytes", self.inside_nbytes)
        duration("StageCost", "inside_seconds", self.inside_seconds)
        if self.inside_nbytes > self.saved_nbytes:
            raise InputError(
                f"StageCost: inside_nbytes={self.inside_nbytes} are a part of saved_nbytes={self.saved_nbytes} and "
                "cannot be more"
            )
        if self.gradient_nbytes and self.block is not None:
            raise InputError(
                f"StageCost: block {self.block} and gradient_nbytes={self.gradient_nbytes} say the same thing twice; "
                "give the bytes to the block (BlockCost.gradient_nbytes)"
            )

    @property
    def recorded_seconds(self) -> float:
        """Seconds of one Record (a run that keeps its saved tensors)."""
        return self.forward_seconds if self.record_seconds is None else self.record_seconds

    def taking(self, times: float) -> Self:
        """The same of a stage that keeps, and takes besides, so many times as many bytes; its backward never fewer."""
        return replace(
            self,
            saved_nbytes=int(self.saved_nbytes * times) + 1,
            forward_extra_nbytes=int(self.forward_extra_nbytes * times) + 1,
            record_extra_nbytes=int(self.recorded_extra_nbytes * times) + 1,
            backward_extra_nbytes=max(self.backward_extra_nbytes, int(self.backward_extra_nbytes * times)),
        )

    @property
    def recorded_extra_nbytes(self) -> int:
        """Transient bytes of one Record, beyond what it keeps."""
        return self.forward_extra_nbytes if self.record_extra_nbytes is None else self.record_extra_nbytes

    @property
    def cotangent_bytes(self) -> int:
        """Bytes of the cotangent of the output."""
        return self.output_nbytes if self.cotangent_nbytes is None else self.cotangent_nbytes


@dataclass(frozen=True, slots=True)
class BlockCost:
    """One parameter block: the bytes of each of its values, and the seconds of one optimizer update of all of it.

    ``gradient_nbytes`` is 0 for frozen blocks, and for chains whose gradients go straight to the user.
    ``buffers_nbytes``: what runs read and no update changes: the frozen parameters of a block with trained ones.
    ``state_parts``: bytes of each part of the optimizer state (none: one part). Each part moves by itself and has an
    Update of its own. ``update_extra_nbytes``: transient bytes of one such Update. ``host_update_seconds``: of an
    update of all of it in HOST, None where there is none. Of a block that is divided among ranks
    (`Profile.shards`), what is said of optimizer state and updates is said of one rank's shard.
    """

    parameters_nbytes: int
    gradient_nbytes: int = 0
    optimizer_state_nbytes: int = 0
    buffers_nbytes: int = 0
    update_seconds: float = 0.0
    update_extra_nbytes: int = 0
    state_parts: tuple[int, ...] = ()
    host_update_seconds: float | None = None

    def __post_init__(self) -> None:
        for name in ("parameters", "gradient", "optimizer_state", "buffers", "update_extra"):
            whole("BlockCost", f"{name}_nbytes", getattr(self, f"{name}_nbytes"))
        duration("BlockCost", "update_seconds", self.update_seconds)
        if self.host_update_seconds is not None:
            duration("BlockCost", "host_update_seconds", self.host_update_seconds)
        object.__setattr__(self, "state_parts", tuple(self.state_parts))  # from a file it is a list
        for nbytes in self.state_parts:
            whole("BlockCost", "state_parts", nbytes)
        if self.state_parts and sum(self.state_parts) != self.optimizer_state_nbytes:
            raise InputError(
                f"BlockCost: state_parts={self.state_parts} add up to {sum(self.state_parts)} bytes, "
                f"optimizer_state_nbytes is {self.optimizer_state_nbytes}; they must be equal"
            )

    @property
    def is_empty(self) -> bool:
        """Whether none of its values has any bytes."""
        weights = self.parameters_nbytes or self.gradient_nbytes or self.buffers_nbytes
        return not (weights or self.optimizer_state_nbytes)

    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each part of the optimizer state. There is one Update for each."""
        return self.state_parts or (self.optimizer_state_nbytes,)

    def nbytes_of(self, kind: Kind, part: int = 0) -> int:
        """Bytes of one value: of a whole copy, or of a part of the optimizer state."""
        match kind:
            case Kind.PARAMETERS:
                return self.parameters_nbytes
            case Kind.BUFFERS:
                return self.buffers_nbytes
            case Kind.GRADIENT:
                return self.gradient_nbytes
            case _:
                return self.parts[part]

    def part_seconds(self, part: int, tier: Tier = Tier.DEVICE) -> float:
        """Seconds of the Update of one part in a tier, in proportion to its bytes."""
        total = self.optimizer_state_nbytes
        share = self.parts[part] / total if total else 1 / len(self.parts)
        seconds = self.update_seconds if tier is not Tier.HOST else self.host_update_seconds or 0.0
        return seconds * share


@dataclass(frozen=True, slots=True)
class Carried:
    """A storage that passes unchanged through states ``first`` .. ``last``: counted once however many hold it."""

    first: int
    last: int
    nbytes: int

    def __post_init__(self) -> None:
        whole("Carried", "first", self.first)
        whole("Carried", "last", self.last, self.first)
        whole("Carried", "nbytes", self.nbytes)
