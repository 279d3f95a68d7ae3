"""Families of `transformers`, small and with random weights."""

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
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_BOTH = ["sliding_attention", "full_attention"] * 2
_START = {"decoder_start_token_id": 0}
_LATENT = {"num_key_value_heads": 4}  # keys and values are made for every head
_MORE: dict[str, dict[str, Any]] = {  # what else a family wants said of four layers, or other names for what is above
    "bamba": {**_MAMBA, "attn_layer_indices": [2]},
    "codegen": {"rotary_dim": 8},
    "ctrl": {"dff": 48},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64},
    "funnel": {"block_sizes": [2, 2]},
    "gemma3n_text": {
        "layer_types": _BOTH, "intermediate_size": [48] * 4, "num_kv_shared_layers": 2, "laurel_rank": 4,
        "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0], "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "gemma4_text": {
        "layer_types": _BOTH, "num_kv_shared_layers": 2, "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8, "global_head_dim": 8, "num_global_key_value_heads": 2,
    },
    "glm4_moe_lite": _LATENT,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["linear_attention", "full_attention"] * 2},
    "longt5": _START,
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "chunk_size": 8},
    "reformer": {"attn_layers": ["local", "lsh"] * 2, "axial_pos_embds": False, "attention_head_size": 8,
                 "feed_forward_size": 48, "is_decoder": True, "num_buckets": 4, "hash_seed": 1},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 2, 1]},
    "t5": _START,
    "switch_transformers": _START,
    "swin": {"num_heads": [1, 2, 4, 4], "depths": [1, 1, 2, 1], "embed_dim": 8, "patch_size": 2, "window_size": 2},
}  # fmt: skip
_NAMED_OTHERWISE = {  # what a family does not take, or means something else by
    "falcon": ("head_dim",),
    "funnel": ("num_hidden_layers",),
    "swin": ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_layers", "n_layers"),
    "xlnet": ("max_position_embeddings",),
}  # fmt: skip
_FAMILIES = {
    "CausalLM": (
        "bamba", "bart", "bert", "big_bird", "biogpt", "bitnet", "blenderbot", "bloom", "codegen", "cohere2", "ctrl",
        "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "electra", "ernie4_5", "exaone4", "falcon", "falcon_h1",
        "falcon_mamba", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe", "gpt2",
        "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite", "granitemoehybrid", "jamba", "lfm2",
        "llama", "llama4_text", "mamba", "mamba2", "minimax", "mistral", "mixtral", "mpt", "nemotron", "olmo2",
        "olmoe", "opt", "persimmon", "phi3", "phimoe", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next",
        "recurrent_gemma", "reformer", "roberta", "rwkv", "smollm3", "stablelm", "starcoder2", "xglm", "xlnet",
        "xlm-roberta",
    ),
    "MaskedLM": ("albert", "deberta-v2", "distilbert", "esm", "fnet", "funnel", "longformer", "modernbert", "mpnet"),
    "Seq2SeqLM": ("led", "longt5", "m2m_100", "mt5", "pegasus_x", "switch_transformers", "t5"),
    "ImageClassification": ("beit", "dinov2", "resnet", "siglip", "swin", "vit"),
}  # fmt: skip
_BATCH, _LENGTH = 2, 12


def cases() -> Iterator[Case]:
    """Families that people train, each with one of its heads; of several that are alike, one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    for head, families in _FAMILIES.items():
        for family in families:
            if family in CONFIG_MAPPING:
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
    known -= set(_NAMED_OTHERWISE.get(family, ()))
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    config = kind(**{**sizes, **_MORE.get(family, {})})
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
