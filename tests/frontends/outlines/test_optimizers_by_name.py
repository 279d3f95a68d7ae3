"""Every optimizer of docs/optimizers.md is planned by its name: what is said that it keeps is what it keeps."""

import json
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tapestream as ts
from tapestream.cli.app import make_app
from tapestream.errors import InputError
from tapestream.frontends.outlines.optimizers import optimizer_class, refused, state_of

SHAPES = (24, 40), (24,), (6, 5, 3, 3)
TORCH = (
    "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "muon", "nadam", "radam", "rmsprop", "rprop",
    "sgd",
)  # fmt: skip
OTHERS = ("Lion", "AdaFactor", "SM3", "CAME", "Adan", "SOAP", "Shampoo", "ScheduleFreeAdamW", "Yogi")
SIZES = [
    "gpt",
    "--layers",
    "4",
    "--width",
    "64",
    "--seq",
    "32",
    "--vocabulary",
    "128",
    "--ram",
    "1GiB",
    "--disk",
    "1TiB",
]


def kept(name: str, shape: tuple[int, ...]) -> int:
    """Bytes of the tensors that it really keeps after two steps."""
    parameter = nn.Parameter(torch.randn(shape))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = optimizer_class(name)([parameter])
        for _ in range(2):
            parameter.grad = torch.randn(shape)
            optimizer.step()
    leaves = torch.utils._pytree.tree_leaves(optimizer.state[parameter])
    return sum(t.nbytes for t in {id(t): t for t in leaves if isinstance(t, torch.Tensor) and t.dim()}.values())


def assert_keeps(name: str) -> None:
    assert refused(name) is None
    for shape in SHAPES:
        try:
            nbytes = kept(name, shape)
        except Exception:  # it takes no such tensor, which is AdamW's then
            nbytes = kept("adamw", shape)
        found = state_of(name, shape, torch.float32)[0]
        assert found.nbytes + found.beside_nbytes == nbytes, (name, shape)


@pytest.mark.parametrize("name", TORCH)
def test_what_those_of_torch_keep(name: str) -> None:
    assert_keeps(name)


@pytest.mark.parametrize("name", OTHERS)
def test_what_those_of_another_package_keep(name: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    assert_keeps(f"pytorch_optimizer.{name}")


def test_one_whose_state_is_more_than_bytes_is_refused_as_it_is_when_made() -> None:
    assert "keeps a state 'mean' that is a Codes" in (refused("low_bits.KeepsCodes") or "")


def test_one_that_needs_more_than_parameters_is_refused_by_name() -> None:
    pytest.importorskip("pytorch_optimizer")
    with pytest.raises(InputError, match="cannot be made of parameters alone"):
        refused("pytorch_optimizer.Muon")


@pytest.mark.parametrize("name", ["lbfgs", "sparseadam"])
def test_one_that_is_refused_is_planned_without_its_state_and_said_so(name: str) -> None:
    result = CliRunner().invoke(make_app(), ["plan", *SIZES, "--budget", "16MiB", "--optimizer", name])
    assert result.exit_code == 0
    assert f"ts.optimizer does not take {name}" in " ".join(result.stdout.split())
    failed = CliRunner().invoke(
        make_app(), ["plan", *SIZES, "--budget", "16MiB", "--optimizer", name, "--update", "backward"]
    )
    assert failed.exit_code == 2
    assert "steps all parameters at once" in " ".join(failed.stderr.split())


def answer(*options: str) -> dict[str, Any]:
    result = CliRunner().invoke(make_app(), ["plan", *SIZES, "--budget", "16MiB", *options, "--json"])
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_command_takes_any_name_and_case() -> None:
    by_name = answer("--optimizer", "AdamW")
    assert by_name == answer("--optimizer", "adamw") == answer()
    fewer = answer("--optimizer", "Adafactor")
    assert fewer["optimizer_refused"] is None
    assert sum(fewer["answer"]["fills"].values()) < sum(by_name["answer"]["fills"].values())
    assert answer("--optimizer", "torch.optim.Adafactor")["answer"] == fewer["answer"]
    told = CliRunner().invoke(make_app(), ["plan", *SIZES, "--budget", "16MiB", "--optimizer", "a.Nothing"])
    assert told.exit_code == 2
    assert "package.Class" in told.stderr


def test_plan_takes_the_same_names() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)])
        batch = torch.zeros(8, 64)
    needs = []
    for name in ("SGD", "muon", "adamw"):
        plan = ts.plan(model, batch, budget="1MiB", device="cpu", home="device", optimizer=name)
        assert plan.step is not None
        needs.append(plan.step.peak_nbytes[ts.Tier.DEVICE])
    assert needs[0] < needs[1] < needs[2]
    with pytest.raises(InputError, match="another class of torch"):
        ts.plan(model, batch, budget="1MiB", device="cpu", optimizer="nothing")
