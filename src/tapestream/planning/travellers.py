"""`Travellers`: storages that pass unchanged through several states count once."""

from dataclasses import replace

from tapestream.costs import Carried, StageCost
from tapestream.runner.state import State, storages


class Travellers:
    """Follows storages that pass unchanged through several states, while both states are alive."""

    def __init__(self, initial: State) -> None:
        self._state = 0
        self._spans: dict[tuple[int, int], tuple[int, int]] = {}  # (born, number) -> (last, bytes)
        self._number = {address: (0, i) for i, address in enumerate(storages(initial.tensors))}

    def follow(self, state: State, out: State) -> None:
        """State ``out`` was made from ``state``."""
        before = storages(state.tensors)
        self._state += 1
        number: dict[int, tuple[int, int]] = {}
        for i, (address, nbytes) in enumerate(storages(out.tensors).items()):
            key = self._number[address] if address in before else (self._state, i)
            number[address] = key
            if key[0] < self._state:
                self._spans[key] = (self._state, nbytes)
        self._number = number

    @property
    def nbytes(self) -> int:
        """All that passes unchanged from one state to another, the caller's included."""
        return sum(nbytes for _, nbytes in self._spans.values())

    def carried(self, costs: list[StageCost]) -> tuple[Carried, ...]:
        """The storages found; their bytes leave the costs of the stages that made them. The caller's cost nothing."""
        found = []
        for (born, _), (last, nbytes) in self._spans.items():
            if born > 0:
                cost = costs[born - 1]  # a stage that goes by chance may have made less when it was measured
                costs[born - 1] = replace(cost, output_nbytes=max(0, cost.output_nbytes - nbytes))
                found.append(Carried(born, last, nbytes))
        return tuple(found)
