"""The adversarial engine shows what a schedule gets wrong."""

import pytest
import torch
from engine_cases import content, fill, make_pool

from tapestream.errors import GradientError
from tapestream.executor.engines.adversarial import AdversarialEngine
from tapestream.ir import MEMORIES, Tier
from tapestream.storage import DiskFolder


@pytest.fixture
def pool(tmp_path):
    folder = DiskFolder(tmp_path)
    yield make_pool(folder)
    folder.close()


@pytest.mark.parametrize("target_tier", list(MEMORIES))
def test_the_target_is_poison_until_the_wait(pool, target_tier):
    engine = AdversarialEngine()
    source, target = pool.allocate(Tier.HOST, 4096), pool.allocate(target_tier, 4096)
    values = fill(source, 0)
    fill(target, 1)
    ticket = engine.copy(source, target)
    held = content(target)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        assert bool(held.view(dtype).isnan().all())
    assert bool((held.view(torch.int64) == -1).all())
    engine.wait(ticket)
    assert torch.equal(content(target), values)


@pytest.mark.parametrize("tier", list(MEMORIES))
def test_released_regions_are_poison(pool, tier):
    engine, region = AdversarialEngine(), pool.allocate(tier, 5000)
    fill(region, 0)
    engine.release(region)
    assert bool((content(region) == 0xFF).all())


@pytest.mark.parametrize("source_tier", list(MEMORIES))
def test_an_overwritten_source_is_found(pool, source_tier):
    engine = AdversarialEngine()
    source, target = pool.allocate(source_tier, 4096), pool.allocate(Tier.HOST, 4096)
    fill(source, 0)
    ticket = engine.copy(source, target)
    fill(source, 1)
    with pytest.raises(GradientError, match="overwritten while in flight"):
        engine.wait(ticket)
    assert bool((content(target) == 0xFF).all())
