"""`to_dcp` and `from_dcp` in one process: what PyTorch's own calls write and read, and what is refused."""

import errno
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.optim.lr_scheduler import StepLR

import tapestream as ts
from tapestream.errors import GradientError, InputError, StorageError
from tapestream.frontends.saving import dcp_files

pytestmark = [
    pytest.mark.on_cpu("c10d knows no simulated GPU"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),  # said by dcp.save() itself
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),  # PyTorch 2.9's writer uses it
]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks, a tied weight, a buffer, and state that is no tensor."""

    def __init__(self, width: int = 16, blocks: int = 4, seed: int = 1, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(width, width, bias=False), nn.Linear(width, width)
        self.last.weight = self.first.weight
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.register_buffer("shift", torch.randn(width))
        self.said = {"seed": seed, "more": {"words": ["a", seed]}}
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.shift.dtype)) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.last(x).float().square().mean()

    def get_extra_state(self) -> Any:
        return self.said

    def set_extra_state(self, state: Any) -> None:
        self.said = state


Make = Callable[..., Any]
KINDS: dict[str, tuple[Make, Make]] = {
    "plain": (lambda model, folder: model, lambda model, cls, **options: cls(options.pop("groups"), **options)),
    "disk": (
        lambda model, folder: ts.stream(model, device="cpu", budget="120KiB", home="disk", folder=folder),
        lambda model, cls, **options: ts.optimizer(model, cls, **options),
    ),
    "device": (
        lambda model, folder: ts.stream(model, device="cpu", budget="1GiB", home="device"),
        lambda model, cls, **options: ts.optimizer(model, cls, **options),
    ),
}
OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


class Run:
    """A model, its optimizer with two groups, and a schedule."""

    def __init__(self, kind: str, folder: Path, optimizer: str = "adamw", **options: Any) -> None:
        torch.set_num_threads(1)
        stream, make = KINDS[kind]
        folder.mkdir(exist_ok=True)
        self.model = stream(Net(**options), folder)
        cls, more = OPTIMIZERS[optimizer]
        biases = [p for name, p in self.model.named_parameters() if name.endswith("bias")]
        others = [p for name, p in self.model.named_parameters() if not name.endswith("bias")]
        groups = [{"params": others}, {"params": biases, "lr": 3e-3}]
        self.optimizer = make(self.model, cls, groups=groups, **more)
        self.schedule = StepLR(self.optimizer, 2, gamma=0.5)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in steps:
            drawn = torch.Generator().manual_seed(step)
            loss = self.model(torch.randn(4, 16, generator=drawn))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


def usual_save(run: Run, folder: Path, **options: Any) -> None:
    weights, state = get_state_dict(run.model, run.optimizer, options=StateDictOptions(**options))
    dcp.save({"model": weights, "optim": state}, checkpoint_id=folder)


def usual_load(run: Run, folder: Path) -> None:
    weights, state = get_state_dict(run.model, run.optimizer)
    tree = {"model": weights, "optim": state}
    dcp.load(tree, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=tree["model"], optim_state_dict=tree["optim"])


def is_same(one: Any, other: Any) -> bool:
    """Of states: keys, types and bits."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def assert_same(run: Run, other: Run) -> None:
    assert is_same(dict(run.model.state_dict()), dict(other.model.state_dict()))
    assert is_same(run.optimizer.state_dict(), other.optimizer.state_dict())


@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("plain", "adamw"), ("plain", "adagrad"), ("disk", "adamw"), ("disk", "sgd"), ("device", "adagrad")],
)
def test_both_ways(tmp_path: Path, kind: str, optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_files, "_FILE_NBYTES", 5000)  # several files, and tensors that fill one
    plain, run = Run("plain", tmp_path / "home", optimizer), Run(kind, tmp_path / "home", optimizer)
    assert plain.train(0, 1) == run.train(0, 1)
    usual_save(plain, tmp_path / "usual")
    assert ts.to_dcp(tmp_path / "ours", **run.parts) == tmp_path / "ours"
    assert len(list((tmp_path / "ours").glob("*.distcp"))) > 5
    usual, ours = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("usual", "ours"))
    assert ours.state_dict_metadata == usual.state_dict_metadata
    assert ours.planner_data == usual.planner_data

    after = plain.train(2, 3)
    loaded = Run("plain", tmp_path / "home", optimizer, seed=2)
    usual_load(loaded, tmp_path / "ours")
    assert loaded.train(2, 3) == after
    assert_same(loaded, plain)
    for name in ("usual", "ours"):
        again = Run(kind, tmp_path / "home", optimizer, seed=3)
        again.optimizer.param_groups[0]["lr"] = 7.0
        ts.from_dcp(tmp_path / name, **again.parts)
        assert again.model.said == {"seed": 1, "more": {"words": ["a", 1]}}
        assert again.train(2, 3) == after
        assert_same(again, plain)


def test_masters_and_a_model_without_its_optimizer(tmp_path: Path) -> None:
    half = {"dtype": torch.bfloat16}
    run, again = (Run("disk", tmp_path / "home", seed=seed, **half) for seed in (1, 2))
    run.train(0, 1)
    ts.to_dcp(tmp_path / "both", **run.parts)
    ts.to_dcp(tmp_path / "model", model=run.model)
    after = run.train(2, 3)
    ts.from_dcp(tmp_path / "both", **again.parts)
    assert again.train(2, 3) == after
    assert_same(again, run)
    narrow = Run("plain", tmp_path / "home", seed=4, **half)
    ts.from_dcp(tmp_path / "model", model=narrow.model)
    ts.from_dcp(tmp_path / "both", model=again.model)
    assert is_same(dict(narrow.model.state_dict()), dict(again.model.state_dict()))


def test_frozen_parameters_wrappers_and_no_steps_at_all(tmp_path: Path) -> None:
    """Names are those without wrappers; frozen parameters may be in a group or not; state that is not there is not."""
    torch.set_num_threads(1)
    plain = Net()
    plain.blocks[0].requires_grad_(False)
    with_frozen = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ts.to_dcp(tmp_path / "fresh", model=torch.compile(plain, backend="eager"), optimizer=with_frozen)
    plain(torch.ones(2, 16)).backward()
    with_frozen.step()
    weights, state = get_state_dict(plain, with_frozen)
    dcp.save({"model": weights, "optim": state}, checkpoint_id=tmp_path / "stepped")

    model = Net(seed=2)
    model.blocks[0].requires_grad_(False)
    model = ts.stream(model, device="cpu", budget="120KiB", home="disk", folder=tmp_path)
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-2)
    ts.from_dcp(tmp_path / "stepped", model=model, optimizer=optimizer)
    assert is_same(dict(model.state_dict()), dict(plain.state_dict()))
    for name, p in model.named_parameters():
        theirs = with_frozen.state.get(plain.get_parameter(name), {})
        assert is_same({key: v.clone() for key, v in optimizer.state.get(p, {}).items()}, dict(theirs)), name
    ts.from_dcp(tmp_path / "fresh", model=model, optimizer=optimizer)
    assert not any(optimizer.state_dict()["state"].values())


# -- what is refused --------------------------------------------------------------------------------------------------


def other_names(run: Run) -> None:
    run.model.more = nn.Linear(2, 2)


def other_shape(run: Run) -> None:
    run.model.shift = torch.zeros(3)


def other_dtype(run: Run) -> None:
    run.model.shift = run.model.shift.double()


def other_groups(run: Run) -> None:
    run.optimizer.param_groups[0]["params"].append(run.optimizer.param_groups[1]["params"].pop())


def other_kind(run: Run) -> None:
    run.optimizer = torch.optim.RMSprop(run.optimizer.param_groups)


def not_decoupled(run: Run) -> None:
    run.optimizer = torch.optim.Adam([{"params": g["params"]} for g in run.optimizer.param_groups], amsgrad=True)


def foreign_parameter(run: Run) -> None:
    run.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            other_names,
            "was written from another model: 2 names of 23 here and 21 there differ: 'more.bias' is not there",
        ),
        (other_shape, r"1 of 21 tensors differ, 'shift' for one \(\(16,\) saved, \(3,\) here\)"),
        (other_dtype, "'shift' is torch.float32 there and torch.float64 here, and nothing is rounded"),
        (other_groups, r"parameters per group are \[9, 9\] there and \[10, 8\] here"),
        (
            other_kind,
            "optimizer of another kind: alpha, centered, momentum is not in its groups, which have amsgrad, betas",
        ),
        (not_decoupled, "optimizer of another kind: decoupled_weight_decay is True there"),
        (foreign_parameter, "group 2 of the optimizer has a parameter that is not the model's"),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path: Path, change: Callable[[Run], None], said: str) -> None:
    run, other = (Run("plain", tmp_path / "home", seed=seed) for seed in (1, 2))
    run.train(0)
    usual_save(run, tmp_path / "usual")
    other.train(0)
    change(other)
    before = {name: v.clone() for name, v in other.model.state_dict().items() if isinstance(v, torch.Tensor)}
    with pytest.raises(InputError, match=said):
        ts.from_dcp(tmp_path / "usual", **other.parts)
    assert all(torch.equal(v, before[name]) for name, v in other.model.state_dict().items() if name in before)


@pytest.mark.parametrize(
    ("optimizer", "options", "said"),
    [
        ("sgd", {}, "optimizer of another kind: dampening, momentum, nesterov is not in its groups"),
        ("adamw", {"amsgrad": False}, "parameter 0 has max_exp_avg_sq there, and exp_avg, exp_avg_sq here"),
    ],
)
def test_state_that_a_streamed_optimizer_has_no_place_for(
    tmp_path: Path, optimizer: str, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run("plain", tmp_path / "home")
    run.train(0)
    ts.to_dcp(tmp_path / "ours", **run.parts)
    cls, more = OPTIMIZERS[optimizer]
    monkeypatch.setitem(OPTIMIZERS, optimizer, (cls, {**more, **options}))
    other = Run("disk", tmp_path / "home", optimizer, seed=2)
    before = other.model.first.weight.clone()
    with pytest.raises(InputError, match=said):
        ts.from_dcp(tmp_path / "ours", **other.parts)
    assert torch.equal(other.model.first.weight, before)


def test_folders_that_hold_something_else(tmp_path: Path) -> None:
    run = Run("plain", tmp_path / "home")
    run.train(0)
    usual_save(run, tmp_path / "flat", flatten_optimizer_state_dict=True)
    dcp.save(nn.Linear(2, 2).state_dict(), checkpoint_id=tmp_path / "another model")
    ts.to_dcp(tmp_path / "no optimizer", model=run.model)
    ts.save(tmp_path / "saves", **run.parts)
    for name, said in (
        ("nothing", "but there is no such folder; name the folder that dcp.save"),
        ("saves/000001", r"but there is no .metadata in it; name .* \(ts.load\(\) loads what ts.save\(\) has saved"),
        ("flat", r"in one flat table \(flatten_optimizer_state_dict=True\)"),
        ("another model", "has nothing under 'model', and no name of this model at the top"),
        ("no optimizer", "has no optimizer, and an optimizer was to be loaded"),
    ):
        with pytest.raises(InputError, match=said):
            ts.from_dcp(tmp_path / name, **run.parts)
    (tmp_path / "no optimizer" / ".metadata").write_bytes(b"hello")
    with pytest.raises(StorageError, match=r"\.metadata cannot be read"):
        ts.from_dcp(tmp_path / "no optimizer", model=run.model)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_at_the_top_of_a_checkpoint(tmp_path: Path, kind: str) -> None:
    written, read = Run("plain", tmp_path / "home", seed=1), Run(kind, tmp_path / "home", seed=2)
    dcp.save({**written.model.state_dict(), "train_state": {"step": 3}}, checkpoint_id=tmp_path / "top")
    ts.from_dcp(tmp_path / "top", model=read.model)
    wanted, found = written.model.state_dict(), read.model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items() if isinstance(value, torch.Tensor))
    with pytest.raises(InputError, match="has no optimizer"):
        ts.from_dcp(tmp_path / "top", **read.parts)


def test_what_cannot_be_written(tmp_path: Path) -> None:
    run = Run("plain", tmp_path / "home")
    for path, said in ((tmp_path, "a folder with something in it"), (Path(__file__), "a file or a link")):
        with pytest.raises(InputError, match=f"which is {said}; name a new folder"):
            ts.to_dcp(path, **run.parts)
    for parts, said in (
        ({"model": {}}, "model=dict was given"),
        ({"model": run.model, "optimizer": 3}, "optimizer=int was given"),
        ({"model": nn.Linear(2, 2, device="meta")}, "'weight' has no values yet"),
        ({"model": nn.LazyLinear(2)}, "'weight' has no values yet"),
    ):
        with pytest.raises(InputError, match=said):
            ts.to_dcp(tmp_path / "new", **parts)
    run.model.said = lambda: 0
    with pytest.raises(InputError, match=r"'model\._extra_state' is a function that cannot be pickled"):
        ts.to_dcp(tmp_path / "new", **run.parts)
    foreign_parameter(run)
    with pytest.raises(InputError, match="a parameter that is not the model's"):
        ts.to_dcp(tmp_path / "new", **run.parts)
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


def test_between_a_backward_and_its_step(tmp_path: Path) -> None:
    model = ts.stream(Net(), device="cpu", budget="120KiB", home="disk", folder=tmp_path)
    optimizer = ts.optimizer(model, torch.optim.AdamW, update="backward")
    model(torch.ones(2, 16)).backward()
    for parts in ({"model": model}, {"model": model, "optimizer": optimizer}):
        with pytest.raises(GradientError, match=r"ts.to_dcp\(\) came after a backward without its optimizer.step"):
            ts.to_dcp(tmp_path / "new", **parts)
    optimizer.step()
    ts.to_dcp(tmp_path / "new", model=model, optimizer=optimizer)


# -- disks ------------------------------------------------------------------------------------------------------------


def test_damaged_files_are_found_before_anything_is_changed(tmp_path: Path) -> None:
    run, other = (Run("plain", tmp_path / "home", seed=seed) for seed in (1, 2))
    ts.to_dcp(tmp_path / "ours", **run.parts)
    (file,) = (tmp_path / "ours").glob("*.distcp")
    whole, before = file.read_bytes(), other.model.first.weight.detach().clone()
    file.write_bytes(whole[:-1])
    with pytest.raises(StorageError, match=f"ends after {len(whole) - 1} bytes, {len(whole)} are needed"):
        ts.from_dcp(tmp_path / "ours", model=other.model)
    assert torch.equal(other.model.first.weight, before)
    file.write_bytes(b"\0" * len(whole))
    with pytest.raises(StorageError, match="cannot be read"):
        ts.from_dcp(tmp_path / "ours", model=other.model)
    file.unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        ts.from_dcp(tmp_path / "ours", model=other.model)


def test_a_disk_that_is_full_or_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("plain", tmp_path / "home")
    (tmp_path / "new").mkdir()
    look, written = dcp_files.PlannerInTurn.lookup_object, list[str]()

    def fails(self: Any, index: Any) -> Any:
        written.append(index.fqn)
        if len(written) == 12:
            raise OSError(errno.EIO, "the disk is gone")
        return look(self, index)

    with monkeypatch.context() as patched:
        patched.setattr(dcp_files.PlannerInTurn, "lookup_object", fails)
        with pytest.raises(StorageError, match="the disk is gone; there is none"):
            ts.to_dcp(tmp_path / "new", **run.parts)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))  # type: ignore
        with pytest.raises(StorageError, match="10 bytes are free on this disk"):
            ts.to_dcp(tmp_path / "new", **run.parts)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["home", "new"]
    ts.to_dcp(tmp_path / "new", **run.parts)  # an empty folder is taken


def test_it_is_imported_when_it_is_asked_for() -> None:
    asked = "import sys, tapestream as ts; ts.save; print('torch.distributed.checkpoint' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
