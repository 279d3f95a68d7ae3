"""Random chains with parameter blocks, machines and schedules of computation alone."""

from hypothesis import strategies as st

from tapestream.costs import BlockCost, Budget, Link, Machine, Profile, StageCost
from tapestream.ir import Forward, Phase, PhaseKind, Schedule, Tier
from tapestream.planners import planners

DEVICE, HOST, DISK = Tier.DEVICE, Tier.HOST, Tier.DISK
UPDATES = ("step", "backward", None)


@st.composite
def chains(draw: st.DrawFn) -> Profile:
    """Up to eight stages: blocks shared, frozen, without optimizer state or with it in parts, with buffers, or none."""
    count = draw(st.integers(1, 5))
    size = st.integers(1, 30)
    blocks = []
    for _ in range(count):
        parameters, frozen = draw(size), draw(st.booleans())
        parts = draw(st.sampled_from(((), (0,), (2 * parameters,), (0, 0), (parameters, 0, 1), (5, parameters))))
        blocks.append(
            BlockCost(
                parameters,
                0 if frozen else parameters,
                sum(parts),
                draw(st.integers(0, 2)),
                draw(st.sampled_from((0.0, 0.5))),
                draw(st.integers(0, 3)),
                parts,
            )
        )
    stages = tuple(
        StageCost(
            draw(st.sampled_from((0.5, 1.0, 3.0))),
            draw(st.sampled_from((1.0, 2.0))),
            draw(st.integers(0, 9)),
            draw(st.integers(0, 20)),
            reads_input=draw(st.booleans()),
            reads_output=draw(st.booleans()),
            forward_extra_nbytes=draw(st.integers(0, 5)),
            backward_extra_nbytes=draw(st.integers(0, 5)),
            block=draw(st.one_of(st.none(), st.integers(0, count - 1))),
        )
        for _ in range(draw(st.integers(1, 8)))
    )
    return Profile(stages, draw(st.integers(0, 5)), tuple(blocks), (), draw(st.integers(0, 4)), 3, 0.5)


@st.composite
def machines(draw: st.DrawFn) -> tuple[Machine, Tier]:
    """A machine and a home below its device: the host, the disk beside it, or the disk behind the host."""
    rates = st.sampled_from((1.0, 8.0, 100.0))

    def pair(near: Tier, far: Tier) -> dict[tuple[Tier, Tier], Link]:
        mixed = draw(st.sampled_from((None, 0.3)))
        return {
            lane: Link(draw(rates), draw(st.sampled_from((0.0, 0.1))), mixed, draw(st.sampled_from((0.0, 0.2))))
            for lane in ((near, far), (far, near))
        }

    near = pair(DEVICE, HOST)
    return draw(
        st.sampled_from(
            (
                (Machine(near), HOST),
                (Machine(pair(DEVICE, DISK)), DISK),
                (Machine({**near, **pair(HOST, DISK)}), DISK),
            )
        )
    )


@st.composite
def computations(draw: st.DrawFn, profile: Profile) -> Schedule:
    """A schedule without copies, with or without backward and recomputation."""
    if draw(st.booleans()) and draw(st.booleans()):
        n = len(profile)
        return Schedule.of((Phase(PhaseKind.FORWARD), Forward(0, n)), n)
    name = draw(st.sampled_from(("store_all", "periodic", "bisection")))
    return planners[name](profile.without_blocks(), Budget(), None)
