"""A few AdamW steps of a Qwen3 with tied embeddings in a process of its own, under a hard limit: ``python qwen_step.py
JSON``; prints what it has seen as JSON."""

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import tapestream as ts
from tapestream.frontends.module.lazy_logits import compute_lazily


def status() -> dict[str, int]:
    """Bytes of this process, as the system counts them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def qwen(vocabulary: int, width: int) -> Any:
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, max_position_embeddings=8192,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config)


def prepare(job: dict[str, Any], vocabulary: int, width: int) -> tuple[Any, Any]:
    model = qwen(vocabulary, width).to(getattr(torch, job["dtype"]))
    if not job["streamed"]:
        if job["chunks"]:
            compute_lazily(model.lm_head, job["chunks"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    ts.stream(model, device="cpu", budget=job["budget"], folder=job["folder"], loss_chunks=job["chunks"])
    return model, ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=job["update"], master=job["master"])


def train(model: Any, optimizer: Any, job: dict[str, Any], vocabulary: int) -> list[str]:
    losses = []
    for step in range(job["steps"]):
        generator = torch.Generator().manual_seed(step)
        words = torch.randint(0, vocabulary, (1, job["tokens"]), generator=generator)
        loss = model(input_ids=words, labels=words).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
    return losses


def main(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    # Threads, pools and kernels exist before the limit is set: a small run first.
    train(*prepare({**job, "budget": "1 GiB"}, 500, 64), {**job, "tokens": 64}, 500)
    model, optimizer = prepare(job, job["vocabulary"], job["width"])
    mine = 0 if job["streamed"] else sum(p.nbytes for p in model.parameters())
    now = status()
    if job["allowed"]:
        limit = now["VmData"] - mine + job["allowed"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = status()["VmRSS"] - mine
    try:
        losses = train(model, optimizer, job, job["vocabulary"])
    except (RuntimeError, MemoryError) as error:
        print(json.dumps({"failed": str(error).splitlines()[0]}))
        return
    resident = status()["VmHWM"] - before
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    print(json.dumps({"losses": losses, "resident": resident, "digest": digest.hexdigest()}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
