"""Methods of `peft` on a small Llama; optimizers of `torch.optim` and of installed packages; models of `timm`."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.compatibility.trial import Case

OF_OPTIMIZERS = ("torch.optim", "pytorch_optimizer", "timm.optim", "bitsandbytes.optim", "torchao.optim")
_FEW_BITS = ("bitsandbytes.optim", "torchao.optim")
_TARGETS = ["q_proj", "v_proj"]


def peft_methods() -> Iterator[Case]:
    """Each with its own options, small."""
    import peft

    words = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 4}
    small: dict[str, Callable[[], Any]] = {
        "LoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, lora_dropout=0.1),
        "LoRA of embeddings and head": lambda: peft.LoraConfig(r=4, target_modules=["embed_tokens", "lm_head"]),
        "LoRA with biases and a head trained in full": lambda: peft.LoraConfig(
            r=4, target_modules=_TARGETS, bias="lora_only", modules_to_save=["lm_head"]
        ),
        "rsLoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, use_rslora=True),
        "DoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, use_dora=True),
        "PiSSA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, init_lora_weights="pissa"),
        "OLoRA": lambda: peft.LoraConfig(r=4, target_modules=_TARGETS, init_lora_weights="olora"),
        "LoRA of all linear layers": lambda: peft.LoraConfig(r=4, target_modules="all-linear"),
        "AdaLoRA": lambda: peft.AdaLoraConfig(target_modules=_TARGETS, total_step=10, init_r=6, target_r=4),
        "LoHa": lambda: peft.LoHaConfig(r=4, target_modules=_TARGETS),
        "LoKr": lambda: peft.LoKrConfig(r=4, target_modules=_TARGETS),
        "IA3": lambda: peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
        "OFT": lambda: peft.OFTConfig(oft_block_size=8, target_modules=_TARGETS),
        "BOFT": lambda: peft.BOFTConfig(boft_block_size=8, target_modules=_TARGETS),
        "VeRA": lambda: peft.VeraConfig(r=4, target_modules=["q_proj"]),
        "RandLoRA": lambda: peft.RandLoraConfig(r=4, target_modules=["q_proj"]),
        "VB-LoRA": lambda: peft.VBLoRAConfig(r=4, num_vectors=32, vector_length=8, target_modules=_TARGETS),
        "FourierFT": lambda: peft.FourierFTConfig(n_frequency=16, target_modules=_TARGETS),
        "HRA": lambda: peft.HRAConfig(r=4, target_modules=_TARGETS),
        "MiSS": lambda: peft.MissConfig(r=4, target_modules=_TARGETS),
        "C3A": lambda: peft.C3AConfig(block_size=8, target_modules=_TARGETS),
        "SHiRA": lambda: peft.ShiraConfig(r=4, target_modules=_TARGETS),
        "Road": lambda: peft.RoadConfig(target_modules=_TARGETS, group_size=8),
        "WaveFT": lambda: peft.WaveFTConfig(n_frequency=16, target_modules=_TARGETS),
        "Trainable tokens": lambda: peft.TrainableTokensConfig(token_indices=[3, 4], target_modules=["embed_tokens"]),
        "LN tuning": lambda: peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"]),
        "Prompt tuning": lambda: peft.PromptTuningConfig(**words),
        "P-tuning": lambda: peft.PromptEncoderConfig(encoder_hidden_size=16, **words),
        "Prefix tuning": lambda: peft.PrefixTuningConfig(**words),
    }  # fmt: skip
    for name, config in small.items():
        yield Case(name, _adapted(config), _loss_of_words)


def _adapted(config: Callable[[], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import peft

        torch.manual_seed(0)
        return peft.get_peft_model(llama(), config()).train()  # type: ignore[no-any-return]

    return make


def llama() -> Any:
    """A small one, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, max_position_embeddings=64, use_cache=False
    ))  # fmt: skip


def _loss_of_words(model: nn.Module) -> torch.Tensor:
    words = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(5))
    found: torch.Tensor = model(input_ids=words, labels=words).loss
    return found


def optimizers_of(package: str) -> Iterator[Case]:
    """Every class of a package that can be made with its defaults; the network has matrices, a table and vectors.
    Optimizers of few bits treat tensors of 4096 elements and more in their way, so that theirs is wider."""
    if importlib.util.find_spec(package.split(".")[0]) is None:
        return
    module = importlib.import_module(package)
    for name in sorted(dir(module)):
        kind = getattr(module, name)
        own = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
        if own and not name.startswith("_") and (package == "torch.optim" or not kind.__module__.startswith("torch.")):
            matrices = package == "torch.optim" and name == "Muon"
            options: tuple[tuple[str, Any], ...] = () if name in ("Adafactor", "Rprop") else (("lr", 1e-3),)
            if package == "bitsandbytes.optim" and name.startswith(("LARS", "SGD")):  # which ask for it
                options = (*options, ("momentum", 0.9))
            made = partial(_network, bias=not matrices, width=64 if package in _FEW_BITS else 16)
            yield Case(name, made, _loss_of_numbers, kind, options, timed=False)


class _Block(nn.Module):
    def __init__(self, bias: bool, width: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width, bias=bias), nn.LayerNorm(width, elementwise_affine=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.norm(torch.tanh(self.linear(x)))
        return out


def _network(bias: bool, width: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = (_Block(bias, width) for _ in range(4))
    return nn.Sequential(nn.Embedding(2 * width, width), *blocks, nn.Linear(width, 2 * width, bias=bias))


def _loss_of_numbers(model: nn.Module) -> torch.Tensor:
    words = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(5))
    return nn.functional.cross_entropy(model(words).flatten(0, 1), words.flatten())


def timm_models() -> Iterator[Case]:
    """One small model of each kind, where timm is installed."""
    if importlib.util.find_spec("timm") is None:
        return
    for name in _TIMM:
        yield Case(name, _timm(name), _loss_of_images)


_TIMM = (
    "resnet18", "resnext50_32x4d", "densenet121", "vgg11_bn", "mobilenetv3_small_050", "efficientnet_b0", "regnetx_002",
    "convnext_atto", "convnextv2_atto", "vit_tiny_patch16_224", "deit_tiny_patch16_224", "beit_base_patch16_224",
    "swin_tiny_patch4_window7_224", "mixer_s32_224", "cait_xxs24_224", "xcit_nano_12_p16_224", "pit_ti_224",
    "levit_128s", "coat_lite_tiny", "poolformer_s12", "ghostnet_050", "mobilevit_xxs",
)  # fmt: skip


def _timm(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import timm

        torch.manual_seed(0)
        return timm.create_model(name, num_classes=4).train()  # type: ignore[no-any-return]

    return make


def _loss_of_images(model: nn.Module) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    side = (
        getattr(getattr(model, "patch_embed", None), "img_size", (224, 224))[0] if hasattr(model, "patch_embed") else 64
    )
    images = torch.randn(2, 3, side, side, generator=generator)
    return nn.functional.cross_entropy(model(images), torch.tensor([0, 1]))
