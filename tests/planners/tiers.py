"""What the tests of planners of several tiers share: machines and profiles in the papers' units."""

import json
from pathlib import Path

from tapestream.costs import Link, Machine, Profile, StageCost, UniformStages
from tapestream.ir import Tier

PUBLISHED = json.loads((Path(__file__).parent / "published_tiers.json").read_text())


def machine(write, read, tiers=(Tier.HOST, Tier.DISK)):
    """Seconds of writing and reading one state of one byte, for each slower tier."""
    links = {}
    for tier, w, r in zip(tiers, write, read, strict=False):
        links[Tier.DEVICE, tier] = Link(1 / w if w else 1e30)
        links[tier, Tier.DEVICE] = Link(1 / r if r else 1e30)
    return Machine(links)


def busy(machine):
    """The same seconds for each copy that is waited for, half of them on the computing thread."""
    half = {
        lane: Link(2 * link.bytes_per_second, busy_seconds=link.seconds(1) / 2) for lane, link in machine.links.items()
    }
    return Machine(half)


def chain(n, forward=1.0, each=1.0, **more):
    """Stages whose record and backward together take ``each`` seconds, states and records of one byte."""
    cost = StageCost(forward, each, 1, 1, record_seconds=0.0, **more)
    return Profile(UniformStages(cost, n), 1)
