"""Ways in which streaming a Hugging Face model has gone wrong in trials, each alone."""

import itertools
import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compare import AMPLE, TIGHT, Blocks, Loss, Setting, assert_exact
from zoo import (
    FAMILIES,
    WORDS,
    Batch,
    Family,
    bart,
    bert,
    llama,
    loss_of,
    mixtral,
    opt,
    pair_of_texts,
    sound,
    t5,
    t5_config,
    text,
    whisper,
)

from tapestream.errors import GradientError


@dataclass(frozen=True, slots=True)
class Trial:
    """A model, a loss, and blocks if not those found.

    ``near``: a state is used by the next block and outside too, so that its parts are added in another order than in
    plain PyTorch (README, known limits). ``refused``: what the error says where streaming cannot be exact. ``warns``:
    what a library warns of by itself. ``cast``: under autocast, too.
    """

    family: Family
    loss: Loss = loss_of
    blocks: Blocks | None = None
    near: bool = False
    refused: str | None = None
    warns: str | None = None
    attention: str = "sdpa"
    cast: bool = False


def squared(tensors: Any) -> torch.Tensor:
    """A loss on what came out beside the loss: the mean squares of some tensors."""
    return sum((t.float().square().mean() for t in tensors), torch.zeros(()))


# -- models -----------------------------------------------------------------------------------------------------------


def encoder_of_t5() -> Any:
    """T5's encoder: its first block makes the position bias that all others take."""
    return hf.T5EncoderModel(t5_config(num_layers=3))


def hooked(modules: str) -> Any:
    """BERT whose ``modules`` (a pattern of names) hand their outputs over to ``model.seen``, through hooks."""
    model = bert()
    model.seen = []
    for name, module in model.bert.encoder.named_modules():
        if re.fullmatch(modules, name):
            module.register_forward_hook(HandOver(model.seen))
    return model


class HandOver:
    """A forward hook that keeps outputs; copied together with the model that reads them."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __call__(self, module: Any, args: Any, output: Any) -> None:
        self.seen.append(output)


class Remembering(torch.nn.Linear):
    """A linear map that remembers the mean of its output."""

    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.mean = out.mean()
        return out


def remembering() -> Any:
    """BERT whose blocks keep the mean of an inner activation, to be added to the loss."""
    model = bert()
    for block in model.bert.encoder.layer:
        block.intermediate.dense = Remembering(32, 48)
    return model


def albert() -> Any:
    """One layer that runs again and again, in a list of one in a list of one."""
    return hf.AlbertForMaskedLM(
        hf.AlbertConfig(
            vocab_size=WORDS, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
            intermediate_size=48, max_position_embeddings=64,
        )
    )  # fmt: skip


def adapted() -> Any:
    """Llama with low-rank adapters; everything else is frozen."""
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(llama(use_cache=False), peft.LoraConfig(task_type="CAUSAL_LM", r=4))


def checkpointed() -> Any:
    """Llama with its own checkpointing of every block switched on."""
    model = llama(use_cache=False)
    model.activation_checkpointing_enable()
    return model


# -- blocks -----------------------------------------------------------------------------------------------------------


def convolutions(model: Any) -> list[torch.nn.Module]:
    """The convolutions of ResNet: each layer adds its shortcut to the output of its last one in place."""
    return [conv for layer in FAMILIES["resnet"].blocks(model) for conv in layer.layer]


def stages(model: Any) -> list[torch.nn.Module]:
    """The stages of SegFormer, whose outputs the decoding head gets by way of hooks."""
    return list(model.segformer.stages)


# -- losses -----------------------------------------------------------------------------------------------------------


def of_encoded(model: Any, batch: Batch) -> torch.Tensor:
    return squared([model(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state])


def with_encoded(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    return out.loss + squared([out.encoder_last_hidden_state])


def with_seen(model: Any, batch: Batch) -> torch.Tensor:
    model.seen.clear()
    out = model(**batch)
    assert len(model.seen) == 3
    return out.loss + squared(model.seen)


def with_remembered(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    return out.loss + sum(block.intermediate.dense.mean for block in model.bert.encoder.layer)


def with_states(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch, output_hidden_states=True)
    assert len(out.hidden_states) == 4
    return out.loss + squared(out.hidden_states)


def of_one_state(model: Any, batch: Batch) -> torch.Tensor:
    """Nothing asks for a gradient of the last blocks."""
    return squared(model(**batch, output_hidden_states=True).hidden_states[1:2])


def with_attentions(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch, output_attentions=True)
    assert len(out.attentions) == 3
    return out.loss + squared(out.attentions)


def with_decoded(model: Any, batch: Batch) -> torch.Tensor:
    """What every block gave, captured by hooks, beside the encoder's output, which every block of the decoder takes."""
    out = model(**batch, output_hidden_states=True, output_attentions=True)
    shown = (*out.encoder_hidden_states, *out.decoder_hidden_states, *out.cross_attentions)
    assert len(out.decoder_hidden_states) == len(out.decoder_attentions) + 1
    return out.loss + squared(out.decoder_attentions) + squared(t.detach() for t in shown)


def with_cached(model: Any, batch: Batch) -> torch.Tensor:
    out = model(**batch)
    return out.loss + squared(layer.keys for layer in out.past_key_values.layers)


def after_a_prefix(model: Any, batch: Batch) -> torch.Tensor:
    """The second part of the words, given the cache that the first part has filled."""
    ids = batch["input_ids"]
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    out = model(ids[:, 4:], past_key_values=cache, labels=ids[:, 4:])
    assert out.past_key_values is cache
    assert cache.get_seq_length() == ids.shape[1]
    return out.loss


TRIALS = {
    "T5 position bias": Trial(Family(encoder_of_t5, text, ()), of_encoded),
    "Whisper encoder output": Trial(Family(partial(whisper, use_cache=False), sound, ())),
    "encoder output in the loss": Trial(Family(partial(whisper, use_cache=False), sound, ()), with_encoded, near=True),
    "bias and encoder output": Trial(Family(partial(t5, use_cache=False), pair_of_texts, ()), with_encoded, near=True),
    "SegFormer captured stages": Trial(FAMILIES["segformer"], blocks=stages),
    "Mixtral captured routers": Trial(Family(partial(mixtral, use_cache=False), text, ())),
    "captured states": Trial(Family(bert, text, ()), with_states, near=True),
    "one captured state": Trial(Family(bert, text, ()), of_one_state),
    "captured attentions": Trial(Family(bert, text, ()), with_attentions, attention="eager"),
    "T5 captured decoder": Trial(Family(t5, pair_of_texts, ()), with_decoded, attention="eager"),
    "BART captured decoder": Trial(Family(bart, pair_of_texts, ()), with_decoded, attention="eager"),
    "hook on blocks": Trial(Family(partial(hooked, r"layer\.\d+"), text, ()), with_seen, near=True),
    "hook inside blocks": Trial(Family(partial(hooked, r".*intermediate\.dense"), text, ()), with_seen),
    "inner mean": Trial(Family(remembering, text, ()), with_remembered, refused="inside of stage"),
    "loss on cached keys": Trial(Family(llama, text, ()), with_cached, refused="inside of stage"),
    "cache filled before": Trial(Family(llama, text, ()), after_a_prefix),
    "OPT layer drop": Trial(Family(partial(opt, layerdrop=0.4, use_cache=False), text, ()), cast=True),
    "Whisper layer drop": Trial(
        Family(partial(whisper, encoder_layerdrop=0.4, decoder_layerdrop=0.4, use_cache=False), sound, ()), cast=True
    ),
    "tuples with one tensor": Trial(FAMILIES["swin"], blocks=FAMILIES["swin"].blocks),
    "outputs changed in place": Trial(FAMILIES["resnet"], blocks=convolutions),
    "adapters": Trial(Family(adapted, text, ()), warns="ignore:`is_gradient_checkpointing`:FutureWarning"),
    "ALBERT's one layer": Trial(Family(albert, text, ()), cast=True),
    "own checkpointing": Trial(Family(checkpointed, text, ())),
}


_ON_CPU = {
    "Mixtral captured routers": "the simulated GPU counts no whole numbers (histc)",
    "Whisper layer drop": "its least budget is that of the layers which the CPU's generator drops",
}
CAST = replace(TIGHT, bfloat16=True)
WORDS_FOR = {TIGHT: "tight", CAST: "tight-bfloat16", AMPLE: "ample"}


def cases() -> list[Any]:
    """Every trial within the least budget (under autocast too, if it says so) and with room for all; with its marks."""
    found = []
    for (name, trial), setting in itertools.product(TRIALS.items(), (TIGHT, CAST, AMPLE)):
        if setting is CAST and not trial.cast:
            continue
        marks = [pytest.mark.filterwarnings(trial.warns)] if trial.warns else []
        if name in _ON_CPU:
            marks.append(pytest.mark.on_cpu(_ON_CPU[name]))
        found.append(pytest.param(trial, setting, marks=marks, id=f"{name}-{WORDS_FOR[setting]}"))
    return found


@pytest.mark.thinned(8)
@pytest.mark.parametrize(("trial", "setting"), cases())
def test_trial(trial: Trial, setting: Setting, tmp_path: Path) -> None:
    setting = replace(setting, sdpa=trial.attention == "sdpa")
    # With everything on the device, calls run as plain PyTorch does, to the bit.
    refused = pytest.raises(GradientError, match=trial.refused) if trial.refused and setting.tight else nullcontext()
    with refused:
        assert_exact(
            trial.family, setting, tmp_path / "home", trial.loss, trial.blocks, near=trial.near and setting.tight
        )


def test_states_kept_from_call_to_call_are_refused_with_the_switch(tmp_path: Path) -> None:
    def recurrent() -> Any:
        return hf.RecurrentGemmaForCausalLM(
            hf.RecurrentGemmaConfig(
                vocab_size=WORDS, hidden_size=32, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
                num_key_value_heads=1, lru_width=32, attention_window_size=8,
            )
        )  # fmt: skip

    family = Family(recurrent, text, ())
    with pytest.raises(GradientError, match="use_cache=False"):
        assert_exact(family, TIGHT, tmp_path / "home")
    without = lambda model, batch: model(**batch, use_cache=False).loss  # noqa: E731
    assert_exact(family, TIGHT, tmp_path / "home", without)
