"""`tapestream plan` and `verify` for models that are not ours: Hugging Face configurations and Python functions."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from tapestream.cli.app import make_app
from tapestream.cli.costs import costs_of
from tapestream.cli.subject import subject_of
from tapestream.cli.targets import TargetOptions
from tapestream.costs.rates import usual_rates

FACTORIES = """
import os
import torch
from torch import nn
from torch.nn import functional as F


class Net(nn.Module):
    def __init__(self, between=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6))
        self.head, self.between = nn.Linear(64, 10), between

    def forward(self, x, y):
        for number, layer in enumerate(self.layers):
            x = layer(x)
            if self.between and number == 2:
                x = x * 2
        return F.cross_entropy(self.head(x), y)


class Fickle(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + int.from_bytes(os.urandom(2), "big"))


def net():
    return Net(), (torch.randn(8, 64), torch.randint(10, (8,)))


def frozen():
    model, batch = net()
    return model.requires_grad_(False), batch


def named():
    return Net(), {"x": torch.randn(8, 64), "y": torch.randint(10, (8,))}


def two_chains():
    return Net(between=True), (torch.randn(8, 64), torch.randint(10, (8,)))


def words():
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    return nn.Sequential(nn.Embedding(50, 64), layers), torch.ones(2, 12, dtype=torch.long)


def fickle():
    return nn.Sequential(*(Fickle(16, 16) for _ in range(3))), torch.randn(4, 16)


class FickleEnd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * (1 + int.from_bytes(os.urandom(2), "big"))


def fickle_end():
    return FickleEnd(), torch.randn(4, 16)


def bare():
    return Net()


def broken():
    raise ValueError("no weights here")


def number():
    return 3


def scalar_batch():
    return Net(), 5


def wide():
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    return nn.Sequential(layers, nn.Linear(8, 9999)), torch.randn(60, 8)


not_a_function = 7
"""
ROOM = ["--ram", "1GiB"]


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A working folder with a module of factories, as users have one."""
    (tmp_path / "factories.py").write_text(FACTORIES)
    (tmp_path / "unsound.py").write_text("import nothing_of_that_name\n")
    (tmp_path / "misspelt.py").write_text("import torch\ndef net(:\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    yield
    sys.path[:] = before
    sys.modules.pop("factories", None)


def ask(*arguments: str) -> Result:
    return CliRunner().invoke(make_app(), list(arguments))


def answered(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = ask("plan", *arguments, *ROOM, "--json")
    return result.exit_code, json.loads(result.stdout)


def saved(folder: Path, name: str, **sizes: Any) -> str:
    """A folder with the config.json of a small model of class ``name``."""
    hf = pytest.importorskip("transformers")
    config = getattr(hf, name.split("For")[0].removesuffix("Model") + "Config")(**sizes)
    config.architectures = [name]
    config.save_pretrained(folder)
    return str(folder)


SMALL: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
TEXT = SMALL | {"vocab_size": 100, "max_position_embeddings": 64}
T5: dict[str, Any] = {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
WHISPER: dict[str, Any] = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
    "max_source_positions": 12, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
BART: dict[str, Any] = {
    "vocab_size": 100, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 64,
}  # fmt: skip
LED = {name: size for name, size in BART.items() if name != "max_position_embeddings"} | {
    "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64, "attention_window": 8,
}  # fmt: skip
CLIP: dict[str, Any] = {
    "text_config": SMALL | {"vocab_size": 100, "max_position_embeddings": 16, "eos_token_id": 99},
    "vision_config": SMALL | {"image_size": 32, "patch_size": 8}, "projection_dim": 16,
}  # fmt: skip
KINDS = {
    "BertForMaskedLM": (TEXT, "tokens", 1),
    "BertForSequenceClassification": (TEXT, "tokens", 1),
    "BertForTokenClassification": (TEXT, "tokens", 1),
    "BertForQuestionAnswering": (TEXT, "tokens", 1),
    "BertModel": (TEXT, "tokens", 1),
    "LlamaForCausalLM": (TEXT | {"bos_token_id": 1, "eos_token_id": 2}, "tokens", 1),
    "ViTForImageClassification": (SMALL | {"image_size": 32, "patch_size": 8}, "samples", 1),
    "T5ForConditionalGeneration": (T5, "tokens", 2),
    "T5Model": (T5, "tokens", 2),
    "WhisperForConditionalGeneration": (WHISPER, "tokens", 2),
    "BartForConditionalGeneration": (BART, "tokens", 2),
    "CLIPModel": (CLIP, "tokens", 2),
}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", KINDS)
def test_a_hugging_face_configuration_is_planned(name: str, tmp_path: Path) -> None:
    sizes, unit, chains = KINDS[name]
    folder = saved(tmp_path / "model", name, **sizes)
    status, document = answered(
        folder, "--budget", "64MiB", "--batch", "2", *(["--seq", "16"] if unit == "tokens" else [])
    )
    assert status == 0
    model, answer = document["model"], document["answer"]
    assert (model["class"], model["chains"], model["dtype"]) == (name, chains, "float32")
    with torch.device("meta"):
        made = subject_of(folder, TargetOptions()).make()
    assert model["parameters"] == sum(p.numel() for p in made.parameters())
    tokens = 2 * (document["sequence"] or 1)
    assert answer[f"{unit}_per_second"] == pytest.approx(tokens / answer["seconds_per_step"])
    assert 16 * model["parameters"] < answer["tiers"]["device"]["peak_nbytes"] <= 64 * 2**20


def test_half_the_bytes_a_number_and_masters_for_it(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "BertForMaskedLM", **TEXT)
    found = {dtype: costs_of(subject_of(folder, TargetOptions(dtype=dtype)), "cpu") for dtype in ("fp32", "bf16")}
    wide, narrow = (costs.profiles(1, rates=usual_rates("cpu"))[0] for costs in found.values())
    assert narrow.stages[0].output_nbytes == wide.stages[0].output_nbytes // 2
    assert narrow.blocks[0].parameters_nbytes < 0.7 * wide.blocks[0].parameters_nbytes
    assert narrow.blocks[0].optimizer_state_nbytes > wide.blocks[0].optimizer_state_nbytes


def test_causal_models_keep_no_mask(tmp_path: Path) -> None:
    """What real tensors give: without padding, attention is told that it is causal."""
    folder = saved(tmp_path / "model", "LlamaForCausalLM", **TEXT, bos_token_id=1, eos_token_id=2)
    subject = subject_of(folder, TargetOptions(sequence=64))
    (profile,) = costs_of(subject, "cpu").profiles(4, rates=usual_rates("cpu"))
    states = 4 * 64 * 32 * 4
    assert profile.stages[1].saved_nbytes < 16 * states  # with a mask of 4 x 64 x 64 numbers it would be 18


@pytest.mark.parametrize(
    ("factory", "unit", "sequence"), [("net", "samples", None), ("named", "samples", None), ("words", "tokens", 12)]
)
def test_what_a_function_returns_is_planned(factory: str, unit: str, sequence: int | None) -> None:
    status, document = answered(f"factories:{factory}", "--budget", "16MiB")
    assert status == 0
    assert document["sequence"] == sequence
    assert document["batch"] == (2 if sequence else 8)
    assert document["answer"][f"{unit}_per_second"] > 0
    _, more = answered(f"factories:{factory}", "--budget", "16MiB", "--batch", "32")
    assert more["answer"]["tiers"]["device"]["peak_nbytes"] > document["answer"]["tiers"]["device"]["peak_nbytes"]


def test_that_nothing_trains_is_said() -> None:
    """In place of an optimizer."""
    room = (*ROOM, "--budget", "16MiB")
    assert "8 samples, nothing trains" in ask("plan", "factories:frozen", *room).output
    assert "8 samples, nadam, update step" in ask("plan", "factories:net", *room, "--optimizer", "nadam").output


def test_a_function_may_return_a_hugging_face_model_alone(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "BertForMaskedLM", **TEXT)
    (tmp_path / "hugging.py").write_text(
        "from transformers import AutoConfig, AutoModelForMaskedLM\n\n\ndef model():\n"
        f"    return AutoModelForMaskedLM.from_config(AutoConfig.from_pretrained({folder!r}))\n"
    )
    assert answered("hugging:model", "--budget", "16MiB")[1]["model"]["class"] == "BertForMaskedLM"


@pytest.mark.parametrize("factory", ["net", "two_chains"])
def test_every_change_that_is_offered_fits_when_applied(factory: str) -> None:
    given = {"--budget": "600kB", "--gpu": "700kB", "--batch": "2048"}
    target = f"factories:{factory}"
    status, document = answered(target, *(word for pair in given.items() for word in pair))
    assert status == 2
    assert document["changes"]
    for change in document["changes"]:
        changed = {**given, **change}
        assert changed != given
        assert answered(target, *(word for pair in changed.items() for word in pair))[0] == 0, change


def test_chains_share_the_budget() -> None:
    status, document = answered("factories:two_chains", "--budget", "16MiB")
    assert status == 0
    assert document["model"]["chains"] == 2
    device = document["answer"]["tiers"]["device"]
    assert 0 < device["peak_nbytes"] <= device["allowed_nbytes"] <= 16 * 2**20
    result = ask("plan", "factories:two_chains", "--budget", "16MiB", *ROOM, "--save", "plan.json")
    assert (result.exit_code, "2 chains of blocks" in result.stderr) == (2, True)


def test_blocks_may_be_named() -> None:
    _, found = answered("factories:net", "--budget", "16MiB", "--blocks", "Linear")
    assert found["model"]["layers"] == 7
    result = ask("plan", "factories:net", "--budget", "16MiB", "--blocks", "Conv2d")
    assert "has no module or class of that name" in result.stderr


ERRORS = [
    (["./no/such/folder"], "there is no such folder"),
    (["."], "holds no config.json"),
    (["factories:net", "--width", "8"], "has its own size"),
    (["factories:net", "--seq", "8"], "change it there"),
    (["factories:nothing"], "it has net, frozen, named"),
    (["factories:not_a_function"], "no function 'not_a_function'"),
    (["factories:bare"], "(model, example_batch)"),
    (["factories:broken"], "raised ValueError: no weights here"),
    (["factories:number"], "returned int"),
    (["factories:scalar_batch"], "no tensor with a batch dimension"),
    (["missing_module:net"], "set PYTHONPATH"),
    (["unsound:net"], "nothing_of_that_name"),
    (["misspelt:net"], "misspelt.py has a syntax error in line 2: "),
    (["factories:net", "--dtype", "fp8"], "fp32 or bf16"),
    (["gpt9"], "module:factory"),
    (["gpt9", "--layers", "3"], "choose one of gpt2-124m"),
    (["resnet", "--layers", "110"], "name module:factory"),
    (["dranet101"], "known by name to `tapestream train` alone"),
]


@pytest.mark.parametrize(("sequence", "name"), [(1024, "gpt2-124m"), (4096, "gpt2-124m with 4096 positions")])
def test_a_published_size_has_more_positions_for_longer_sequences(sequence: int, name: str) -> None:
    code, document = answered("gpt2-124m", "--seq", str(sequence), "--budget", "16GiB")
    assert code == 0
    assert document["model"]["name"] == name
    assert document["model"]["parameters"] == 124_439_808 + 768 * (sequence - 1024)


@pytest.mark.parametrize(("arguments", "advice"), ERRORS)
@pytest.mark.parametrize("command", ["plan", "verify"])
def test_errors_are_one_line_with_advice(command: str, arguments: list[str], advice: str) -> None:
    result = ask(command, *arguments, "--budget", "1GiB")
    assert result.exit_code == 2
    assert advice in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.output


def test_only_the_command_that_trains_resnets_speaks_of_them_in_its_help() -> None:
    told = {name: ask(name, "--help").stdout.count("ResNet") for name in ("plan", "verify", "train")}
    assert told["train"] > 1
    assert told["plan"] == told["verify"] == 0


@pytest.mark.parametrize(
    ("name", "sizes", "arguments", "advice"),
    [
        ("BertForMaskedLM", TEXT, ["--seq", "65"], "give --seq 64"),
        ("ViTForImageClassification", SMALL, ["--seq", "65"], "takes no tokens"),
        ("Wav2Vec2ForCTC", {}, [], "takes 'input_values'"),
    ],
)
def test_what_cannot_be_called_is_said(
    name: str, sizes: dict[str, Any], arguments: list[str], advice: str, tmp_path: Path
) -> None:
    result = ask("plan", saved(tmp_path / "model", name, **sizes), "--budget", "1GiB", *arguments)
    assert (result.exit_code, advice in result.stderr) == (2, True)


def test_a_config_that_transformers_cannot_read_is_said(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no such thing"}')
    assert "config.json cannot be used" in ask("plan", str(tmp_path), "--budget", "1GiB").stderr


def test_transformers_is_asked_for_only_where_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install transformers" in ask("plan", str(tmp_path), "--budget", "1GiB").stderr
    assert ask("plan", "factories:net", "--budget", "1GiB").exit_code == 0


VERIFIED = [
    ["gpt", "--layers", "3", "--width", "64", "--seq", "32", "--vocabulary", "100", "--budget", "4MiB"],
    ["factories:net", "--budget", "1MiB"],
    ["factories:named", "--budget", "1MiB"],
    ["factories:two_chains", "--budget", "1MiB"],
]


@pytest.mark.parametrize("arguments", VERIFIED)
def test_streamed_steps_are_those_of_plain_pytorch(arguments: list[str], tmp_path: Path) -> None:
    where = ["--device", "cpu", "--folder", str(tmp_path / "home"), "--steps", "2"]
    result = ask("verify", *arguments, *where, "--json")
    document = json.loads(result.stdout)
    assert (result.exit_code, document["equal"]) == (0, True)
    assert [step["step"] for step in document["steps"]] == [1, 2]
    for step in document["steps"]:
        assert step["differs"] is None
        assert step["planned_peak_nbytes"] > 0
        assert step["forwards"] >= step["blocks"] > 0


@pytest.mark.thinned(4)
@pytest.mark.parametrize(
    ("name", "budget"),
    [
        ("BertForMaskedLM", "250kB"),
        ("LlamaForCausalLM", "200kB"),
        ("T5ForConditionalGeneration", "350kB"),
        ("WhisperForConditionalGeneration", "380kB"),
        ("BartForConditionalGeneration", "380kB"),
    ],
)
def test_a_hugging_face_model_is_verified_under_a_tight_budget(name: str, budget: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", name, **KINDS[name][0])
    where = ["--device", "cpu", "--folder", str(tmp_path / "home"), "--steps", "1", "--seq", "16"]
    document = json.loads(ask("verify", folder, "--budget", budget, *where, "--json").stdout)
    (step,) = document["steps"]
    if step["forwards"] <= step["blocks"] or not step["planned_moved_nbytes"]:
        pytest.fail("this budget is not tight")
    result = ask("verify", folder, "--budget", budget, *where)
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.stdout
    assert "Equal to plain PyTorch in 1 steps" in result.stdout


def test_a_model_that_reads_numbers_is_verified_though_it_cannot_be_planned_unrun(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", "LEDForConditionalGeneration", **LED)
    refused = ask("plan", folder, "--budget", "8MiB", "--seq", "16")
    assert (refused.exit_code, "reads a number of type" in refused.stderr) == (2, True)
    where = ["--device", "cpu", "--steps", "1", "--seq", "16", "--budget", "8MiB"]
    result = ask("verify", folder, *where)
    assert result.exit_code == 0, result.output
    assert "every bit equal" in result.stdout


def test_a_model_whose_bits_differ_from_run_to_run_is_found() -> None:
    result = ask("verify", "factories:fickle", "--device", "cpu", "--steps", "2")
    assert result.exit_code == 2  # a block is refused
    assert "returns something else when it runs again" in result.stderr
    result = ask("verify", "factories:fickle_end", "--device", "cpu", "--steps", "2")
    assert result.exit_code == 1
    assert "differs" in result.stdout
    assert "not deterministic" in result.stderr


def test_a_model_beyond_all_memory_is_refused_unmade() -> None:
    result = ask("verify", "gpt3-175b", "--device", "cpu")
    assert result.exit_code == 2
    assert "are free; verify fewer layers" in result.stderr


@pytest.mark.parametrize(
    ("target", "told"),
    [
        (["gpt", "--layers", "2", "--width", "64", "--vocabulary", "5000", "--seq", "64"], "--vocabulary, --seq and"),
        (["factories:wide"], "the loss): it grows with --batch"),
    ],
)
def test_a_refusal_for_logits_names_options_not_calls(target: list[str], told: str) -> None:
    result = ask("verify", *target, "--budget", "2MiB", "--device", "cpu")
    assert result.exit_code == 2
    assert told in result.stderr
    assert "loss_chunks" not in result.stderr
