"""Shortest paths over all schedules of few stages with one slower tier and copies that overlap: the truth for `joint`.

Written from the rules of the instruction set alone, on the judge's clock (each lane in order of issue, no mixed rates).
Nothing is dropped before its room is needed, nothing waited for before it must be, no copy issued before the run in
which its lane comes free, and of two positions that differ in what is there the one with less, later, is left out:
none of these loses the least makespan. Sets are bits: state k is bit k, the record of stage k bit 16 + k.
"""

from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from tapestream.ir import Tier

DEVICE = Tier.DEVICE
REC = 16


class Position(NamedTuple):
    due: int  # the next backward's stage, plus one; n + 1 before the turn
    here: int  # on the device
    below: int  # current in the slower tier
    flights: tuple  # (bit, out, end), copies on their way in order of issue; ends in seconds from now, above 0
    lanes: tuple  # seconds until each lane (out, in) is free
    issued: float  # a copy was issued into a lane free after so many seconds: the next run must be longer; -1: none
    coming: bool  # copies in were issued since the last run: no more copies out before it
    leaving: int  # waited for, to be dropped by the next run
    far: int = 0  # the highest state reached so far
    owed: int = 0  # copied out and not yet called back: what is never called back need not go


def bits(mask):
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


class Search:
    def __init__(self, profile, budget, machine, tier=Tier.HOST):
        self.p, self.n, self.budget = profile, len(profile), budget
        self.links = machine.link(DEVICE, tier), machine.link(tier, DEVICE)
        n = self.n
        self.size = {k: profile.full_state_nbytes(k) for k in range(n + 1)}
        self.size |= {REC + k: c.saved_nbytes for k, c in enumerate(profile.stages)}
        self.tape = [
            (1 << k if c.reads_input else 0) | (1 << k + 1 if c.reads_output else 0)
            for k, c in enumerate(profile.stages)
        ]
        self.sums = {}
        self.positions = 0

    def least(self, limit=float("inf"), most=10**7):
        """Least makespan below ``limit``; None when there is none."""
        order = count()
        out, back = (link.bytes_per_second for link in self.links)
        self.backwards = [0.0]
        for c in self.p.stages:
            self.backwards.append(self.backwards[-1] + c.backward_seconds)
        last = self.size[self.n] + self.p.cotangent_nbytes(self.n) + self.p.turn_nbytes + self.p.outside_nbytes
        self.room = self.budget - last + limit * out * back / (out + back)
        start = Position(self.n + 1, 1, 0, (), (0.0, 0.0), -1.0, False, 0)
        if self.held(start) > self.budget:
            return None
        queue = [(self.ahead(start), next(order), 0.0, start)]
        done = {}
        while queue:
            _, _, now, at = heappop(queue)
            if at.due == 0:
                return now
            if self.dominated(done, at, now):
                continue
            self.positions += 1
            if self.positions > most:
                raise RuntimeError(f"more than {most} positions")
            for seconds, after in self.moves(at):
                f = now + seconds + self.ahead(after)
                if f < limit - 1e-9 and self.payable(after, limit - now - seconds):
                    heappush(queue, (f, next(order), now + seconds, after))
        return None

    def dominated(self, done, at, now):
        key = (at.due, tuple(f[:2] for f in at.flights), at.coming, at.leaving, at.issued < 0, at.far, at.owed)
        ends = (now, at.issued, *(now + f[2] for f in at.flights), now + at.lanes[0], now + at.lanes[1])
        others = done.setdefault(key, [])
        for here, below, times in others:
            if (
                at.here & ~here == 0
                and at.below & ~below == 0
                and all(a <= b + 1e-12 for a, b in zip(times, ends, strict=True))
            ):
                return True
        others.append((at.here, at.below, ends))
        return False

    def recorded(self, at):
        mask = (at.here | at.below) >> REC
        for bit, _, _ in at.flights:
            if bit >= REC:
                mask |= 1 << bit - REC
        return mask

    def ahead(self, at):
        key = (at.due, self.recorded(at), at.far)
        if key not in self.sums:
            stages = self.p.stages[: min(at.due, self.n)]
            left = sum(c.recorded_seconds for k, c in enumerate(stages) if not key[1] >> k & 1)
            left += sum(c.backward_seconds for c in stages)
            if at.due > self.n:
                left += self.p.turn_seconds + self.again(key[1], at.far)
            self.sums[key] = left
        return self.sums[key]

    def payable(self, at, left):
        """Whether all that is owed can come back in time, each copy in before the backward that needs it."""
        if not at.owed:
            return True
        until = at.lanes[1]
        for bit in sorted(bits(at.owed), key=lambda bit: -(bit % REC)):
            k = bit % REC
            if k >= at.due:
                return False
            until += self.links[1].seconds(self.size[bit])
            if until + self.backwards[min(k + 1, self.n)] > left:
                return False
        return True

    def again(self, recorded, far):
        """Least seconds for what cannot be recorded at the turn: it takes room on the device, or has to cross the
        link twice in less than the limit. Stages not run so far, or recorded by now and then dropped, run once more."""
        items = []
        for k, c in enumerate(self.p.stages):
            if recorded >> k & 1 or k >= far:
                extra = c.recorded_seconds if recorded >> k & 1 else min(c.forward_seconds, c.recorded_seconds)
                items.append((extra, c.saved_nbytes + (self.size[k] if c.reads_input else 0)))
        items.sort(key=lambda item: -item[0] / item[1] if item[1] else float("-inf"))
        lost, room = 0.0, self.room
        for extra, nbytes in items:
            share = 1.0 if nbytes <= room else max(0.0, room / nbytes)
            room -= share * nbytes
            lost += (1 - share) * extra
        return lost

    def tape_held(self, mask):
        held = 0
        for k in bits(mask):
            held |= self.tape[k]
        return held

    def held(self, at):
        p, n = self.p, self.n
        mask = at.here | self.tape_held(self.recorded(at))
        for bit, out, _ in at.flights:
            mask |= 0 if out else 1 << bit
        nbytes = p.outside_nbytes + sum(self.size[bit] for bit in bits(mask))
        if at.due <= n:
            nbytes += p.cotangent_nbytes(at.due) + sum(c.gradient_nbytes for c in p.stages[at.due :])
        return nbytes

    def landed(self, at, seconds):
        """Time passes."""
        here, below, flights = at.here, at.below, []
        for bit, out, end in at.flights:
            if end > seconds + 1e-12:
                flights.append((bit, out, end - seconds))
            elif out:
                below |= 1 << bit
            else:
                here |= 1 << bit
        lanes = max(0.0, at.lanes[0] - seconds), max(0.0, at.lanes[1] - seconds)
        return at._replace(here=here, below=below, flights=tuple(flights), lanes=lanes)

    def flying(self, at, out=None):
        mask = 0
        for bit, leaves, _ in at.flights:
            if out is None or leaves == out:
                mask |= 1 << bit
        return mask

    def moves(self, at):
        for bit, out, end in at.flights:
            if end > at.issued or at.issued < 0:
                after = self.landed(at, end)._replace(issued=-1.0, coming=False)
                yield end, after._replace(leaving=at.leaving | 1 << bit if out else at.leaving)
        yield from self.runs(at)
        yield from self.copies(at)

    def run(self, at, after, extra, fixed, seconds):
        if at.issued >= seconds and at.issued >= 0 and (at.issued > 0 or seconds == 0):
            return
        after = after._replace(issued=-1.0, coming=False)
        for found in self.with_room(after, extra, fixed):
            yield seconds, found

    def runs(self, at):
        n, p = self.n, self.p
        flying = self.flying(at)
        recorded = self.recorded(at)
        for k in bits(at.here & (1 << min(n, at.due)) - 1):
            if flying >> (k + 1) & 1 and not at.here >> (k + 1) & 1:
                continue  # it is on its way in
            cost = p.stages[k]
            fixed = 1 << k | 1 << k + 1
            made = at._replace(here=at.here | 1 << k + 1, far=max(at.far, k + 1))
            if not at.here >> (k + 1) & 1 and not at.owed >> (k + 1) & 1:
                for after in self.run(at, made, cost.forward_extra_nbytes, fixed, cost.forward_seconds):
                    yield after[0], self.landed(after[1], after[0])
            if not recorded >> k & 1:
                made = made._replace(here=made.here | 1 << REC + k)
                fixed |= 1 << REC + k
                for after in self.run(at, made, cost.recorded_extra_nbytes, fixed, cost.recorded_seconds):
                    yield after[0], self.landed(after[1], after[0])
        if at.due == n + 1:
            if at.here >> n & 1:
                after = at._replace(due=n)
                for seconds, found in self.run(at, after, p.turn_nbytes, 1 << n, p.turn_seconds):
                    yield seconds, self.useful(self.landed(found, seconds))
        elif at.due and at.here >> (REC + at.due - 1) & 1:
            k = at.due - 1
            if flying >> (REC + k) & 1:
                return
            cost = p.stages[k]
            gone = at._replace(here=at.here & ~(1 << k + 1))
            extra = p.cotangent_nbytes(k) + cost.backward_extra_nbytes + cost.gradient_nbytes
            for seconds, found in self.run(at, gone, extra, 1 << REC + k, cost.backward_seconds):
                own = ~(1 << REC + k)
                found = found._replace(due=k, here=found.here & own, below=found.below & own)
                yield seconds, self.useful(self.landed(found, seconds))

    def useful(self, at):
        """Without what no later run can need."""
        mask = (1 << at.due) - 1
        mask |= mask << REC
        return at._replace(here=at.here & (mask | self.flying(at)), below=at.below & mask)

    def with_room(self, after, extra, fixed):
        """After dropping every least set of things that makes room; what was waited for is among them."""
        if after.leaving & ~after.here:
            return
        held = self.held(after) + extra
        must = after.leaving
        if held <= self.budget:
            if not must:
                yield after
            return
        loose = list(bits(after.here & ~fixed & ~self.flying(after) & ~must))
        if must & fixed:
            return
        base = after._replace(here=after.here & ~must, leaving=0)
        stack = [(base, 0)]
        while stack:
            out, first = stack.pop()
            if self.held(out) + extra <= self.budget:
                dropped = after.here & ~out.here
                if all(
                    self.held(out._replace(here=out.here | 1 << bit)) + extra > self.budget for bit in bits(dropped)
                ):
                    yield out
                continue
            rest = range(first, len(loose))
            stack += [(out._replace(here=out.here & ~(1 << loose[i])), i + 1) for i in rest]

    def copies(self, at):
        if at.leaving:
            return
        due = at.due
        mask = (1 << due) - 1
        flying = self.flying(at)
        if not at.coming:
            for bit in bits(at.here & (mask | mask << REC) & ~at.below & ~flying):
                if self.size[bit]:
                    yield 0.0, self.start(at, bit, True)
        for bit in bits(at.below & ~at.here & ~flying):
            after = self.start(at, bit, False)._replace(coming=True)
            for found in self.with_room(after, 0, 1 << bit):
                yield 0.0, found

    def start(self, at, bit, out):
        lane = at.lanes[not out]
        end = lane + self.links[not out].seconds(self.size[bit])
        lanes = (end, at.lanes[1]) if out else (at.lanes[0], end)
        return at._replace(
            flights=(*at.flights, (bit, out, end)),
            lanes=lanes,
            issued=max(at.issued, lane),
            owed=at.owed | 1 << bit if out else at.owed & ~(1 << bit),
        )
