"""Options of a Loop and of its calls in unusual combinations: each does something or is refused."""

import numpy
import pytest
import torch
from looping import same, tanh_rnn

import tapestream as ts
from tapestream.errors import GradientError, InputError

WEIGHT = torch.full((3,), 0.9, requires_grad=True)


def shrink(h):
    return torch.sin(h * WEIGHT)


def shrunk(state):
    return state * 0.9


def shrunk_back(state, cotangent):
    return cotangent * 0.9


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("how", ["stack", "sum"])
def test_no_output_is_taken_where_every_is_beyond_the_end(how, grad):
    with torch.set_grad_enabled(grad):
        state, out = ts.Loop(lambda h: (shrink(h), h))(torch.ones(3), steps=4, outputs=how, every=5)
    assert out is None
    assert state.shape == (3,)


def test_steps_may_be_a_number_of_numpy():
    run = ts.Loop(shrink)
    assert same(run(torch.ones(3), steps=numpy.int64(4)), run(torch.ones(3), steps=4))


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("late", [3, 0])
def test_a_dictionary_may_be_written_down_in_another_order(late, deep):
    def step(state, t):
        new = {"u": torch.sin(state["u"] * WEIGHT), "v": state["v"] + state["u"]}
        return new if t < late else {"v": new["v"], "u": new["u"]}

    def final(loop):
        state = {"u": torch.ones(3), "v": torch.zeros(3)}
        if loop and deep:
            run = ts.Loop(lambda s, t: [step(s[0], t), t], planner="revolve", slots=2)
            state, _ = run([state, 0], inputs=range(9))
        elif loop:
            state = ts.Loop(step, planner="revolve", slots=2)(state, inputs=range(9))
        else:
            for t in range(9):
                state = step(state, t)
        (gradient,) = torch.autograd.grad((state["u"] * state["v"]).sum(), WEIGHT)
        return state["u"].detach(), state["v"].detach(), gradient

    assert all(map(same, final(True), final(False)))
    with pytest.raises(InputError, match=r"step 4 returned state\['u'\] = no tensor instead of \(3,\)"):
        ts.Loop(lambda s, t: {"v": s["v"], "u": s["u"] * WEIGHT if t < 4 else 1})(
            {"u": torch.ones(3), "v": torch.zeros(3)}, inputs=range(9)
        )


@pytest.mark.parametrize(
    ("late", "message"),
    [
        (lambda h: {"a": (h,), "b": [[1]]}, "returned the structure"),
        (lambda h: {"a": [h], "b": [1]}, "returned the structure"),
        (lambda h: {"a": (h, h), "b": [1]}, "returned the structure"),
        (lambda h: {"a": (h[:1],), "b": [1]}, r"state\['a'\]\[0\] = \(1,\) float32 instead of \(3,\)"),
        (lambda h: {"a": (h,), "b": [h]}, r"state\['b'\]\[0\] = \(3,\) float32 instead of no tensor"),
    ],
    ids=["deeper", "kind", "longer", "shape", "tensor"],
)
def test_a_changed_tree_is_named(late, message):
    def step(state, t):
        h = torch.sin(state["a"][0] * WEIGHT)
        return late(h) if t == 4 else {"a": (h,), "b": [t]}

    with pytest.raises(InputError, match=message):
        ts.Loop(step, planner="revolve", slots=2)({"a": (torch.ones(3),), "b": [0]}, inputs=range(9))


@pytest.mark.parametrize("grad", [True, False])
def test_outputs_of_a_long_run_that_ends_by_itself(grad):
    """Rows are taken in blocks, and a stack of unknown height grows."""
    with torch.set_grad_enabled(grad):
        run = ts.Loop(lambda s: ((shrink(s[0]), s[1] + 1), s[1] * torch.ones(2)), planner="online", slots=3, chunk=5)
        for end in (1, 2, 3, 31, 70):
            _, out = run((torch.ones(3), torch.zeros(())), until=lambda s, end=end: s[1] == end, outputs="stack")
            assert same(out.detach(), torch.arange(float(end))[:, None].expand(end, 2))


@pytest.mark.parametrize("found", [None, "no", numpy.ones(2), torch.ones(2)], ids=["None", "text", "array", "tensor"])
def test_a_condition_says_yes_or_no(found):
    with pytest.raises(InputError, match="until= returned"):
        ts.Loop(shrink)(torch.ones(3), until=lambda h: found, max_steps=5)
    with pytest.raises(InputError, match="until= is a function"):
        ts.Loop(shrink)(torch.ones(3), until=found if found is not None else 3)


@pytest.mark.parametrize("true", [True, 1, numpy.True_, numpy.ones(1), torch.ones(1, 1)], ids=str)
def test_a_condition_may_say_yes_in_many_ways(true):
    state = torch.ones(3)
    assert ts.Loop(shrink)(state, until=lambda h: true) is state


def test_plans_are_plans_and_for_a_known_length():
    with pytest.raises(InputError, match=r"plan= is a Plan .*not str"):
        ts.Loop(shrink, plan="plan.json")
    run = ts.Loop(shrink)
    run(torch.ones(3), steps=5)
    with pytest.raises(InputError, match="known number of steps"):
        ts.Loop(shrink, plan=run.plan)(torch.ones(3), until=lambda h: h.sum() < 1)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("grad", [True, False])
def test_progress_is_told_during_a_sweep(known, grad, monkeypatch):
    monkeypatch.setattr("tapestream.frontends.loop.progress._EVERY_SECONDS", 0)
    told = []
    options = {"planner": "revolve" if known else "online", "slots": 4}
    how = {"steps": 300} if known else {"until": lambda state: state[1] == 300}
    with torch.set_grad_enabled(grad):
        run = ts.Loop(lambda s: (shrink(s[0]), s[1] + 1), progress=lambda *what: told.append(what), **options)
        out, _ = run((torch.ones(3), 0), **how)
    sweep = [done for done, _, _ in told if done < 300]
    assert len(sweep) >= 4
    if grad:
        out.sum().backward()
    done = [one[0] for one in told]
    assert done == sorted(done)
    assert told[-1] == (done[-1], done[-1], 0)
    if known:
        assert len(set(done)) == len(done)
        assert {of for _, of, _ in told} == {done[-1]}


def test_adjoint_with_verify_and_compile():
    start = torch.ones(4, dtype=torch.float64, requires_grad=True)
    with pytest.raises(InputError, match="leave one out"):
        ts.Loop(shrunk, adjoint=shrunk_back, compile=True)
    with pytest.raises(InputError, match="not int"):
        ts.Loop(shrunk, adjoint=3)
    ts.Loop(shrunk, adjoint=shrunk_back, verify=True)(start, steps=5).sum().backward()
    drawn = lambda state: state * numpy.random.rand()  # noqa: E731  # the global generator is replayed
    ts.Loop(drawn, adjoint=shrunk_back, verify=True)(start, steps=5).sum().backward()
    fresh = lambda state: state * numpy.random.default_rng().random()  # noqa: E731
    with pytest.raises(GradientError, match="not deterministic"):
        ts.Loop(fresh, adjoint=shrunk_back, verify=True)(start, steps=5)


def test_a_generator_first_drawn_from_late_is_refused():
    generator = numpy.random.default_rng(0)

    def step(h, t):
        return torch.sin(h * WEIGHT) * (float(generator.random()) if t == 5 else 1.0)

    with pytest.raises(GradientError, match="one of its own"):
        ts.Loop(step, planner="revolve", slots=2)(torch.ones(3), inputs=range(9))


def test_a_step_that_torch_compile_cannot_take_says_why():
    step, h, _ = tanh_rnn()

    def prints(state):
        torch._dynamo.graph_break()
        return step(state)

    with pytest.raises(InputError, match=r"cannot take the step as one graph.*graph_break"):
        ts.Loop(prints, compile="aot_eager")(h, steps=8)


def test_auto_says_what_it_took_and_what_the_next_best_stages_would_cost() -> None:
    w = torch.eye(16)
    run = ts.Loop(lambda h: torch.tanh(h @ w), budget="20 KiB")
    run(torch.ones(4, 16, requires_grad=True), steps=1000).sum().backward()
    plan = run.plan
    assert plan is not None
    (name, seconds, reason), *others = plan.alternatives
    assert (name, seconds) == (plan.planner, plan.seconds)
    assert reason.startswith("in stages of ")
    assert len(others) == 2
    assert all(other is not None and other >= seconds for _, other, _ in others)
    assert "the next best, stages of" in str(plan)


def test_a_function_gets_outputs_without_a_graph():
    """Also one that is a parameter, which asks for a gradient where none is recorded."""
    weight, seen = torch.ones(3, requires_grad=True), []
    with torch.no_grad():
        ts.Loop(lambda h: (torch.tanh(h * weight), weight))(torch.ones(3), steps=3, outputs=seen.append)
    assert len(seen) == 3
    assert not any(output.requires_grad for output in seen)
