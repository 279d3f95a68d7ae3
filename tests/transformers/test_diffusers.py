"""Real models of diffusers, where it is installed: what conditions all blocks, and what skips some, is used again."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pairs import sgd
from streamable import Model
from streaming import assert_exact, budget_at, loss_at, options_of, streamed

import tapestream as ts
from tapestream.errors import GradientError

diffusers = pytest.importorskip("diffusers", reason="the tests of diffusion models need diffusers")

STEPS = torch.tensor([3, 7])
NORMS = {"norm_num_groups": 8}


def unet() -> torch.nn.Module:
    return diffusers.UNet2DModel(
        sample_size=16, in_channels=3, out_channels=3, layers_per_block=2, block_out_channels=(32, 64), dropout=0.1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), **NORMS,
    )  # fmt: skip


def conditional_unet() -> torch.nn.Module:
    return diffusers.UNet2DConditionModel(
        sample_size=16, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(32, 64), **NORMS,
        cross_attention_dim=32, attention_head_dim=8, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip


def dit() -> torch.nn.Module:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=3, sample_size=16,
        num_embeds_ada_norm=10, **NORMS,
    )  # fmt: skip


def flux() -> torch.nn.Module:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=2, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def sd3() -> torch.nn.Module:
    return diffusers.SD3Transformer2DModel(
        sample_size=16, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip


def vae() -> torch.nn.Module:
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, down_block_types=("DownEncoderBlock2D",) * 2, latent_channels=4, **NORMS,
        up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(16, 32), sample_size=32,
    )  # fmt: skip


def numbers(*shapes: tuple[int, ...], behind: tuple[torch.Tensor, ...] = ()) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (*(torch.randn(*shape) for shape in shapes), *behind)


CASES = {
    "unet": Model(unet, numbers((2, 3, 16, 16), behind=(STEPS,))),
    "conditional unet": Model(conditional_unet, lambda: (torch.randn(2, 4, 16, 16), STEPS, torch.randn(2, 7, 32))),
    "dit": Model(dit, numbers((2, 4, 16, 16), behind=(STEPS, torch.tensor([1, 2])))),
    "flux": Model(
        flux, numbers((2, 16, 4), (2, 7, 32), (2, 16), behind=(STEPS / 10, torch.zeros(16, 3), torch.zeros(7, 3)))
    ),
    "sd3": Model(sd3, numbers((2, 4, 16, 16), (2, 7, 32), (2, 16), behind=(STEPS,))),
    "vae": Model(vae, numbers((2, 3, 32, 32))),
}


@pytest.mark.parametrize("level", ["half", "least"])
@pytest.mark.parametrize("name", CASES)
def test_streamed(name: str, level: str, tmp_path: Path) -> None:
    home = "device" if name == "dit" else "disk"  # its end uses a part of the first block
    case, found = CASES[name], options_of("adversarial", tmp_path, home)
    assert_exact(case, budget_at(level, case, sgd, **found), knobs={"lr": 1e-3}, **found)


def test_a_part_of_a_block_used_outside_is_refused_by_name(tmp_path: Path) -> None:
    case, found = CASES["dit"], options_of("adversarial", tmp_path)
    with streamed(case, "1 GiB", **found) as model, pytest.raises(GradientError, match=r"blocks\.0\.norm1\.emb"):
        loss_at(model, case).backward()


@pytest.mark.parametrize("name", CASES)
def test_programs(name: str) -> None:
    """A step of plain PyTorch, and at the least budget of the whole model as a program."""
    case, found = CASES[name], []
    for budget in (None, 1):
        model, run = case.model().train(), None
        torch.manual_seed(5)
        batch = case.batch()
        for attempt in range(2 if budget else 1):
            run = model if budget is None else ts.Program(model, budget=budget)
            torch.manual_seed(6)
            try:
                loss = run(*batch).sample.square().mean()
                break
            except ts.BudgetError as error:
                assert not attempt
                budget = error.least_nbytes
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert all(map(torch.equal, *found))
