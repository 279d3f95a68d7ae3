"""Hugging Face models whose loss is made by chunks, streamed, give the bits of the same chunks on the plain model."""

import copy
import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from compare import AMPLE, KNOBS, TIGHT, Setting, adamw, tighten
from exact import Trace, assert_same, copy_of, seed
from streaming import DIRECT, everything, state_of
from torch import nn
from torch.nn import functional as F
from transformers.trainer_pt_utils import LabelSmoother
from zoo import LLAMA, Batch, Family, bloom, gemma3, gpt2, llama, loss_of, mixtral, opt, pair_of_texts, t5, text

import tapestream as ts
from tapestream.frontends.module.lazy_logits import LazyLogits
from tapestream.frontends.module.stream import handle_of

CHUNKS = 3
Loss = Callable[[Any, Batch], torch.Tensor]


def gemma2(**options: Any) -> Any:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**LLAMA, head_dim=8, **options))


def granite() -> Any:
    return hf.GraniteForCausalLM(hf.GraniteConfig(**LLAMA, logits_scaling=3.0))


def items(inputs: Callable[[], Batch]) -> Callable[[], Batch]:
    """As the Trainer calls models when it accumulates gradients."""
    return lambda: {**inputs(), "num_items_in_batch": torch.tensor(37)}


def by_chunks(model: Any, hidden: torch.Tensor, labels: torch.Tensor, count: Any) -> torch.Tensor:
    """The loss of each chunk as `ForCausalLMLoss` makes it."""
    config, head = model.config, model.get_output_embeddings()
    flat, targets = hidden.flatten(0, -2), labels.flatten()
    losses = []
    rows = -(-len(flat) // CHUNKS)
    for h, y in zip(flat.split(rows), targets.split(rows), strict=True):
        logits = head(h)
        cap = getattr(config, "final_logit_softcapping", None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
        if config.model_type == "granite":
            logits = logits / config.logits_scaling
        losses.append(F.cross_entropy(logits.float(), y, reduction="sum"))
    return functools.reduce(torch.add, losses) / ((targets != -100).sum() if count is None else count)


def reference(model: Any, batch: Batch) -> torch.Tensor:
    """The loss of a plain model by chunks, of the hidden states that its head would get."""
    arguments = dict(batch)
    labels, count = arguments.pop("labels"), arguments.pop("num_items_in_batch", None)
    assert isinstance(labels, torch.Tensor)
    if model.config.is_encoder_decoder:
        arguments["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels)
    else:
        labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
    seen: list[torch.Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, inputs: seen.append(*inputs))
    outputs = model(**arguments)
    hook.remove()
    loss = by_chunks(model, seen[0], labels, count)
    auxiliary = outputs.get("aux_loss")
    return loss if auxiliary is None else loss + model.router_aux_loss_coef * auxiliary


FAMILIES = {
    "llama": Family(llama, text, ("model.layers",)),
    "llama with a count": Family(llama, items(text), ("model.layers",)),
    "gpt2": Family(gpt2, text, ("transformer.h",)),
    "gemma2": Family(functools.partial(gemma2, final_logit_softcapping=0.7), text, ("model.layers",), ("eager",)),
    "gemma3": Family(functools.partial(gemma3, final_logit_softcapping=0.7), items(text), ("model.layers",)),
    "granite": Family(granite, text, ("model.layers",)),
    "opt": Family(opt, text, ("model.decoder.layers",)),
    "bloom": Family(bloom, text, ("transformer.h",), ("eager",)),
    "mixtral": Family(mixtral, text, ("model.layers",)),
    "t5": Family(t5, pair_of_texts, ("encoder.block", "decoder.block")),
}
BFLOAT16 = Setting(training=True, bfloat16=True, sdpa=True, tight=True, disk=True)


def train(model: Any, optimizer: Any, family: Family, setting: Setting, loss_of: Loss, micro: int) -> Trace:
    """Two steps of ``micro`` batches each."""
    seed(3)
    trace: Trace = {}
    for step in range(2):
        for part in range(micro):
            with setting.casting():
                loss = loss_of(model, family.batch(micro * step + part))
            loss.backward()
            trace[f"{step}.{part} loss"] = copy_of(loss)
        trace |= {f"{step} gradient {name}": copy_of(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        trace |= everything(model, f"{step} after ")
    return trace | {"torch": torch.get_rng_state()} | state_of(optimizer)


def lazy_loss(model: Any, batch: Batch) -> torch.Tensor:
    outputs = model(**batch)
    assert isinstance(outputs.logits, LazyLogits)
    assert outputs.logits.is_lazy()
    loss: torch.Tensor = outputs.loss
    return loss


@pytest.mark.thinned(12)
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("setting", "micro"), [(AMPLE, 1), (TIGHT, 2), (BFLOAT16, 2)], ids=["ample", "tight", "bfloat16"]
)
def test_bits_are_those_of_the_chunks_on_the_plain_model(
    name: str, setting: Setting, micro: int, tmp_path: Path
) -> None:
    family = FAMILIES[name]
    theirs = family.model(setting.attention)
    ours = copy.deepcopy(theirs)
    expected = train(theirs, torch.optim.AdamW(theirs.parameters(), **KNOBS), family, setting, reference, micro)
    home: dict[str, Any] = {"home": "disk", "folder": tmp_path / "home"} if setting.disk else {"home": "device"}
    ts.stream(ours, device="cpu", machine=DIRECT, budget=1 if setting.tight else "1 TiB", loss_chunks=CHUNKS, **home)
    optimizer = adamw(ours)
    if setting.tight:
        with setting.casting():
            tighten(ours, lambda: lazy_loss(ours, family.batch()))
    found = train(ours, optimizer, family, setting, lazy_loss, micro)
    head = ours.get_output_embeddings()
    ts.unstream(ours)
    assert type(head) is nn.Linear
    assert_same(expected, found)


def many_words() -> Batch:
    ids = torch.randint(5, 20_000, (2, 64))
    return {"input_ids": ids, "labels": ids}


def large() -> Any:
    sizes = {"vocab_size": 20_000, "max_position_embeddings": 64}
    return hf.LlamaForCausalLM(hf.LlamaConfig(**(LLAMA | sizes)))


def test_a_vocabulary_of_20_000_takes_what_the_budget_says(tmp_path: Path) -> None:
    family, least, logits = Family(large, many_words, ("model.layers",)), {}, 4 * 2 * 64 * 20_000
    for chunks in (None, "auto"):
        model = family.model()
        ts.stream(model, device="cpu", machine=DIRECT, budget=1, folder=tmp_path / "home", loss_chunks=chunks)
        optimizer = adamw(model)
        tighten(model, lambda model=model: loss_of(model, family.batch()))
        handle = handle_of(model)
        assert handle.budget.device_nbytes is not None
        least[chunks] = handle.budget.device_nbytes
        outside = handle.outside_parameters()
        for step in range(3):
            gc.collect()
            before = sum(p.nbytes + handle.state_nbytes(p) for p in outside) + handle.pool.held_nbytes(ts.Tier.DEVICE)
            with ts.track_memory() as meter:
                loss_of(model, family.batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
            # The first step makes the state of the optimizer.
            assert step == 0 or before + meter.peak_nbytes <= 1.05 * least[chunks]
        ts.unstream(model)
    assert least[None] - least["auto"] > 3 * logits


@pytest.mark.parametrize("shift", [False, True])
def test_label_smoothing_of_the_trainer_gets_the_logits(shift: bool) -> None:
    smoother = LabelSmoother(0.1)
    batch = text()
    results = []
    for chunks in (None, CHUNKS):
        model = ts.stream(FAMILIES["llama"].model(), device="cpu", machine=DIRECT, home="device", loss_chunks=chunks)
        loss = smoother(model(input_ids=batch["input_ids"]), batch["labels"].clone(), shift_labels=shift)
        loss.backward()
        results.append({"loss": copy_of(loss)} | {name: copy_of(p.grad) for name, p in model.named_parameters()})
        ts.unstream(model)
    assert_same(*results)


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_generation_and_evaluation_see_the_logits(name: str) -> None:
    family = FAMILIES[name]
    plain, model = family.model().eval(), family.model().eval()
    ts.stream(model, device="cpu", machine=DIRECT, home="device", loss_chunks="auto")
    batch = family.batch()
    words = {"inputs": batch["input_ids"], "attention_mask": batch["attention_mask"], "do_sample": False}
    assert torch.equal(plain.generate(**words, max_new_tokens=4), model.generate(**words, max_new_tokens=4))
    with torch.no_grad():
        expected, found = plain(**batch), model(**batch)
    assert type(found.logits) is torch.Tensor
    assert torch.equal(expected.logits, found.logits)
    assert torch.equal(expected.loss, found.loss)
    ts.unstream(model)
