"""`Gradients`: from the end of a block's backward to ``.grad``, in the order in which plain autograd adds."""

import sys
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch

from tapestream.executor.accumulation import add, after_accumulation, is_held, through_hooks
from tapestream.executor.copies import BlockCopies
from tapestream.executor.sharing import Sharing
from tapestream.executor.stepped import SteppedGradient
from tapestream.ir.actions import Kind, Tier, Value
from tapestream.storage.regions import Region

Found: TypeAlias = dict[int, torch.Tensor]
"""Gradients of a block by parameter number."""
Sums: TypeAlias = dict[int, tuple[torch.Tensor, torch.Tensor]]
"""By ``id`` of a parameter: the parameter and what one call has accumulated for it."""


class GradientBook:
    """Gradients that a backward has made and users do not see yet.

    Plain PyTorch adds up all of one backward, then adds the sum to ``.grad``. Where a backward goes through several
    calls of the model
    (``together``), what the first leaves for a block is therefore the start of the next one's sum, and is added to
    earlier
    gradients at the end.
    """

    def __init__(self, copies: BlockCopies) -> None:
        self.copies = copies
        self.fresh: dict[int, Found] = {}  # taken from a call, not yet laid out
        self.together = False
        self.sharing: Sharing | None = None
        self._sums: set[int] = set()  # fresh ones that are sums over ranks already, with what ``.grad`` showed before
        self.left_out: list[int] = []  # summed and sent home, of blocks that others have run, for a later update
        self._failed = False
        self._arrived: dict[int, list[int]] = {}  # laid out and sent home, not yet shown by .grad
        self._stepped: dict[int, list[int]] = {}  # used up by updates within this backward
        self._earlier: dict[int, Region | None] = {}  # what .grad shows while this backward's sums lie at home
        self._hooked: dict[int, list[int]] = {}  # whose hooks after accumulation wait for the end of the backward

    def take(self, block: int, sums: Sums) -> None:
        """Take a block's gradients over from a call that adds no more to them."""
        found: Found = {}
        for i, parameter in enumerate(self.copies.blocks[block].parameters):
            entry = sums.pop(id(parameter), None)
            if entry is not None:
                found[i] = entry[1]
        if found:
            self.fresh[block] = found

    def seed(self, block: int, sums: Sums) -> None:
        """Let a call go on from what another one of the same backward has left for the block."""
        parameters = self.copies.blocks[block].parameters
        for i, gradient in self.fresh.pop(block, {}).items():
            sums[id(parameters[i])] = (parameters[i], gradient)
        value = Value(Kind.GRADIENT, block)
        arrived = self._arrived.pop(block, [])
        if arrived:
            self.copies.wait(value, self.copies.home_of(value))
            views = self.copies.blocks[block].views(self.copies.bytes_at(value, self.copies.home_of(value)))
            for i in arrived:
                sums[id(parameters[i])] = (parameters[i], views[i].to(self.copies.device, copy=True))

    def share(self, block: int, *, eager: bool) -> None:
        """Sum a block's fresh gradients over ranks, beginning with what ``.grad`` shows; this rank may have none."""
        assert self.sharing is not None
        fresh, earlier = self.fresh.pop(block, {}), {} if eager else self._gradients(block)
        self.fresh[block] = self.sharing.sum(self.copies.blocks[block].parameters, fresh, earlier)
        self._sums.add(block)

    def are_own(self, block: int) -> bool:
        """Whether there are fresh gradients that are this rank's alone."""
        return self.sharing is not None and block in self.fresh and block not in self._sums

    def there(self, block: int) -> list[torch.Tensor | None]:
        """The fresh gradients of a block's parameters; None: of that one there is none."""
        fresh = self.fresh.get(block, {})
        return [fresh.get(i) for i in range(len(self.copies.blocks[block].parameters))]

    def leaves(self, block: int) -> bool:
        """Whether there is anything to send home of what this backward has made."""
        return block in self.fresh

    def has_any(self, block: int) -> bool:
        """Whether this backward has left gradients for an update."""
        return block in self.fresh

    def is_home(self, block: int) -> bool:
        """Whether gradients of this backward were sent home."""
        return block in self._arrived

    def lie_at_home(self, block: int, gradients: Iterable[torch.Tensor]) -> bool:
        """Whether these lie there, not somewhere that a user has chosen."""
        own = self._own(block)
        return all(gradient.data_ptr() in own or not gradient.numel() for gradient in gradients)

    def sent(self, block: int) -> Found:
        """Those, taken over for an update where they are: on the host, or else at home."""
        value = Value(Kind.GRADIENT, block)
        numbers = self._arrived.pop(block, [])
        tier = Tier.HOST if self.copies.has(value, Tier.HOST) else self.copies.home_of(value)
        memory = self.copies.bytes_at(value, tier) if numbers else None
        views = {} if memory is None else self.copies.blocks[block].views(memory)
        return {i: views[i] for i in numbers}

    def lay_out(self, block: int) -> None:
        """Bring the fresh gradients into one region on the device, added to what earlier backwards left at home."""
        copies, this, value = self.copies, self.copies.blocks[block], Value(Kind.GRADIENT, block)
        summed = block in self._sums
        fresh = self.hooked(block)
        if not self._shown(block) and block not in self._earlier:
            copies.renew(value, copies.home_of(value))  # users may hold what .grad showed before they set it to None
        elif self.together:
            self._put_aside(value)
        earlier = {} if self.together or summed else self._gradients(block)
        at_home = self._all_at_home(block, earlier)
        if at_home:  # not through the mapping: its pages would stay in memory
            copies.copy_now(value, copies.home_of(value), Tier.DEVICE)
        region = copies.region(value, Tier.DEVICE)
        copies.engine.compute_begins([region])
        arrived: list[int] = []
        for i, view in this.views(region.memory).items():
            before, gradient = earlier.get(i), fresh.pop(i, None)
            if before is not None and not at_home:
                view.copy_(before)
            if gradient is not None:
                view.copy_(gradient) if before is None else view.add_(gradient)
            if gradient is not None or before is not None:
                arrived.append(i)
        self._arrived[block] = arrived
        copies.engine.compute_ended([region])

    def at_step(self, block: int, tier: Tier = Tier.DEVICE) -> Found:
        """Gradients for an update in ``tier``: those that users see, read from the copy there where one was fetched."""
        this, value = self.copies.blocks[block], Value(Kind.GRADIENT, block)
        region = self.copies.regions.get((value, tier))
        device = self.copies.device if tier is Tier.DEVICE else torch.device("cpu")
        fetched = None if region is None else this.views(region.memory)
        shown = self._gradients(block)
        own = self._own(block) if fetched is not None else ()
        return {
            i: fetched[i] if fetched is not None and gradient.data_ptr() in own else gradient.to(device)
            for i, gradient in shown.items()
        }

    def send_home(self, block: int) -> None:
        """All that a schedule does for a block's gradient, at once."""
        value = Value(Kind.GRADIENT, block)
        self.lay_out(block)
        self._go_home(value)

    def in_backward(self, block: int) -> Found:
        """Gradients for an update within the backward that has made them."""
        return self.hooked(block)

    def bring_back(self, block: int) -> None:
        """Let what was sent home be fresh again: on the device, summed."""
        value = Value(Kind.GRADIENT, block)
        self.copies.copy_now(value, self.copies.home_of(value), Tier.DEVICE)
        views = self.copies.blocks[block].views(self.copies.region(value, Tier.DEVICE).memory)
        self.fresh[block] = {i: views[i] for i in self._arrived.pop(block)}
        self._sums.add(block)

    def leave(self) -> None:
        """Give back the bytes at home that no ``.grad`` shows any more: plans count on them where gradients stay on the
        device now, and states may need them before the next gradient does. Send home what ``.grad`` has on the device
        of blocks whose gradients do not live there."""
        for this in self.copies.blocks:
            value = Value(Kind.GRADIENT, this.index)
            home = self.copies.home_of(value)
            shown = self._gradients(this.index)
            stepped = any(isinstance(gradient, SteppedGradient) for gradient in shown.values())
            if home is Tier.DEVICE or stepped or self.copies.on_host.uses(this.index):
                continue
            own = self._own(this.index) if shown else ()
            at_home = [gradient.data_ptr() in own for gradient in shown.values()]
            if not any(at_home) and not self._is_due(value):
                self.copies.renew(value, home)
                self.copies.release(value, home)
            if not all(at_home) and self.copies.tier_of(value) is not Tier.DEVICE:
                self._bring_home(value, shown)

    def rehome(self, value: Value, target: Tier) -> None:
        """Move what lies at home to another tier, with what ``.grad`` shows of it."""
        copies, this, source = self.copies, self.copies.blocks[value.index], self.copies.home_of(value)
        own = self._own(value.index)
        shown = [i for i, gradient in self._gradients(value.index).items() if gradient.data_ptr() in own]
        if shown:
            copies.copy_now(value, source, target)
            views = this.views(copies.bytes_at(value, target))
            for i in shown:
                this.parameters[i].grad = views[i]
        copies.renew(value, source)
        copies.release(value, source)

    def _bring_home(self, value: Value, shown: Mapping[int, torch.Tensor]) -> None:
        copies, this = self.copies, self.copies.blocks[value.index]
        views = this.views(copies.region(value, Tier.DEVICE).memory)
        for i, gradient in shown.items():
            views[i].copy_(gradient)
        self._go_home(value)
        for i, view in this.views(copies.bytes_at(value, copies.home_of(value))).items():
            if i in shown:
                this.parameters[i].grad = view

    def hooked(self, block: int) -> Found:
        """The fresh gradients, taken out, as the parameters' hooks leave them."""
        parameters, fresh = self.copies.blocks[block].parameters, self.fresh.pop(block, {})
        if block in self._sums:
            self._sums.discard(block)
            return fresh
        return fresh if self.together else {i: through_hooks(parameters[i], g) for i, g in fresh.items()}

    def accumulate(self, block: int) -> None:
        """Let ``.grad`` have the fresh gradients as they are: they stay on the device."""
        summed = block in self._sums
        self._sums.discard(block)
        found = self.fresh.pop(block)
        for i in list(found):
            parameter, gradient = self.copies.blocks[block].parameters[i], found.pop(i)
            if not summed:
                gradient = through_hooks(parameter, gradient)
            references = sys.getrefcount(gradient)
            if parameter.grad is None and not summed and is_held(gradient, references):
                gradient = gradient.clone()
            if summed:
                parameter.grad = gradient  # what it was is in the sum
                self._after(block, i)
            else:
                add(parameter, gradient)

    def _after(self, block: int, number: int) -> None:
        """Hooks after accumulation may talk to other ranks, whose plans bring gradients to ``.grad`` at other times:
        among ranks these hooks wait for the end of the backward."""
        if self.sharing is None:
            after_accumulation(self.copies.blocks[block].parameters[number])
        else:
            self._hooked.setdefault(block, []).append(number)

    def _run_hooks(self) -> None:
        hooked, self._hooked = self._hooked, {}
        for block in sorted(hooked, reverse=True):  # one order on all ranks
            for number in sorted(hooked[block]):
                after_accumulation(self.copies.blocks[block].parameters[number])

    def stepped(self, block: int, numbers: Iterable[int]) -> None:
        """An update has used these gradients up: ``.grad`` will say so."""
        self._stepped[block] = list(numbers)

    def publish(self) -> None:
        """Let ``.grad`` be the gradients that came home."""
        for block, arrived in self._arrived.items():
            value, this = Value(Kind.GRADIENT, block), self.copies.blocks[block]
            if self._failed:  # .grad may have been set to None since: what it showed comes back, if it still does
                self._put_back(value, self._earlier.pop(block, None))
                continue
            views = this.views(self.copies.bytes_at(value, self.copies.home_of(value)))
            if self.together:
                self._add_to_earlier(value, {i: through_hooks(this.parameters[i], views[i]) for i in arrived})
                continue
            for i in arrived:
                this.parameters[i].grad = views[i]
                self._after(block, i)
        for block, numbers in self._stepped.items():
            for i in numbers:
                parameter = self.copies.blocks[block].parameters[i]
                parameter.grad = SteppedGradient.standing_for(parameter)
                self._after(block, i)
        self._arrived.clear()
        self._stepped.clear()
        self.together = self._failed = False
        self._run_hooks()

    def clear(self) -> None:
        """The backward has failed: what of it no one sees yet, no one will see."""
        if self.sharing is not None:
            self.sharing.fail()
        self.fresh.clear()
        self._sums.clear()
        self.left_out.clear()
        self._hooked.clear()
        self._failed = True

    def _put_aside(self, value: Value) -> None:
        """This backward's sum gets a home of its own beside the bytes that ``.grad`` shows. Where plans fill the host,
        that has no room for both: what is shown goes to the disk."""
        if value.index in self._earlier:
            return
        if self.copies.fills_host(value):
            self.rehome(value, Tier.DISK)
            self._earlier[value.index] = self.copies.regions.pop((value, Tier.DISK), None)
        else:
            self._earlier[value.index] = self.copies.regions.pop((value, self.copies.home_of(value)), None)

    def _add_to_earlier(self, value: Value, sums: Found) -> None:
        copies, parameters = self.copies, self.copies.blocks[value.index].parameters
        earlier = self._earlier.pop(value.index, None)
        views = {} if earlier is None else copies.blocks[value.index].views(copies.bytes_of(earlier))
        for i, total in sums.items():
            held = views[i].copy_(total) if views and parameters[i].grad is None else total
            add(parameters[i], held)
        self._put_back(value, earlier)

    def _put_back(self, value: Value, earlier: Region | None) -> None:
        copies, home = self.copies, self.copies.home_of(value)
        if earlier is None:
            return
        copies.release(value, home)
        copies.regions[value, earlier.tier] = earlier
        if earlier.tier is not home:  # back, where the sum has made room: plans that are under way know that home
            copies.on_disk |= {value}
            self.rehome(value, home)
            copies.on_disk -= {value}

    def _go_home(self, value: Value) -> None:
        self.copies.copy_now(value, Tier.DEVICE, self.copies.home_of(value))
        self.copies.release(value, Tier.DEVICE)

    def _gradients(self, block: int) -> dict[int, torch.Tensor]:
        """What ``.grad`` shows, by the parameter's place in the block."""
        return {i: p.grad for i, p in enumerate(self.copies.blocks[block].parameters) if p.grad is not None}

    def _shown(self, block: int) -> bool:
        """Whether any ``.grad`` shows the gradients at home."""
        own = self._own(block)
        return any(p.grad is not None and p.grad.data_ptr() in own for p in self.copies.blocks[block].parameters)

    def _is_due(self, value: Value) -> bool:
        """Whether a backward under way has bytes at home for ``.grad`` to show."""
        under_way = value.index in self._arrived or value.index in self._earlier
        return under_way or (value, self.copies.home_of(value)) in self.copies.tickets

    def _all_at_home(self, block: int, earlier: Mapping[int, torch.Tensor]) -> bool:
        own = self._own(block) if earlier else ()
        return bool(earlier) and all(gradient.data_ptr() in own for gradient in earlier.values())

    def _own(self, block: int) -> frozenset[int]:
        """Addresses of the block's gradients at home."""
        value = Value(Kind.GRADIENT, block)
        if not self.copies.has(value, self.copies.home_of(value)):
            return frozenset()
        memory = self.copies.bytes_at(value, self.copies.home_of(value))
        return frozenset(view.data_ptr() for view in self.copies.blocks[block].views(memory).values())
