"""`ShardBook`: gradients of blocks that are divided among ranks, from the end of a backward to ``.grad``."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from tapestream.errors import GradientError
from tapestream.executor.away import AwayGradient
from tapestream.executor.gradients import Found, GradientBook
from tapestream.executor.shard_copies import ShardCopies
from tapestream.executor.sharing import Addends, Arrival
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier, Value

_READ = "came to read a gradient that is divided among ranks"
_GIVEN = "came to a gradient that other code has set"


class ShardBook(GradientBook):
    """The plan says when all ranks sum a block's gradients: each keeps its part of the sum, which ``.grad`` stands for.
    An earlier sum is there then, and is added to."""

    copies: ShardCopies

    def __init__(self, copies: ShardCopies) -> None:
        super().__init__(copies)
        self._summed: dict[int, list[int]] = {}  # by block, what this backward has left, for updates within it
        self._whole: tuple[Value, dict[int, torch.Tensor]] | None = None  # the last one that was read
        self._ages: Counter[tuple[Value, int]] = Counter()
        self.versions: Counter[int] = Counter()  # by block, grow when its gradients change
        self.away = copies.away

    def leaves(self, block: int) -> bool:
        """Every rank takes part in the sum, be it with nothing."""
        return self.sharing is not None and self.copies.blocks[block].trainable

    def has_any(self, block: int) -> bool:
        """See `GradientBook`."""
        return bool(self._summed.get(block))

    def lay_out(self, block: int) -> None:
        """Bring the fresh gradients into one region on the device, as the others do, and see who has some."""
        assert self.sharing is not None
        copies, this = self.copies, self.copies.blocks[block]
        if block in self.fresh:
            self.fresh[block] = self.hooked(block)  # hooks may raise: before others are told
        found = self.sharing.announce(block, self.there(block))
        if found != block:
            raise GradientError(f"ranks sum the gradients of blocks {block} and {found} at once; their plans differ")
        self.forget_whole()
        region = copies.region(Value(Kind.GRADIENT, block), Tier.DEVICE)
        copies.engine.compute_begins([region])
        fresh = self.fresh.pop(block, {})
        with torch.no_grad():
            for i, view in this.views(region.memory).items():
                gradient = fresh.pop(i, None)
                if gradient is not None:
                    view.copy_(gradient)
                    if self.sharing.scale != 1.0:
                        view.mul_(self.sharing.scale)
        copies.engine.compute_ended([region])

    def sum(self, block: int) -> Arrival:
        """Begin to add up what `lay_out` has laid out on every rank."""
        assert self.sharing is not None
        copies, this, value = self.copies, self.copies.blocks[block], Value(Kind.GRADIENT, block)
        earlier = set(self._own_gradients(block))
        if earlier and not copies.has(value, Tier.SHARD):
            copies.copy_now(value, copies.home_of(value), Tier.SHARD)
        first, _ = this.share.of(this.layout.nbytes)
        addends, summed = list[Addends](), list[int]()
        spans = this.own_elements()
        for at, i in enumerate(this.trained):
            ranks, (start, stop), dtype = self.sharing.givers(i), spans[i], this.layout.dtypes[at]
            if not ranks and i not in earlier:
                continue
            summed.append(i)
            if i not in earlier:
                self._ages[value, i] += 1
            if start < stop:
                low = this.layout.offsets[at] + start * dtype.itemsize - first
                high = low + (stop - start) * dtype.itemsize
                addends.append(Addends(low, high, dtype, ranks, i in earlier))
        self._arrived[block] = self._summed[block] = summed
        self.versions[block] += 1
        whole, shard = copies.region(value, Tier.DEVICE), copies.region(value, Tier.SHARD)
        return copies.used_by(lambda: copies.others.sum(whole.memory, shard.memory, addends), whole, shard)

    def at_step(self, block: int, tier: Tier = Tier.DEVICE) -> Found:
        """This rank's part of the gradients that ``.grad`` stands for."""
        numbers, value = self._own_gradients(block), Value(Kind.GRADIENT, block)
        self.forget_whole()
        if not numbers:
            return {}
        if not self.copies.has(value, Tier.SHARD):
            self.copies.copy_now(value, self.copies.home_of(value), Tier.SHARD)
        return self._parts(value, numbers)

    def in_backward(self, block: int) -> Found:
        """See `GradientBook`."""
        self._arrived.pop(block, None)
        numbers = self._summed.pop(block, [])
        return self._parts(Value(Kind.GRADIENT, block), numbers) if numbers else {}

    def publish(self) -> None:
        """Let ``.grad`` stand for the sums."""
        for block, arrived in self._arrived.items():
            if self._failed:
                continue
            value = Value(Kind.GRADIENT, block)
            for i in arrived:
                parameter = self.copies.blocks[block].parameters[i]
                parameter.grad = AwayGradient.standing_for(parameter, self, value, i)
                self._after(block, i)
        self._arrived.clear()
        self._summed.clear()
        super().publish()

    def clear(self) -> None:
        """See `GradientBook`."""
        super().clear()
        self._summed.clear()

    def leave(self) -> None:
        """Give back the bytes of gradients that no ``.grad`` stands for any more."""
        self.forget_whole()
        for this in self.copies.blocks:
            value = Value(Kind.GRADIENT, this.index)
            if not self._own_gradients(this.index) and not self._is_due(value):
                for tier in (Tier.SHARD, self.copies.home_of(value)):
                    self.copies.release(value, tier)

    def rehome(self, value: Value, target: Tier) -> None:
        """See `GradientBook`."""
        source = self.copies.home_of(value)
        self.copies.copy_now(value, source, target)
        self.copies.release(value, source)

    def show_whole(self, block: int) -> None:
        """Let a block's parameters, and what ``.grad`` stands for, be whole; every rank must come."""
        copies, this = self.copies, self.copies.blocks[block]
        gradients = self.whole(Value(Kind.GRADIENT, block)) if self._own_gradients(block) else {}
        self.forget_whole()
        for i, gradient in gradients.items():
            if not isinstance(this.parameters[i].grad, AwayGradient):
                continue
            this.parameters[i].grad = gradient
        for value in copies.shown_values(block):
            copies.show_gathered(value)

    # -- what reads and scales gradients: see `Holder` ---------------------------------------------------------------

    def keep_part(self, value: Value, tensors: Mapping[int, torch.Tensor]) -> None:
        """See `Holder`."""
        self.forget_whole()
        self.versions[value.index] += 1
        self.copies.keep_part(value, tensors)

    def age(self, value: Value, number: int) -> int:
        """See `Holder`."""
        return self._ages[value, number]

    def part_of(self, value: Value, number: int, whole: torch.Tensor) -> torch.Tensor:
        """See `Holder`."""
        return self.copies.part_of(value, number, whole)

    def own(self, value: Value, number: int) -> torch.Tensor:
        """See `Holder`."""
        self.forget_whole()
        self.versions[value.index] += 1
        return self.copies.own(value, number)

    def any_of(self, found: torch.Tensor) -> None:
        """See `Holder`."""
        self.copies.any_of(found)

    def whole(self, value: Value) -> Mapping[int, torch.Tensor]:
        """Whole gradients by number, those of the last block that was asked for without asking others again."""
        if self._whole is None or self._whole[0] != value:
            self.forget_whole()
            self._whole = value, self.copies.blocks[value.index].views(self.copies.gathered(value, _READ))
        return self._whole[1]

    def forget_whole(self) -> None:
        """What was read is of no use any more."""
        self._whole = None

    def _parts(self, value: Value, numbers: Sequence[int]) -> Found:
        """Of these parameters' gradients, whose shard is on the device."""
        own = self.copies.blocks[value.index].own(self.copies.region(value, Tier.SHARD).memory)
        return {i: own[i] for i in numbers}

    def _own_gradients(self, block: int) -> list[int]:
        """Numbers of parameters whose ``.grad`` stands for a sum; other tensors there are taken over, part by part."""
        found, given, value = list[int](), dict[int, torch.Tensor](), Value(Kind.GRADIENT, block)
        for i, parameter in enumerate(self.copies.blocks[block].parameters):
            gradient = parameter.grad
            if gradient is None or isinstance(gradient, SteppedGradient) or not parameter.numel():
                continue
            found.append(i)
            if not isinstance(gradient, AwayGradient):
                given[i] = gradient
            elif not gradient.stands_for(value, i):
                raise GradientError(
                    f"the .grad of a parameter of shape {list(parameter.shape)} is an earlier one, or another "
                    "parameter's, but its block is divided among ranks, and gradients are not kept beside the present "
                    "one; read it before zero_grad(), inside of ts.whole(model), and put a clone() there"
                )
        if given:
            self._take_over(value, given)
        return found

    def _take_over(self, value: Value, given: Mapping[int, torch.Tensor]) -> None:
        """Gradients that other code has put there, the same on every rank."""
        copies, parameters = self.copies, self.copies.blocks[value.index].parameters
        for i, gradient in given.items():
            if gradient.layout is not torch.strided:
                raise GradientError(f"a sparse gradient of shape {list(parameters[i].shape)} was given; use to_dense()")
        if copies.has(value, Tier.SHARD):
            copies.check_same(_GIVEN, value, given)
            copies.write(value, Tier.SHARD, given)
        else:
            copies.reserve(value, below=True)
            copies.keep_part(value, given)
        self.versions[value.index] += 1
        for i in given:
            self._ages[value, i] += 1
            parameters[i].grad = AwayGradient.standing_for(parameters[i], self, value, i)
