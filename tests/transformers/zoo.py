"""Small random configurations of Hugging Face families: defaults untouched but for sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

WORDS, LENGTH, BATCH = 96, 14, 2
Batch = dict[str, torch.Tensor | bool]


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model.

    ``make`` builds it; ``inputs`` draws a batch for which the model computes its own loss; ``containers``: the
    ModuleLists whose children should be the blocks; ``attentions``: implementations it has.
    """

    make: Callable[[], Any]
    inputs: Callable[[], Batch]
    containers: tuple[str, ...]
    attentions: tuple[str, ...] = ("eager", "sdpa")

    def model(self, attention: str | None = None) -> Any:
        """A new model with the same weights at every call, in train mode; ``attention`` if it has that."""
        torch.manual_seed(1)
        model = self.make().train()
        if attention in self.attentions:
            model.set_attn_implementation(attention)
        return model

    def batch(self, number: int = 0) -> Batch:
        """Batch ``number``: the same at every call."""
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(100 + number)
            return self.inputs()

    def blocks(self, model: Any) -> list[torch.nn.Module]:
        """The modules of ``model`` that should be its blocks."""
        return [block for name in self.containers for block in model.get_submodule(name).children()]


def loss_of(model: Any, batch: Batch) -> torch.Tensor:
    """The loss that the model computes from its labels (CLIP: from the pairs)."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def words(length: int = LENGTH) -> torch.Tensor:
    return torch.randint(5, WORDS, (BATCH, length))


def text() -> Batch:
    """Words of which the last two of one row are padding; every word is its own label (models shift by themselves)."""
    ids, mask = words(), torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pair_of_texts() -> Batch:
    return {**text(), "labels": words(7)}


def picture(size: int = 32) -> torch.Tensor:
    return torch.randn(BATCH, 3, size, size)


def labelled_picture() -> Batch:
    return {"pixel_values": picture(), "labels": torch.randint(0, 4, (BATCH,))}


def segmented_picture() -> Batch:
    return {"pixel_values": picture(), "labels": torch.randint(0, 4, (BATCH, 32, 32))}


def sound() -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 2 * 12), "labels": words(7)}


def picture_and_text() -> Batch:
    ids = words()
    ids[:, -1] = WORDS - 1
    return {"input_ids": ids, "pixel_values": picture(), "return_loss": True}


TEXT: dict[str, Any] = {"vocab_size": WORDS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
LLAMA: dict[str, Any] = TEXT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
BERT: dict[str, Any] = TEXT | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def gpt2(**options: Any) -> Any:
    return hf.GPT2LMHeadModel(hf.GPT2Config(**TEXT, n_embd=32, n_layer=3, n_head=4, n_positions=32, **options))


def llama(**options: Any) -> Any:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**LLAMA, **options))


def qwen3(**options: Any) -> Any:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA, head_dim=8, **options))


def gemma3(**options: Any) -> Any:
    layers = ["sliding_attention", "sliding_attention", "full_attention"]
    config = hf.Gemma3TextConfig(**LLAMA, head_dim=8, sliding_window=4, layer_types=layers, **options)
    return hf.Gemma3ForCausalLM(config)


def mixtral(**options: Any) -> Any:
    experts = {
        "num_local_experts": 4,
        "intermediate_size": 16,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.1,
    }
    return hf.MixtralForCausalLM(hf.MixtralConfig(**(LLAMA | experts | options)))


def opt(**options: Any) -> Any:
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 3}
    return hf.OPTForCausalLM(
        hf.OPTConfig(**TEXT, **sizes, num_attention_heads=4, max_position_embeddings=32, **options)
    )


def bloom(**options: Any) -> Any:
    return hf.BloomForCausalLM(hf.BloomConfig(**TEXT, hidden_size=32, n_layer=3, n_head=4, **options))


def gpt_neox(**options: Any) -> Any:
    return hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**BERT, **options))


def bert(**options: Any) -> Any:
    return hf.BertForMaskedLM(hf.BertConfig(**BERT, **options))


def roberta() -> Any:
    return hf.RobertaForMaskedLM(hf.RobertaConfig(**BERT))


def t5_config(**options: Any) -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hf.T5Config(**(sizes | options), decoder_start_token_id=0)


def bart(**options: Any) -> Any:
    sizes = {"vocab_size": WORDS, "d_model": 32, "max_position_embeddings": 32, "decoder_start_token_id": 0}
    layers = {f"{side}_{what}": n for side in ("encoder", "decoder")
              for what, n in (("layers", 3), ("ffn_dim", 48), ("attention_heads", 4))}  # fmt: skip
    return hf.BartForConditionalGeneration(hf.BartConfig(**(sizes | layers | options)))


def t5(**options: Any) -> Any:
    return hf.T5ForConditionalGeneration(t5_config(**options))


def vit() -> Any:
    sizes = TOWER | {"num_hidden_layers": 3}
    return hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=4))


def resnet() -> Any:
    config = hf.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12, 16], depths=[2, 2, 2], layer_type="basic", num_labels=4
    )
    return hf.ResNetForImageClassification(config)


def segformer() -> Any:
    config = hf.SegformerConfig(
        num_encoder_blocks=3, depths=[2, 2, 2], sr_ratios=[2, 2, 1], hidden_sizes=[8, 16, 32], patch_sizes=[7, 3, 3],
        strides=[4, 2, 2], num_attention_heads=[1, 2, 2], mlp_ratios=[2, 2, 2], decoder_hidden_size=32, num_labels=4,
    )  # fmt: skip
    return hf.SegformerForSemanticSegmentation(config)


def swin() -> Any:
    config = hf.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[2, 2, 2], num_heads=[2, 2, 4], window_size=2, num_labels=4
    )
    return hf.SwinForImageClassification(config)


def whisper(**options: Any) -> Any:
    config = hf.WhisperConfig(
        **TEXT, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8, max_source_positions=12, max_target_positions=16,
        decoder_start_token_id=1, **options,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def clip() -> Any:
    text_tower = TEXT | TOWER | {"max_position_embeddings": 16, "eos_token_id": WORDS - 1}
    picture_tower = TOWER | {"image_size": 32, "patch_size": 8}
    return hf.CLIPModel(hf.CLIPConfig(text_config=text_tower, vision_config=picture_tower, projection_dim=16))


def mamba(**options: Any) -> Any:
    return hf.MambaForCausalLM(hf.MambaConfig(**TEXT, hidden_size=32, state_size=4, num_hidden_layers=3, **options))


STAGES_OF = {
    name: tuple(pattern.format(stage) for stage in range(3))
    for name, pattern in {
        "resnet": "resnet.encoder.stages.{}.layers",
        "segformer": "segformer.stages.{}.blocks",
        "swin": "swin.encoder.layers.{}.blocks",
    }.items()
}
FAMILIES = {
    "gpt2": Family(gpt2, text, ("transformer.h",)),
    "llama": Family(llama, text, ("model.layers",)),
    "qwen3": Family(qwen3, text, ("model.layers",)),
    "gemma3": Family(gemma3, text, ("model.layers",)),
    "mixtral": Family(mixtral, text, ("model.layers",)),
    "opt": Family(opt, text, ("model.decoder.layers",)),
    "bloom": Family(bloom, text, ("transformer.h",), ("eager",)),
    "gpt_neox": Family(gpt_neox, text, ("gpt_neox.layers",)),
    "bert": Family(bert, text, ("bert.encoder.layer",)),
    "roberta": Family(roberta, text, ("roberta.encoder.layer",)),
    "t5": Family(t5, pair_of_texts, ("encoder.block", "decoder.block")),
    "vit": Family(vit, labelled_picture, ("vit.layers",)),
    "resnet": Family(resnet, labelled_picture, STAGES_OF["resnet"], ("eager",)),
    "segformer": Family(segformer, segmented_picture, (*STAGES_OF["segformer"], "decode_head.linear_projections")),
    "swin": Family(swin, labelled_picture, STAGES_OF["swin"]),
    "whisper": Family(whisper, sound, ("model.encoder.layers", "model.decoder.layers")),
    "clip": Family(clip, picture_and_text, ("text_model.encoder.layers", "vision_model.encoder.layers")),
    "mamba": Family(mamba, text, ("backbone.layers",), ("eager",)),
}
