"""`tapestream train resnet` and `dranet`: from options to metrics."""

import gc
import itertools
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.cli.data import batches_of, task_of
from tapestream.cli.loop import Job, Measured, run, streamed
from tapestream.cli.train_options import NetworkOptions
from tapestream.errors import InputError
from tapestream.models import DRANetConfig, ResNetConfig

Image = pytest.importorskip("PIL.Image")
COMMON = ["--device", "cpu", "--budget", "24MiB", "--update", "backward"]


def wanted(**options: Any) -> NetworkOptions:
    names = ("model", "data", "layers", "width", "heads", "batch", "seq", "size", "classes")
    return NetworkOptions(**{name: options.get(name) for name in names})


def colours(root: Path) -> Path:
    """Two classes that a colour tells apart."""
    for number, name in enumerate(("blue", "red")):
        for k in range(4):
            pixels = numpy.full((8, 8, 3), 40 * k, numpy.uint8)
            pixels[..., 2 * (1 - number)] = 250
            path = root / name / f"{k}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path)
    return root


def train(tmp_path: Path, *options: str) -> tuple[Any, list[dict[str, Any]]]:
    metrics, home = tmp_path / "metrics.jsonl", tmp_path / "home"
    arguments = ["train", *options, *COMMON, "--folder", str(home), "--metrics", str(metrics)]
    result = CliRunner().invoke(make_app(), arguments)
    assert result.exit_code == 0, result.output
    gc.collect()
    assert list(home.iterdir()) == []
    return result, [json.loads(line) for line in metrics.read_text().splitlines()]


def test_a_resnet_learns_a_folder_of_images(tmp_path: Path) -> None:
    torch.manual_seed(0)
    data = colours(tmp_path / "data")
    result, lines = train(
        tmp_path, "resnet", "--layers", "14", "--width", "8", "--data", str(data), "--size", "8", "--batch", "4",
        "--steps", "8", "--rate", "0.01",
    )  # fmt: skip
    assert lines[-1]["loss"] < 0.5 * lines[0]["loss"]
    assert all(line["tokens_per_second"] is None and line["samples_per_second"] > 0 for line in lines)
    assert "images/s" in result.stderr  # no terminal: a line for every step
    assert len([line for line in result.stderr.splitlines() if line.startswith("training ")]) == 8


def test_a_dranet_is_trained_on_shapes(tmp_path: Path) -> None:
    _, lines = train(
        tmp_path, "dranet", "--layers", "35", "--width", "4", "--size", "32", "--batch", "2", "--steps", "2"
    )  # fmt: skip
    assert [line["step"] for line in lines] == [0, 1]
    assert all(0 < line["loss"] < 20 for line in lines)


def test_a_resnet_is_trained_on_digits(tmp_path: Path) -> None:
    _, lines = train(tmp_path, "resnet", "--layers", "8", "--width", "8", "--steps", "2")
    assert len(lines) == 2


MODELS = {
    "gpt": ("--layers", "2", "--width", "64", "--batch", "1", "--seq", "32"),
    "resnet": ("--layers", "8", "--width", "8"),
    "dranet": ("--layers", "35", "--width", "4", "--size", "16", "--batch", "2"),
}


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model", MODELS)
def test_equal_seeds_give_equal_runs(model: str, tmp_path: Path) -> None:
    found = []
    for number, seed in enumerate(((), ("--seed", "0"), ("--seed", "5"))):
        torch.manual_seed(number)  # what was drawn before does not matter
        saves = ("--saves", str(tmp_path / f"{number}"))
        found.append(
            [line["loss"] for line in train(tmp_path, model, *MODELS[model], "--steps", "2", *seed, *saves)[1]]
        )
    assert found[0] == found[1]
    assert found[0] != found[2]
    options = ("train", model, *MODELS[model], *COMMON, "--steps", "3", "--resume", "--metrics", str(tmp_path / "m"))
    other = CliRunner().invoke(make_app(), [*options, "--saves", str(tmp_path / "2")])
    assert other.exit_code == 2
    assert "holds a run with another seed (5 there, 0 here)" in other.stderr


@pytest.mark.thinned(3)
@pytest.mark.parametrize("model", MODELS)
def test_bfloat16_with_masters(model: str, tmp_path: Path) -> None:
    """Of half the bytes; resumed it is the run that never stopped."""
    found = {}
    for name, options in (("fp32", ()), ("whole", ("--dtype", "bf16")), ("part", ("--dtype", "bf16"))):
        saves = ("--saves", str(tmp_path / name))
        _, lines = train(tmp_path, model, *MODELS[model], *options, *saves, "--steps", "2" if name == "part" else "4")
        found[name] = [line["loss"] for line in lines]
    _, lines = train(tmp_path, model, *MODELS[model], "--dtype", "bf16", "--steps", "4", "--resume", *saves)
    assert [line["loss"] for line in lines] == found["whole"]
    assert found["whole"] != found["fp32"]
    assert found["whole"] == pytest.approx(found["fp32"], rel=0.2)
    assert any(loss != float(torch.tensor(loss).bfloat16()) for loss in found["whole"])  # more than three digits
    (saved,) = (tmp_path / "whole").glob("*/model/model.safetensors")
    half, full = (path.stat().st_size for path in (saved, *(tmp_path / "fp32").glob("*/model/model.safetensors")))
    assert half < 0.6 * full
    other = CliRunner().invoke(make_app(), ["train", model, *MODELS[model], *COMMON, "--resume", *saves])
    assert other.exit_code == 2
    assert "float32 here" in other.stderr or "dtype ('bf16' there, 'fp32' here)" in other.stderr


def trained(saves: Path, workers: int, stops: tuple[int, ...] = ()) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of four steps of a network with dropout, begun anew from a save at each of ``stops``."""
    config = DRANetConfig.on(ResNetConfig.deep(35, width=4), 4)
    losses = []
    for first, stop in itertools.pairwise((0, *stops, 4)):
        job = Job(config, "shapes", 2, 16, stop, 0.01, 1, "adamw", "backward", "cpu", "8MiB", None, "device", None)
        batches = batches_of(job, workers)
        model, optimizer = streamed(job, lambda *_: None)
        if first:
            torch.manual_seed(99)
            ts.load(saves, model=model, optimizer=optimizer, batches=batches)
        losses += [record.loss for record in run(job, model, optimizer, batches, Measured(), first=first)]
        ts.save(saves, model=model, optimizer=optimizer, batches=batches)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def test_a_run_with_workers_is_the_one_without_also_stopped_and_resumed(tmp_path: Path) -> None:
    losses, parameters = trained(tmp_path / "alone", 0)
    for workers, stops in ((1, ()), (0, (2,)), (2, (1, 3))):
        found = trained(tmp_path / f"{workers}", workers, stops)
        assert found[0] == losses, f"{workers} workers, stopped after {stops}"
        assert [name for name in parameters if not torch.equal(found[1][name], parameters[name])] == []


def test_networks_are_what_the_options_say(tmp_path: Path) -> None:
    data = str(colours(tmp_path))
    task = task_of(wanted(model="resnet", layers=110, data=data))
    assert task.config == ResNetConfig.cifar(110, classes=2)
    assert (task.batch, task.length) == (16, 32)
    task = task_of(wanted(model="resnet50", data=data, width=8))
    assert task.config == ResNetConfig.named("resnet50", width=8, classes=2)
    assert task.length == 224
    task = task_of(wanted(model="dranet101"))
    assert isinstance(task.config, DRANetConfig)
    assert task.config.backbone.stages == (3, 4, 23, 3)
    assert (task.config.classes, task.data, task.batch) == (4, "shapes", 4)
    for config in (task.config, task_of(wanted(model="resnet", layers=20, data=data)).config):
        job = Job(config, "", 1, 8, 1, 0.1, 1, "sgd", "step", "cpu", None, None, "auto", None)
        assert Job.from_json(json.loads(json.dumps(job.to_json()))) == job


def masks(root: Path, label: int) -> Path:
    """An image and its mask."""
    for name, pixels in (("images", numpy.zeros((16, 16, 3))), ("masks", numpy.full((16, 16), label))):
        (root / name).mkdir()
        Image.fromarray(pixels.astype(numpy.uint8)).save(root / name / "x.png")
    return root


def test_a_loss_that_is_no_number_is_null(tmp_path: Path) -> None:
    """Of a batch in which no pixel counts: NaN is not JSON."""
    options = ("--layers", "35", "--width", "4", "--size", "16", "--batch", "2", "--steps", "1", "--classes", "6")
    result, lines = train(tmp_path, "dranet", *options, "--data", str(masks(tmp_path, 255)), "--json")
    assert lines[0]["loss"] is None
    assert json.loads(result.stdout, parse_constant=pytest.fail)["last"]["loss"] is None
    assert "loss nan" in result.stderr


def test_masks_of_a_folder(tmp_path: Path) -> None:
    masks(tmp_path, 5)
    options: dict[str, Any] = {"model": "dranet", "layers": 35, "width": 4, "size": 16, "data": str(tmp_path)}
    task = task_of(wanted(**options, classes=6))
    job = Job(task.config, task.data, 2, 16, 1, 0.1, 1, "sgd", "step", "cpu", None, None, "auto", None)
    _, labels = next(iter(batches_of(job)))
    assert labels.unique().tolist() == [5]
    with pytest.raises(InputError, match="give --classes"):
        task_of(wanted(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": "resnet"}, "needs --layers"),
        ({"model": "resnet50", "layers": 20}, "its own depth"),
        ({"model": "resnet", "layers": 20, "seq": 5}, "--seq 5"),
        ({"model": "gpt", "layers": 2, "width": 64, "size": 9}, "--size 9"),
        ({"model": "resnet", "layers": 20, "data": "shapes"}, "for dranet"),
        ({"model": "resnet", "layers": 20, "data": "stdlib"}, "which is for gpt; use --data digits"),
        ({"model": "dranet", "layers": 35, "data": "digits"}, "for resnet"),
        ({"model": "resnet", "layers": 20, "data": "/nowhere"}, "no folder"),
        ({"model": "resnet", "layers": 21, "data": "shapes"}, "22"),
        ({"model": "dranet", "layers": 35, "classes": 9}, "has 4"),
        ({"model": "resnet77"}, "resnet2500"),
        ({"model": "resnet", "layers": 8, "size": 4, "batch": 1}, "use --batch 2, or --size 5"),
        ({"model": "resnet18", "size": 32, "batch": 1}, "use --batch 2, or --size 33"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        task_of(wanted(**options))


@pytest.mark.parametrize(("size", "batch"), [("5", "1"), ("4", "2")])
def test_the_least_that_norms_can_take(size: str, batch: str, tmp_path: Path) -> None:
    options = ("--layers", "8", "--width", "8", "--size", size, "--batch", batch, "--steps", "1")
    _, lines = train(tmp_path, "resnet", *options)
    assert len(lines) == 1


@pytest.mark.parametrize("model", [("resnet", "--layers", "8"), ("dranet", "--layers", "35")])
def test_a_batch_whose_images_alone_are_over_the_budget_is_said_at_once(model: Any, tmp_path: Path) -> None:
    options = ["train", *model, "--width", "8", "--size", "32", "--batch", "100000", *COMMON]
    found = CliRunner().invoke(make_app(), [*options, "--metrics", str(tmp_path / "m")])
    assert found.exit_code == 2
    assert "--batch 100000 was asked for: its images of 32 x 32 pixels alone take" in " ".join(found.stderr.split())
    assert not (tmp_path / "m").exists()
