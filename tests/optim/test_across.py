"""Which parameters the bytes of a tensor come from."""

import torch

from tapestream.optim.across import Across


def gradients() -> tuple[Across, list[torch.Tensor]]:
    across, made = Across(), [torch.ones(2, 2) for _ in range(2)]
    for number, one in enumerate(made):
        across.begin(number, (one, None))
    return across, made


def test_a_batch_comes_from_all_and_so_do_its_parts() -> None:
    for join in (torch.stack, torch.cat):
        across, made = gradients()
        with across:
            parts = join(made).split(1)
        assert across.mixes(0, parts[:1])
        assert across.mixes(1, parts[1:])


def test_lists_of_kernels_and_single_numbers_do_not_mix() -> None:
    across, made = gradients()
    with across:
        scaled = torch._foreach_mul(made, [2.0, 3.0])
        torch._foreach_add_(scaled, made)
        norms = torch.stack([one.norm() for one in made])
        torch._foreach_mul_(scaled, list(norms.unbind()))
    assert not any(across.mixes(number, [one]) for number, one in enumerate(scaled))


def test_tensors_without_memory_of_their_own_are_not_taken_for_one() -> None:
    across, made = Across(), [torch.eye(2).to_sparse() for _ in range(2)]
    for number, one in enumerate(made):
        across.begin(number, (one,))
    assert not any(across.mixes(number, [one]) for number, one in enumerate(made))
