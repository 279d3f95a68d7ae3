"""Families of `transformers`: every one whose configuration can be made small, with random weights."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from benchmarks.compatibility.trial import Case

_SIZES: dict[str, Any] = {
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32, "embedding_size": 32,
    "word_embed_proj_dim": 32, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "hidden_dim": 48,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "encoder_layers": 3, "decoder_layers": 3,
    "num_decoder_layers": 3, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "d_kv": 8,
    "vocab_size": 64, "max_position_embeddings": 64, "n_positions": 64, "max_seq_len": 64, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "image_size": 32, "patch_size": 8, "num_channels": 3, "state_size": 8,
    "time_step_rank": 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0,
    "num_labels": 4, "sliding_window": 8, "attention_window": 8, "local_attention": 8, "use_cache": False,
}  # fmt: skip
_HEADS = ("CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification")
_BATCH, _LENGTH = 2, 12


def cases() -> Iterator[Case]:
    """One for each family that has one of the usual heads."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    seen = set[str]()
    tables = {
        "CausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "MaskedLM": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "Seq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "ImageClassification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    }
    for head in _HEADS:
        for family in sorted(tables[head]):
            if family not in seen and family in CONFIG_MAPPING:
                seen.add(family)
                yield Case(f"{family} ({head})", _maker(family, head), _loss_of(head))


def _maker(family: str, head: str) -> Any:
    def make() -> nn.Module:
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, f"AutoModelFor{head}").from_config(_config(family))
        if sum(p.numel() for p in model.parameters()) > 2_000_000:
            raise ValueError("its configuration cannot be made small by the usual names")
        return model.train()  # type: ignore[no-any-return]

    return make


def _config(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    known = set(inspect.signature(kind.__init__).parameters) | set(dir(kind))
    known |= set(getattr(kind, "__dataclass_fields__", ())) | set(getattr(kind, "attribute_map", ()))
    config = kind(**{name: value for name, value in _SIZES.items() if name in known})
    for name, value in _SIZES.items():  # of parts, too: text and vision towers
        for part in ("text_config", "vision_config"):
            inner = getattr(config, part, None)
            if inner is not None and hasattr(inner, name):
                setattr(inner, name, value)
    return config


def _loss_of(head: str) -> Any:
    def loss(model: nn.Module) -> torch.Tensor:
        generator = torch.Generator().manual_seed(5)
        if head == "ImageClassification":
            given: dict[str, Any] = {"pixel_values": torch.randn(_BATCH, 3, 32, 32, generator=generator)}
            given["labels"] = torch.randint(0, 4, (_BATCH,), generator=generator)
        else:
            words = torch.randint(3, 60, (_BATCH, _LENGTH), generator=generator)
            given = {"input_ids": words, "labels": words}
        if head != "ImageClassification" and getattr(model.config, "use_cache", None) is not None:
            given["use_cache"] = False
        found: torch.Tensor = model(**given).loss
        return found

    return loss
