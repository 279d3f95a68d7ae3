"""Trainers, unmodified, on streamed models: those of them that are installed."""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.compatibility.methods import llama
from benchmarks.compatibility.side import Side, TrainerCase
from benchmarks.compatibility.trial import held

PACKAGES = ("transformers", "peft", "trl", "accelerate", "lightning", "sentence_transformers")
_LOADED = (*PACKAGES, "transformers.trainer", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer")
_STEPS, _BATCH, _LENGTH, _VOCABULARY = 8, 2, 12, 64
_QUIET: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 3}
Left = dict[str, torch.Tensor]


def cases() -> Iterator[TrainerCase]:
    """Each way of each trainer."""
    half = {"eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    ways: dict[str, tuple[str, Callable[[Side], Left]]] = {
        "Trainer": ("transformers", _trainer),
        "Trainer (gradient accumulation)": ("transformers", partial(_trainer, gradient_accumulation_steps=2)),
        "Trainer (max_grad_norm)": ("transformers", partial(_trainer, max_grad_norm=0.1)),
        "Trainer (a cosine schedule)": (
            "transformers", partial(_trainer, lr_scheduler_type="cosine", warmup_steps=2),
        ),
        "Trainer (weights in bfloat16)": ("transformers", partial(_trainer, dtype=torch.bfloat16)),
        "Trainer (bf16=True)": ("transformers", partial(_trainer, bf16=True)),
        "Trainer (gradient_checkpointing)": ("transformers", partial(_trainer, gradient_checkpointing=True)),
        "Trainer (label smoothing)": ("transformers", partial(_trainer, label_smoothing_factor=0.1)),
        "Trainer (NEFTune)": ("transformers", partial(_trainer, neftune_noise_alpha=5.0)),
        "Trainer (the optimizer that it makes)": ("transformers", partial(_trainer, own_optimizer=True)),
        "Trainer (evaluating and saving)": ("transformers", partial(_trainer, **half)),
        "Trainer (the best model at the end)": (
            "transformers", partial(_trainer, load_best_model_at_end=True, **half),
        ),
        "Trainer (resuming)": ("transformers", partial(_resumed, **half)),
        "Trainer (LoRA of PEFT)": ("peft", partial(_trainer, adapted=True)),
        "Trainer (LoRA of PEFT, resuming)": ("peft", partial(_resumed, adapted=True, **half)),
        "SFTTrainer": ("trl", _tuned),
        "SFTTrainer (completions alone)": ("trl", partial(_tuned, completion=True)),
        "SFTTrainer (LoRA of PEFT)": ("trl", partial(_tuned, adapted=True)),
        "SFTTrainer (peft_config)": ("trl", partial(_tuned, wraps=True)),
        "SFTTrainer (peft_config, streamed once it is made)": ("trl", partial(_tuned, wraps=True, late=True)),
        "DPOTrainer (a reference of its own)": ("trl", _preferred),
        "DPOTrainer (LoRA of PEFT)": ("trl", partial(_preferred, adapted=True)),
        "DPOTrainer (LoRA of PEFT, streamed once it is made)": ("trl", partial(_preferred, adapted=True, late=True)),
        "accelerate": ("accelerate", _accelerated),
        "accelerate (accumulate and clip)": ("accelerate", partial(_accelerated, gradient_accumulation_steps=2)),
        "accelerate (mixed_precision)": ("accelerate", partial(_accelerated, mixed_precision="bf16")),
        "Lightning's Trainer": ("lightning", _lightning),
        "Lightning's Trainer (accumulating and clipping)": (
            "lightning", partial(_lightning, accumulate_grad_batches=2, gradient_clip_val=0.1),
        ),
        "Lightning's Trainer (precision='bf16-mixed')": ("lightning", partial(_lightning, precision="bf16-mixed")),
        "Lightning's Trainer (resuming)": ("lightning", partial(_lightning, resuming=True)),
        "SentenceTransformerTrainer": ("sentence_transformers", _sentences),
        "a loop with GradScaler": ("torch", _scaled),
    }  # fmt: skip
    for module in _LOADED:  # once, not in the child of each case
        if importlib.util.find_spec(module.partition(".")[0]) is not None:
            importlib.import_module(module)
    for name, (package, train) in ways.items():
        if importlib.util.find_spec(package) is not None:
            yield TrainerCase(name, train)


class _Words(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Of random tokens, each its own label."""

    def __init__(self) -> None:
        drawn = torch.Generator().manual_seed(5)
        self.tokens = torch.randint(3, _VOCABULARY, (64, _LENGTH), generator=drawn)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


def _made(adapted: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = llama().to(dtype)
    if not adapted:
        return model.train()
    import peft

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config).train()


def _left(model: nn.Module, logged: list[dict[str, Any]]) -> Left:
    """All numbers that were logged, but clocks, and weights."""
    numbers = {
        f"{key} {number}": torch.tensor(float(value), dtype=torch.float64)
        for number, entry in enumerate(logged)
        for key, value in entry.items()
        if not any(word in key for word in ("runtime", "per_second", "flos", "time"))
    }
    return numbers | held(model)


def _trainer(
    side: Side, resume: str | None = None, steps: int = _STEPS, own_optimizer: bool = False, adapted: bool = False,
    dtype: torch.dtype = torch.float32, **more: Any,
) -> Left:  # fmt: skip
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    model = side.model(_made(adapted, dtype))
    given = {"save_strategy": "no", "max_grad_norm": 0.0, "learning_rate": 1e-2, **_QUIET, **more}
    arguments = TrainingArguments(
        str(side.folder / "out"), max_steps=steps, per_device_train_batch_size=_BATCH, **given
    )  # fmt: skip
    trainer = Trainer(
        model, arguments, train_dataset=_Words(), eval_dataset=torch.utils.data.Subset(_Words(), range(4)),
        optimizers=(None if own_optimizer else side.optimizer(model), None),
    )  # fmt: skip
    if own_optimizer:
        side.watched(trainer.create_optimizer())
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return _left(model, trainer.state.log_history)


def _resumed(side: Side, **more: Any) -> Left:
    """All steps, then the last four anew from the checkpoint in the middle."""
    whole = _trainer(side, **more)
    again = _trainer(side, resume=str(side.folder / "out" / "checkpoint-4"), **more)
    return whole | {f"resumed {name}": value for name, value in again.items()}


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, _VOCABULARY)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def _texts(rows: int = 64) -> list[str]:
    return [" ".join(f"w{int(token)}" for token in row) for row in _Words().tokens[:rows]]


def _start(side: Side, adapted: bool, late: bool) -> Any:
    return _made(adapted) if late else side.model(_made(adapted))


def _finish(side: Side, trainer: Any, late: bool) -> Left:
    """``late``: the model is streamed here, when the trainer has put into it what it adds."""
    from transformers.trainer_callback import PrinterCallback

    model = side.model(trainer.model) if late else trainer.model
    trainer.optimizer = side.optimizer(model)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return _left(model, trainer.state.log_history)


def _tuned(
    side: Side, completion: bool = False, adapted: bool = False, wraps: bool = False, late: bool = False
) -> Left:
    import peft
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    model, texts = _start(side, adapted, late), _texts()
    data = {"prompt": [one[:12] for one in texts], "completion": [one[12:] for one in texts]}
    arguments = SFTConfig(
        str(side.folder / "out"), max_steps=_STEPS, per_device_train_batch_size=_BATCH, save_strategy="no",
        learning_rate=1e-2, bf16=False, gradient_checkpointing=False, **_QUIET,
    )  # fmt: skip
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM") if wraps else None
    trainer = SFTTrainer(
        model, arguments, train_dataset=Dataset.from_dict(data if completion else {"text": texts}),
        processing_class=_tokenizer(), peft_config=config,
    )  # fmt: skip
    return _finish(side, trainer, late)


def _preferred(side: Side, adapted: bool = False, late: bool = False) -> Left:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    model, texts = _start(side, adapted, late), _texts()
    data = {"prompt": [one[:12] for one in texts], "chosen": [one[12:] for one in texts],
            "rejected": [one[12:] for one in reversed(texts)]}  # fmt: skip
    arguments = DPOConfig(
        str(side.folder / "out"), max_steps=_STEPS, per_device_train_batch_size=_BATCH, save_strategy="no",
        learning_rate=1e-2, bf16=False, gradient_checkpointing=False, **_QUIET,
    )  # fmt: skip
    trainer = DPOTrainer(
        model, None if adapted else _made(), arguments, train_dataset=Dataset.from_dict(data),
        processing_class=_tokenizer(),
    )  # fmt: skip
    return _finish(side, trainer, late)


def _accelerated(side: Side, **more: Any) -> Left:
    from accelerate import Accelerator

    accelerator, made = Accelerator(cpu=True, **more), side.model(_made())
    adamw = side.optimizer(made)
    schedule = torch.optim.lr_scheduler.LinearLR(adamw, start_factor=0.1, total_iters=5)
    loader = torch.utils.data.DataLoader(_Words(), batch_size=_BATCH, shuffle=True)
    model, optimizer, loader, schedule = accelerator.prepare(made, adamw, loader, schedule)
    logged: list[dict[str, Any]] = []
    for _, batch in zip(range(_STEPS * more.get("gradient_accumulation_steps", 1)), loader, strict=False):
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            logged.append({"loss": loss.item()})
            if accelerator.sync_gradients:
                logged.append({"norm": accelerator.clip_grad_norm_(model.parameters(), 0.1)})
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    return _left(made, logged)


def _lightning(side: Side, resuming: bool = False, **more: Any) -> Left:
    import lightning

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logged: list[dict[str, Any]] = []

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = side.model(_made())

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch, use_cache=False).loss
            logged.append({"loss": loss.item()})
            return loss

        def configure_optimizers(self) -> Any:
            return side.optimizer(self.model)

    def fit(steps: int, resume: Any = None) -> Any:
        trainer, module = lightning.Trainer(
            accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, **more,
        ), Module()  # fmt: skip
        loader = torch.utils.data.DataLoader(_Words(), batch_size=_BATCH)
        trainer.fit(module, loader, ckpt_path=resume, weights_only=True)
        return trainer, module

    if resuming:
        trainer, _ = fit(_STEPS // 2)
        trainer.save_checkpoint(side.folder / "half.ckpt")
        return _left(fit(_STEPS, side.folder / "half.ckpt")[1].model, logged)
    return _left(fit(_STEPS)[1].model, logged)


def _sentences(side: Side) -> Left:
    from datasets import Dataset
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, vocab_size=_VOCABULARY
    )  # fmt: skip
    BertModel(config).save_pretrained(side.folder / "bert")
    _tokenizer().save_pretrained(side.folder / "bert")
    model = side.model(SentenceTransformer(str(side.folder / "bert"), device="cpu"))
    arguments = SentenceTransformerTrainingArguments(
        str(side.folder / "out"), max_steps=_STEPS, per_device_train_batch_size=4, save_strategy="no",
        learning_rate=1e-2, **_QUIET,
    )  # fmt: skip
    texts = _texts()
    trainer = SentenceTransformerTrainer(
        model, arguments, train_dataset=Dataset.from_dict({"anchor": texts, "positive": [one[6:] for one in texts]}),
        loss=MultipleNegativesRankingLoss(model), optimizers=(side.optimizer(model), None),
    )  # fmt: skip
    trainer.train()
    return _left(model, trainer.state.log_history)


def _scaled(side: Side) -> Left:
    model = side.model(_made())
    optimizer, scaler = side.optimizer(model), torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
    logged = []
    for number in range(_STEPS):
        batch = {name: value[None] for name, value in _Words()[number].items()}
        with torch.autocast("cpu", torch.float16):
            loss = model(**batch, use_cache=False).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        logged.append({"loss": loss.item(), "norm": norm, "scale": scaler.get_scale()})
    return _left(model, logged)
