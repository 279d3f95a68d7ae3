"""Hugging Face's and PEFT's own ways with embeddings and heads, where these come and go: the bits of plain PyTorch, or
refused by name."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from compare import KNOBS, TIGHT, adamw, assert_same, streamed, train
from exact import seed
from streaming import DIRECT, everything
from zoo import FAMILIES, LLAMA, Family, loss_of, words

import tapestream as ts
from tapestream.errors import GradientError, InputError
from tapestream.frontends.module.homes import wide
from tapestream.frontends.module.stream import handle_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # PEFT asks, Hugging Face renamed it
TIED, UNTIED = FAMILIES["gpt2"], FAMILIES["llama"]
EITHER = pytest.mark.parametrize(
    "family", [pytest.param(TIED, id="tied"), pytest.param(UNTIED, id="untied", marks=pytest.mark.full)]
)


@pytest.fixture(autouse=True)
def _small_modules_come_and_go(monkeypatch: Any) -> None:
    monkeypatch.setattr(wide, "_LEAST_NBYTES", 1)
    monkeypatch.setattr(wide, "_SHARE", 1000)


def ends(model: Any) -> tuple[torch.nn.Module, torch.nn.Module]:
    return model.get_input_embeddings(), model.get_output_embeddings()


def coming(model: Any) -> list[torch.nn.Module]:
    """The modules beside the blocks that came and went in the last call."""
    handle = handle_of(model)
    assert handle.last is not None
    return [handle.blocks[k] for s in handle.last.segments for k in s.positions if k >= handle.wide]


def both(
    make: Callable[[], Any], family: Family, folder: Path, use: Callable[[Any, Any], None] | None = None
) -> list[torch.nn.Module]:
    """Three steps of a plain and of a streamed model; ``use``: done to each before."""
    theirs, ours = make(), make()
    trained = [p for p in theirs.parameters() if p.requires_grad]
    plain = torch.optim.AdamW(trained, **KNOBS)
    if use is not None:
        use(theirs, plain)
    expected = train(theirs, plain, family, TIGHT)
    with streamed(ours, family, TIGHT, folder) as (model, optimizer):
        if use is not None:
            use(model, optimizer)
        assert_same(expected, train(model, optimizer, family, TIGHT))
        return coming(model)


# -- files -------------------------------------------------------------------------------------------------------------


@EITHER
def test_saved_folders_are_read_into_models_on_meta(family: Family, tmp_path: Path) -> None:
    theirs = family.model()
    theirs.save_pretrained(tmp_path / "saved")
    with torch.device("meta"):
        ours = family.make().train()
    ts.stream(ours, device="cpu", machine=DIRECT, folder=tmp_path / "home", weights=tmp_path / "saved")
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **KNOBS), family, TIGHT)
    assert_same(expected, train(ours, adamw(ours), family, TIGHT))
    one, other = ends(ours)
    assert (one.weight is other.weight) == (family is TIED)
    assert {type(m) for m in ends(ours)} <= {type(m) for m in coming(ours)}
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    files = [(tmp_path / who / "model.safetensors").read_bytes() for who in ("ours", "theirs")]
    assert files[0] == files[1]
    ts.unstream(ours)
    assert_same(everything(theirs), everything(copy.deepcopy(ours)))


@EITHER
def test_ties_made_again(family: Family, tmp_path: Path) -> None:
    def use(model: Any, _: Any) -> None:
        model.tie_weights()
        model.load_state_dict(copy.deepcopy(model.state_dict()))

    assert both(family.model, family, tmp_path, use)


# -- vocabularies ------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize("change", [-4, 4])
def test_another_vocabulary_is_refused_until_the_model_is_streamed_again(
    change: int, family: Family, tmp_path: Path
) -> None:
    def resized(model: Any) -> Any:
        torch.manual_seed(6)
        model.resize_token_embeddings(LLAMA["vocab_size"] + change, mean_resizing=False)
        return model

    plain = resized(family.model())
    with streamed(family.model(), family, TIGHT, tmp_path / "home") as (model, _):
        with torch.no_grad():
            loss_of(model, family.batch())
        resized(model)
        with pytest.raises(InputError, match=r"(resize the model before|after) stream\(\).*unstream"):
            loss_of(model, family.batch())
        ts.unstream(model)
        assert_same(everything(plain), everything(copy.deepcopy(model)))
        ts.stream(model, device="cpu", machine=DIRECT)
        assert model.get_input_embeddings().weight.shape[0] == LLAMA["vocab_size"] + change


@EITHER
def test_new_rows_by_hand(family: Family, tmp_path: Path) -> None:
    def use(model: Any, _: Any) -> None:
        with torch.no_grad():
            weight = model.get_input_embeddings().weight
            weight[-3:] = weight[:-3].mean(0)
            model.get_output_embeddings().weight.data[:, 0].mul_(0.5)

    assert both(family.model, family, tmp_path, use)


# -- adapters ----------------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, dict[str, Any]] = {
    "layers": {"target_modules": ["q_proj", "v_proj"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "saved": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    "rows": {"target_modules": ["q_proj"], "trainable_token_indices": [3, 7, 9]},
}


@pytest.mark.thinned(2)
@pytest.mark.filterwarnings("ignore:Model .* has `tie_word_embeddings")
@pytest.mark.parametrize("requires", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters(name: str, requires: bool, tmp_path: Path) -> None:
    def make() -> Any:
        base = UNTIED.model()
        if requires:
            base.enable_input_require_grads()
        torch.manual_seed(4)
        return peft.get_peft_model(base, peft.LoraConfig(r=4, lora_dropout=0.1, **ADAPTERS[name])).train()

    assert both(make, UNTIED, tmp_path / "home")


@pytest.mark.parametrize("method", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_prompts_and_learned_keys_and_values_train(method: str, tmp_path: Path) -> None:
    def trained(folder: Path | None) -> list[torch.Tensor]:
        torch.manual_seed(4)
        model = peft.get_peft_model(UNTIED.model(), getattr(peft, method)(task_type="CAUSAL_LM", num_virtual_tokens=4))
        if folder is not None:
            ts.stream(model, budget="1MiB", folder=folder, device="cpu")
        torch.manual_seed(8)
        ids = words(5)
        loss: torch.Tensor = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad and p.grad is not None)]

    wanted, found = trained(None), trained(tmp_path)
    assert len(wanted) == len(found) > 1
    assert all(map(torch.equal, wanted, found))


# -- calls -------------------------------------------------------------------------------------------------------------


@EITHER
@pytest.mark.parametrize(
    "way", [{}, {"num_beams": 3}, pytest.param({"use_cache": False}, marks=pytest.mark.full)], ids=str
)
def test_words_are_generated_between_steps(way: dict[str, Any], family: Family, tmp_path: Path) -> None:
    found: list[torch.Tensor] = []

    def use(model: Any, optimizer: Any) -> None:
        seed(3)
        loss_of(model, family.batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.random.fork_rng():
            torch.manual_seed(8)
            ids = words(5)
        mask = torch.ones_like(ids)
        found.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0, **way))
        model.train()

    assert both(family.model, family, tmp_path, use)
    assert torch.equal(*found)


@EITHER
def test_a_loss_of_ones_own_of_the_heads_weight(family: Family, tmp_path: Path) -> None:
    """Refused where the head is called beside it, exact where it is not."""
    with streamed(family.model(), family, TIGHT, tmp_path) as (model, _):
        with pytest.raises(GradientError, match=r"weight' is streamed.*loss_chunks='auto'.*blocks=\["):
            (loss_of(model, family.batch()) + model.get_output_embeddings().weight.square().sum()).backward()
        model.zero_grad()
        loss_of(model, family.batch()).backward()
        plain = family.model()
        loss_of(plain, family.batch()).backward()
        pairs = zip(plain.named_parameters(), model.parameters(), strict=True)
        assert family is not UNTIED or all(torch.equal(p.grad, q.grad) for (_, p), q in pairs)


def test_hidden_states_and_the_heads_weight_in_a_loss_of_ones_own(tmp_path: Path) -> None:
    """As libraries with fused losses do: the body is called, the head is not."""

    def own(model: Any, batch: Any) -> torch.Tensor:
        hidden = model.model(input_ids=batch["input_ids"]).last_hidden_state
        logits = hidden @ model.lm_head.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    with streamed(UNTIED.model(), UNTIED, TIGHT, tmp_path) as (model, _):
        loss = own(model, UNTIED.batch())
        with pytest.raises(GradientError, match=r"lm_head.weight' is streamed.*loss_chunks='auto'.*blocks=\["):
            loss.backward()


def test_a_model_within_another(tmp_path: Path) -> None:
    """A body streamed for itself, its head plain: the head's weight is nobody's but PyTorch's."""

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = UNTIED.model()

        def forward(self, **batch: Any) -> Any:
            hidden = self.inner.model(input_ids=batch["input_ids"]).last_hidden_state
            logits = hidden @ self.inner.lm_head.weight.T
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)

    assert both(Own, UNTIED, tmp_path)
