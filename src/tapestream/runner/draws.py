"""How many numbers a computation draws from PyTorch's generators, so that they can be put behind it before it runs."""

from dataclasses import dataclass

import torch

from tapestream.runner.ambient import TorchGenerators

# The CPU's generator is a Mersenne twister: 624 words, of which ``left`` says how many are still to be used before all
# are made anew. This is how PyTorch writes it down; a draw of whole numbers of 32 bits uses one word each.
_WORDS, _LEFT, _FIRST, _NBYTES = 624, slice(8, 12), 24, 5056
_MOST = 50_000_000  # words that are looked through
_PHILOX_NBYTES = 16  # seed and offset, eight bytes each


@dataclass(frozen=True, slots=True)
class Draws:
    """``words``: from the CPU's generator; ``offsets``: from each accelerator's, counted as it does itself."""

    words: int
    offsets: tuple[int, ...]

    @classmethod
    def between(cls, before: TorchGenerators, after: TorchGenerators) -> "Draws | None":
        """Those that lead from one to the other; None where that is not known: after a new seed, many draws, or an odd
        number of normally distributed ones."""
        words = _words_between(before.cpu, after.cpu)
        pairs = zip(before.others, after.others, strict=True)
        offsets = [_offset_between(old, new) for (_, old), (_, new) in pairs]
        if words is None or any(offset is None for offset in offsets):
            return None
        found = cls(words, tuple(offset for offset in offsets if offset is not None))
        return found if found.behind(before).equals(after) else None

    def behind(self, states: TorchGenerators) -> TorchGenerators:
        """What ``states`` are after these draws."""
        others = ((one, _moved(s, offset)) for (one, s), offset in zip(states.others, self.offsets, strict=True))
        generator = torch.Generator(device="cpu")
        generator.set_state(states.cpu)
        _draw(generator, self.words)
        return TorchGenerators(generator.get_state(), tuple(others))


def _words_between(before: torch.Tensor, after: torch.Tensor) -> int | None:
    if len(before) != _NBYTES or len(after) != _NBYTES:
        return None
    wanted = _numbers(after)
    if wanted == _numbers(before):
        return _left(before) - _left(after)
    generator = torch.Generator(device="cpu")
    generator.set_state(before)
    words = step = _left(before)
    while words <= _MOST:
        _draw(generator, step)
        if _numbers(generator.get_state()) == wanted:
            return words + _WORDS - _left(after)
        words, step = words + _WORDS, _WORDS
    return None


def _draw(generator: torch.Generator, words: int) -> None:
    """At most a few megabytes at once."""
    for start in range(0, words, 1 << 20):
        torch.empty(min(1 << 20, words - start), dtype=torch.int32, device="cpu").random_(generator=generator)


def _numbers(state: torch.Tensor) -> bytes:
    return state[_FIRST : _FIRST + 8 * _WORDS].numpy().tobytes()


def _left(state: torch.Tensor) -> int:
    return int(state[_LEFT].view(torch.int32))


def _offset_between(before: torch.Tensor, after: torch.Tensor) -> int | None:
    if len(before) != _PHILOX_NBYTES:
        return 0 if torch.equal(before, after) else None
    (seed, start), (other, end) = before.view(torch.int64).tolist(), after.view(torch.int64).tolist()
    return end - start if seed == other and end >= start else None


def _moved(state: torch.Tensor, offset: int) -> torch.Tensor:
    moved = state.clone()
    if offset:
        moved.view(torch.int64)[1] += offset
    return moved
