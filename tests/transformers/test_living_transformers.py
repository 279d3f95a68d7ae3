"""Hugging Face's and PEFT's own ways with models, on streamed ones: the bits of plain PyTorch, or refused by name."""

import copy
import io
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from compare import KNOBS, TIGHT, adamw, assert_same, streamed, train
from exact import Trace
from living import one_process, own_nbytes
from streaming import DIRECT, all_of, everything
from zoo import FAMILIES, LLAMA, Family, loss_of, words

import tapestream as ts
from tapestream.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks, Hugging Face renamed it
__all__ = ["one_process"]  # a fixture
LORA = peft.LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])


def on_meta(family: Family) -> Any:
    with torch.device("meta"):
        return family.make().train()


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_saved_folders_are_read_into_models_on_meta(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    plain, ours = family.model(), on_meta(family)
    plain.save_pretrained(tmp_path / "saved", max_shard_size="40KB", save_original_format=False)
    ts.stream(ours, device="cpu", machine=DIRECT, folder=tmp_path / "home", weights=tmp_path / "saved")
    assert_same(all_of(plain), all_of(ours))
    losses = []
    for model in (plain, ours):
        torch.manual_seed(5)
        losses.append(loss_of(model, family.batch()))
        losses[-1].backward()
    assert torch.equal(*losses)
    gradients = [{n: p.grad for n, p in model.named_parameters()} for model in (plain, ours)]
    assert_same(*gradients)
    ts.unstream(ours)


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_a_streamed_model_is_saved_as_a_plain_one(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    plain, ours = family.model(), family.model()
    with streamed(ours, family, TIGHT, tmp_path / "home"):
        ours.save_pretrained(tmp_path / "ours")
        ours.save_pretrained(tmp_path / "parts", max_shard_size="40KB", save_original_format=False)
    plain.save_pretrained(tmp_path / "plain")
    assert (tmp_path / "ours" / "model.safetensors").read_bytes() == (
        tmp_path / "plain" / "model.safetensors"
    ).read_bytes()
    again = type(plain).from_pretrained(tmp_path / "ours")
    assert_same(everything(plain), everything(again))
    ts.unstream(ts.stream(read := on_meta(family), device="cpu", weights=tmp_path / "parts"))
    assert_same(all_of(plain), all_of(read))


@pytest.mark.filterwarnings("ignore:this .* lay on the meta device")
def test_saving_takes_no_memory(tmp_path: Path) -> None:
    with torch.device("meta"):
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 16}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(LLAMA | sizes)))
    ts.stream(model, device="cpu", machine=DIRECT, folder=tmp_path / "home", budget="32 MiB")
    whole = sum(p.nbytes for p in model.parameters())
    before = own_nbytes()
    held = model.state_dict()
    model.save_pretrained(tmp_path / "saved")
    assert own_nbytes() - before < whole // 4
    del held
    ts.unstream(model)


def lora() -> Any:
    torch.manual_seed(4)
    return peft.get_peft_model(FAMILIES["llama"].model(), LORA)


def test_adapters_on_a_frozen_base(tmp_path: Path) -> None:
    family, theirs, ours = FAMILIES["llama"], lora(), lora()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    expected = train(theirs, torch.optim.AdamW(trained, **KNOBS), family, TIGHT)
    with streamed(ours, family, TIGHT, tmp_path / "home") as (model, optimizer):
        assert_same(expected, train(model, optimizer, family, TIGHT))
        frozen = [p for p in model.parameters() if not p.requires_grad]
        assert not any(p in optimizer.state for p in frozen)
        model.save_pretrained(tmp_path / "ours")
        file = io.BytesIO()
        torch.save(peft.get_peft_model_state_dict(model), file)
        assert len(file.getvalue()) < sum(p.nbytes for p in frozen)
    theirs.save_pretrained(tmp_path / "theirs")
    one, other = (tmp_path / who / "adapter_model.safetensors" for who in ("ours", "theirs"))
    assert one.read_bytes() == other.read_bytes()


def test_adapters_off_merged_and_apart_again(tmp_path: Path) -> None:
    family, theirs, ours = FAMILIES["llama"], lora(), lora()

    def use(model: Any) -> Trace:
        trace: Trace = {}
        model.eval()
        with torch.no_grad(), model.disable_adapter():
            trace["off"] = loss_of(model, family.batch())
        model.merge_adapter()
        with torch.no_grad():
            trace["merged"] = loss_of(model, family.batch())
        model.unmerge_adapter()
        loss = loss_of(model, family.batch())
        loss.backward()
        trace["loss"] = loss.detach()
        return trace | {n: copy.deepcopy(p.grad) for n, p in model.named_parameters()}

    with streamed(ours, family, TIGHT, tmp_path / "home") as (model, _):
        assert_same(use(theirs), use(model))


def test_adapters_come_before_stream() -> None:
    model = ts.stream(FAMILIES["llama"].model(), device="cpu", machine=DIRECT)
    adapted = peft.get_peft_model(model, LORA)
    with pytest.raises(InputError, match=r"lora_A.*after stream\(\).*unstream, replace and stream again"):
        loss_of(adapted, FAMILIES["llama"].batch())


def test_words_are_generated(tmp_path: Path) -> None:
    family = FAMILIES["llama"]
    ours, ids = family.model(), words()
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    with streamed(ours, family, TIGHT, tmp_path / "home"):
        assert torch.equal(ours.generate(ids, **settings), family.model().generate(ids, **settings))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # hidden by PyTorch itself
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # what inductor imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)])
def test_layers_that_are_compiled(backend: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    family = FAMILIES["llama"]
    theirs, ours = family.model(), family.model()
    for model in (theirs, ours):
        for layer in model.model.layers:
            layer.compile(backend=backend)
    # Beyond the usual 8 variants, of both models together, layers would run as they are: other bits than inductor's.
    with torch._dynamo.config.patch(recompile_limit=64):
        expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **KNOBS), family, TIGHT)
        with streamed(ours, family, TIGHT, tmp_path / "home") as (model, optimizer):
            assert_same(expected, train(model, optimizer, family, TIGHT))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5", "vit"])
def test_one_process_of_many_that_could_be(name: str, one_process: None, tmp_path: Path) -> None:
    """As a script for several machines has it where there is one: the model inside of DistributedDataParallel."""
    family = FAMILIES[name]
    theirs, ours = family.model(), family.model()
    parallel = torch.nn.parallel.DistributedDataParallel
    expected = train(parallel(theirs), torch.optim.AdamW(theirs.parameters(), **KNOBS), family, TIGHT)
    with streamed(ours, family, TIGHT, tmp_path / "home") as (model, optimizer):
        assert_same(expected, train(parallel(model), optimizer, family, TIGHT))


def test_a_larger_vocabulary_comes_before_stream() -> None:
    model = ts.stream(FAMILIES["llama"].model(), device="cpu", machine=DIRECT)
    adamw(model)
    model.resize_token_embeddings(LLAMA["vocab_size"] + 4, mean_resizing=False)
    with pytest.raises(InputError, match=r"after stream\(\).*unstream, replace and stream again"):
        loss_of(model, FAMILIES["llama"].batch())
