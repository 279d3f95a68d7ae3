"""Evaluation and generation in a process of its own, under a hard limit: ``python forward.py JSON``; prints what it has
seen as JSON."""

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from step import status
from transformers import LlamaConfig, LlamaForCausalLM

import tapestream as ts


def config_of(layers: int, width: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, max_position_embeddings=64, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def model_of(job: dict[str, Any], weights: str) -> Any:
    if not job["streamed"]:
        return LlamaForCausalLM.from_pretrained(weights).eval()
    with torch.device("meta"):
        hollow = LlamaForCausalLM(config_of(job["layers"], job["width"]))
    return ts.stream(hollow, device="cpu", budget=job["budget"], weights=weights, folder=job["folder"]).eval()


def use(model: Any) -> dict[str, Any]:
    """The loss of a batch, and tokens generated with a cache."""
    words = torch.randint(0, 256, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        loss = model(input_ids=words, labels=words).loss
    tokens = model.generate(words[:, :8], attention_mask=torch.ones(2, 8), max_new_tokens=4, do_sample=False)
    return {"loss": float(loss).hex(), "tokens": tokens.tolist()}


def save(layers: int, width: int, path: Path) -> None:
    """In several files: each is mapped as a whole while it is read, which counts against the limit."""
    torch.manual_seed(0)
    LlamaForCausalLM(config_of(layers, width)).save_pretrained(path, max_shard_size="16MB")


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    # Threads, pools, imports and kernels exist before the limit is set: a small run first.
    use(model_of({**job, "layers": 2, "budget": "1 GiB"}, job["weights"] + "-small"))
    if job["allowed"]:
        limit = status()["VmData"] + job["allowed"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = status()["VmRSS"]
    try:
        found = use(model_of(job, job["weights"]))
    except (RuntimeError, MemoryError, OSError) as error:
        print(json.dumps({"failed": f"{type(error).__name__}: {error}".splitlines()[0]}))
        return
    print(json.dumps({**found, "resident": status()["VmHWM"] - before}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
