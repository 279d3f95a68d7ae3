"""What replays of earlier calls have shown: the same as asking again."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from side_by_side import least, outcome, same
from torch import nn
from torch.nn import functional

from tapestream.errors import GradientError
from tapestream.executor.program.record.lessons import Lessons
from tapestream.executor.program.replay.steps import ProgramSteps
from tapestream.frontends.program.program import Program

Case = tuple[Callable[..., Any], list[torch.Tensor], torch.Tensor]


def layers() -> Case:
    """The weights have versions of their own."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(6)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model, [*model.parameters()], torch.randn(3, 5, 8)


def convolutions() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
                            for _ in range(6)))  # fmt: skip
    return model, [*model.parameters()], torch.randn(2, 3, 6, 6)


def products() -> Case:
    """Of transposed, broadcast, conjugated and expanded tensors, and of parts of one."""
    torch.manual_seed(0)
    weight = torch.randn(6, 6, requires_grad=True)
    wave = torch.randn(6, 6, dtype=torch.complex64, requires_grad=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        for _ in range(4):
            first, second = (torch.tanh(x) @ weight.t()).chunk(2, 1)
            x = torch.cat([first * second[:1].expand(6, 3), second * weight[:, ::2]], 1)
            z = torch.tanh(x) * wave.conj() * wave
            x = functional.linear(z.real + z.imag.t(), weight) * 0.1 + x
        return x

    return function, [weight, wave], torch.randn(6, 6)


@pytest.mark.parametrize("make", [layers, convolutions, products])
def test_what_is_known_to_be_saved_is_what_the_call_saves(
    make: Callable[[], Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same views of the same memory, that count the same versions."""
    known, save = list[int](), ProgramSteps._save

    def twice(self: ProgramSteps, k: int, pattern: Any, tensors: Any, into: Any) -> None:
        if self._lessons is not None and self._lessons.saved(k, pattern, tensors) is not None:
            known.append(k)
        save(self, k, pattern, tensors, into)
        found, lessons, self._lessons = into[:], self._lessons, None
        into.clear()
        save(self, k, pattern, tensors, into)
        self._lessons = lessons
        for (a, version), (b, of_call) in zip(found, into, strict=True):
            assert version == of_call == a._version
            assert not a.requires_grad
            assert (a.shape, a.stride(), a.dtype, a.data_ptr()) == (b.shape, b.stride(), b.dtype, b.data_ptr())
            assert (a.is_conj(), a.is_neg()) == (b.is_conj(), b.is_neg())
        into[:] = found

    monkeypatch.setattr(ProgramSteps, "_save", twice)
    function, leaves, x = make()
    runs = Program(function, budget=2 * least(function, leaves, lambda: (x,), 0), planner="revolve")
    for seed in range(7):
        expected, got = (outcome(one, leaves, lambda: (x,), seed) for one in (function, runs))
        assert all(map(same, got[2], expected[2]))
        assert runs.report is not None
        assert seed == 0 or runs.report.planned
    assert len(known) > 10


def test_a_call_is_asked_again_where_arguments_lie_otherwise() -> None:
    lessons, weight, x = Lessons(), torch.randn(4, 4), torch.randn(3, 4)
    pattern: Any = object()
    saved = [(t, t._version) for t in (x.view(3, 4), weight.t())]
    lessons.has_saved(5, pattern, [x, weight], saved)
    found = lessons.saved(5, pattern, [x, weight])
    assert found is not None
    assert [(t.data_ptr(), t.shape, t.stride()) for t, _ in found] == [
        (t.data_ptr(), t.shape, t.stride()) for t, _ in saved
    ]
    assert lessons.saved(5, pattern, [x, weight.t()]) is None
    assert lessons.saved(5, pattern, [x.double(), weight]) is None
    assert lessons.saved(5, pattern, [x[:2], weight]) is None
    assert lessons.saved(5, object(), [x, weight]) is None  # type: ignore[arg-type]
    assert lessons.saved(6, pattern, [x, weight]) is None
    lessons.has_saved(6, pattern, [x, weight], [(x * 2, 0)])  # of no argument
    assert lessons.saved(6, pattern, [x, weight]) is None


def test_arguments_of_one_memory_have_to_lie_as_they_did_beside_each_other() -> None:
    lessons, both, pattern = Lessons(), torch.randn(4, 32), object()

    def crops(at: int, other: int) -> list[torch.Tensor]:
        return [both[:, at : at + 8], both[:, other : other + 8]]

    def asked(tensors: list[torch.Tensor]) -> list[int] | None:
        found = lessons.saved(0, pattern, tensors)  # type: ignore[arg-type]
        return None if found is None else [tensor.data_ptr() for tensor, _ in found]

    first = crops(0, 8)
    lessons.has_saved(0, pattern, first, [(t, t._version) for t in first])  # type: ignore[arg-type]
    assert asked(first) == [t.data_ptr() for t in first]
    moved = crops(4, 12)
    assert asked(moved) == [t.data_ptr() for t in moved]
    assert asked(crops(0, 16)) is None
    assert asked(crops(8, 0)) is None
    assert asked([t.clone() for t in crops(0, 8)]) is None


def test_crops_of_one_activation_elsewhere_in_each_call() -> None:
    weight, at = torch.randn(16, 16).div_(4).requires_grad_(), [0, 8]
    x = torch.randn(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ weight)
        q = torch.mul(h[:, at[0] : at[0] + 4], h[:, at[1] : at[1] + 4]).sum()
        for _ in range(12):
            h = torch.tanh(h @ weight)
        return h.sum() + q

    runs = Program(function, budget=least(function, [weight], lambda: (x,), 0) + 4096, planner="revolve")
    for at[:] in ([0, 8], [0, 8], [0, 8], [0, 8], [0, 8], [0, 4], [0, 12], [12, 0], [0, 0], [8, 0], [0, 8]):
        expected, got = (outcome(one, [weight], lambda: (x,)) for one in (function, runs))
        assert same(got[2][0], expected[2][0])
        assert runs.report is not None
        assert runs.report.reruns


def test_casts_of_values_that_are_looked_at_without_gradients_first() -> None:
    """Autocast remembers casts of leaves alone, and values are none where they are made."""
    torch.manual_seed(0)
    weights = [torch.randn(16, 16).div_(4).requires_grad_() for _ in range(8)]
    gate, x = torch.randn(16, 16), torch.randn(16, 16)

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for weight in weights:
                with torch.no_grad():
                    g = torch.sigmoid(functional.linear(x, gate)).float()
                x = torch.tanh(functional.linear(x, weight).float()) * g
        return x.sum()

    for more in (0, 1024, 4096):
        runs = Program(function, budget=least(function, weights, lambda: (x,), 0) + more, planner="revolve")
        for _ in range(4):
            expected, got = (outcome(one, weights, lambda: (x,)) for one in (function, runs))
            assert all(map(same, got[2], expected[2]))


def test_a_weight_that_is_written_into_before_backward_is_refused_in_followed_calls_too() -> None:
    function, leaves, x = layers()
    runs = Program(function, budget=2 * least(function, leaves, lambda: (x,), 0), planner="revolve")
    for _ in range(5):
        runs(x).sum().backward()
    loss = runs(x).sum()
    with torch.no_grad():
        leaves[0].mul_(2.0)
    with pytest.raises(GradientError, match="modified in place"):
        loss.backward()


def test_what_is_to_be_done_is_asked_again_where_other_values_are_there() -> None:
    lessons, asked = Lessons(), list[int]()

    def find() -> bytearray:
        asked.append(len(asked))
        return bytearray([len(asked)])

    assert lessons.needed((0, 3), {1, 2}, {7}, find) == bytearray([1])
    assert lessons.needed((0, 3), {2, 1}, {7}, find) == bytearray([1])
    assert lessons.needed((0, 3), {1}, {7}, find) == bytearray([2])
    assert lessons.needed((0, 3), {1}, set(), find) == bytearray([3])
    assert lessons.needed((3, 4), {1}, set(), find) == bytearray([4])
