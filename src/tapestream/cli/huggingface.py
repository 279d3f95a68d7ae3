"""Models from a Hugging Face ``config.json``: which class, and what one calls it with. Needs transformers."""

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tapestream.cli.targets import check_config
from tapestream.errors import InputError

_DEFAULT_SEQUENCE = 2048
_WITHOUT_PACKING = "sdpa_without_packing"


def load(folder: Path) -> Any:
    """The configuration in ``folder``. Raises InputError where it is missing or cannot be read."""
    check_config(folder)
    transformers = _transformers()
    try:
        return transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever it may find wrong with the file
        raise InputError(f"{folder}/config.json cannot be used: {error}") from error


def class_of(config: Any) -> type[nn.Module]:
    """The class that the configuration names, else the one for its loss, else its bare body."""
    transformers = _transformers()
    for name in config.architectures or ():
        found = getattr(transformers, name, None)
        if isinstance(found, type):
            return found
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        if type(config) in auto._model_mapping:
            made: type[nn.Module] = auto._model_mapping[type(config)]
            return made
    raise InputError(
        f"config.json describes a {config.model_type}, for which transformers {transformers.__version__} has no model; "
        "make the model yourself and name module:factory"
    )


def make(cls: type[nn.Module], config: Any) -> nn.Module:
    """The model, of random weights, in train mode, on the default device."""
    own = copy.deepcopy(config)
    if own.is_encoder_decoder:  # configurations that were never trained with may lack what shifting labels takes
        words = own.get_text_config(decoder=True).vocab_size
        for name in ("decoder_start_token_id", "pad_token_id"):
            token = getattr(own, name, None)
            if token is None or token >= words:  # made smaller by hand, the defaults left
                setattr(own, name, 0)
    return cls(own).train()


def without_packing(model: nn.Module) -> None:
    """Let attention masks be left out on fake tensors as they are on real ones.

    transformers looks at the values of positions to see whether sequences were packed into one; where there are no
    values it makes a mask to be safe, and attention takes another kernel.
    """
    if getattr(getattr(model, "config", None), "_attn_implementation", None) != "sdpa":
        return
    transformers = _transformers()
    mask, attention = transformers.AttentionMaskInterface(), transformers.AttentionInterface()
    plain = mask["sdpa"]

    def skipping(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **{**kwargs, "allow_is_causal_skip": True})

    transformers.AttentionMaskInterface.register(_WITHOUT_PACKING, skipping)
    transformers.AttentionInterface.register(_WITHOUT_PACKING, attention["sdpa"])
    model.set_attn_implementation(_WITHOUT_PACKING)  # type: ignore[operator]


def sequence_of(cls: type[nn.Module], config: Any, asked: int | None) -> int | None:
    """Tokens per sample: those asked for, else as many as the model knows positions for, 2048 at most.

    None for models of something else than text. Raises InputError for more tokens than positions.
    """
    if "input_ids" not in _parameters(cls) and "decoder_input_ids" not in _parameters(cls):
        if asked is not None:
            raise InputError(f"--seq {asked} was asked for, but {cls.__name__} takes no tokens; leave --seq out")
        return None
    text = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions")
    known = next((n for name in names if isinstance(n := getattr(text, name, None), int) and n > 0), None)
    if asked is not None and known is not None and asked > known:
        raise InputError(f"--seq {asked} was asked for, but {cls.__name__} has {known} positions; give --seq {known}")
    return asked or min(_DEFAULT_SEQUENCE, known or _DEFAULT_SEQUENCE)


def arguments(cls: type[nn.Module], config: Any, batch: int, sequence: int) -> dict[str, Any]:
    """Named arguments of one training call, with labels where the model computes its own loss.

    Raises InputError for a modality that is not known here.
    """
    takes = _parameters(cls)
    main = getattr(cls, "main_input_name", "input_ids")
    found: dict[str, Any] = {}
    if {"input_ids", "pixel_values", "return_loss"} <= takes:  # pairs of text and picture
        found = {"input_ids": _words(config, batch, sequence), "pixel_values": _pixels(config, batch)}
        found["return_loss"] = True
    elif main == "pixel_values":
        found["pixel_values"] = _pixels(config, batch)
    elif main == "input_features" and hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        found["input_features"] = torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions)
    elif main == "input_ids":
        found["input_ids"] = _words(config, batch, sequence)
    else:
        raise InputError(
            f"{cls.__name__} takes {main!r}, whose shape is not known here; write a function that returns (model, "
            "example_batch) and name it as module:factory"
        )
    if "use_cache" in takes:
        found["use_cache"] = False
    return found | _labels(cls, config, batch, sequence, takes)


def _labels(cls: type[nn.Module], config: Any, batch: int, sequence: int, takes: set[str]) -> dict[str, Any]:
    name = cls.__name__
    if "labels" in takes and name.endswith(("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")):
        return {"labels": _words(config, batch, sequence)}
    if "labels" in takes and name.endswith(("SequenceClassification", "ImageClassification")):
        return {"labels": torch.randint(config.num_labels, (batch,))}
    if "labels" in takes and name.endswith("TokenClassification"):
        return {"labels": torch.randint(config.num_labels, (batch, sequence))}
    if "start_positions" in takes:
        return {key: torch.randint(sequence, (batch,)) for key in ("start_positions", "end_positions")}
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        return {"decoder_input_ids": _words(config, batch, sequence)}
    return {}  # the loss is taken to be the sum of what it returns


def _words(config: Any, batch: int, sequence: int) -> torch.Tensor:
    return torch.randint(config.get_text_config().vocab_size, (batch, sequence))


def _pixels(config: Any, batch: int) -> torch.Tensor:
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, getattr(vision, "num_channels", 3), math.ceil(height), math.ceil(width))


def _parameters(cls: type[nn.Module]) -> set[str]:
    return set(inspect.signature(cls.forward).parameters)


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InputError(
            "a folder with a Hugging Face config.json was named, but transformers is not installed; "
            "pip install transformers"
        ) from error
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # its advice on kernels and losses is for those who run models
    return transformers
