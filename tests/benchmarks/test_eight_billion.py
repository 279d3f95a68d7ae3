"""The benchmark of the 8B-shaped model runs small on the CPU, by the same code."""

from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the model is Hugging Face's")
ROOT = Path(__file__).parents[2]


@pytest.mark.full
def test_dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.chdir(ROOT)
    from benchmarks.common import Settings
    from benchmarks.gpu.eight_billion import rows

    ours, theirs = rows(Settings("cpu", quick=True, rounds=2, threads=1, save=False, folder=str(tmp_path)))
    for row in (ours, theirs):
        assert "failed" not in row, row
        assert row["tokens a second"] > 0
    assert ours["loss"] == pytest.approx(theirs["loss"], rel=0.01)  # parameters are drawn alike, rounded otherwise
    assert 0 < ours["share"] < 1
    assert ours["moved MiB"] >= ours["least MiB"] > 0
    assert not any(tmp_path.iterdir())


def test_flops_of_a_width_that_can_be_counted_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Width 64, four layers, 64 tokens: queries and outputs 64 x 64, keys and values 64 x 32, three of 64 x 224."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.gpu.eight_billion import config_of, flops_of

    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 224
    products = 2 * 64 * (4 * layer + 64 * 256)
    attention = 4 * (2 * 64 * 64 * 64 * 2) / 2
    assert flops_of(config_of(256, 64, quick=True), 64) == 3 * (products + attention)
