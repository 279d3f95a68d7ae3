"""Random heterogeneous chains for hypothesis: small whole numbers, so that sums of seconds are exact."""

from hypothesis import strategies as st

from tapestream.costs import Carried, Profile, StageCost

_seconds = st.integers(0, 5).map(float)
_stages = st.builds(
    StageCost,
    _seconds,
    _seconds,
    output_nbytes=st.integers(0, 6),
    saved_nbytes=st.integers(0, 7),
    reads_input=st.booleans(),
    reads_output=st.booleans(),
    forward_extra_nbytes=st.sampled_from((0, 0, 3)),
    record_extra_nbytes=st.sampled_from((None, 0, 2)),
    backward_extra_nbytes=st.sampled_from((0, 0, 4)),
    cotangent_nbytes=st.none() | st.integers(0, 6),
    record_seconds=st.none() | st.integers(5, 7).map(float),
    gradient_nbytes=st.sampled_from((0, 0, 3, 9)),
)


@st.composite
def chains(draw: st.DrawFn, most: int = 12, carried: bool = True) -> Profile:
    """A chain of 1 .. ``most`` stages."""
    stages = draw(st.lists(_stages, min_size=1, max_size=most))
    n = len(stages)
    spans = st.tuples(st.integers(0, n), st.integers(0, n), st.integers(0, 5))
    shared = draw(st.lists(spans, max_size=2)) if carried else []
    return Profile(
        tuple(stages),
        draw(st.integers(0, 6)),
        carried=tuple(Carried(min(a, b), max(a, b), nbytes) for a, b, nbytes in shared),
        outside_nbytes=draw(st.sampled_from((0, 0, 5))),
        turn_nbytes=draw(st.sampled_from((0, 0, 8))),
        turn_seconds=draw(_seconds),
    )
