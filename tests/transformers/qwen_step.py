"""A few AdamW steps of a Qwen3 with tied embeddings in a process of its own, under a hard limit: ``python qwen_step.py
JSON ..``; prints what it has seen as JSON, a line for each. ``saved``: the folder of a saved one, read under the limit;
None: with random weights, made before. A limit ends with its job."""

import hashlib
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers as hf

import tapestream as ts
from tapestream.errors import BudgetError
from tapestream.frontends.module.lazy_logits import compute_lazily
from tapestream.frontends.module.stream import handle_of


def status() -> dict[str, int]:
    """Bytes of this process, as the system counts them."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3 and words[2] == "kB"}


def qwen(vocabulary: int, width: int, layers: int) -> Any:
    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, max_position_embeddings=8192,
        tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return hf.Qwen3ForCausalLM(config)


def prepare(job: dict[str, Any], vocabulary: int, width: int) -> tuple[Any, Any]:
    saved = job["saved"]
    with torch.device("meta" if saved else "cpu"):
        model = qwen(vocabulary, width, job["layers"]).to(getattr(torch, job["dtype"]))
    if not job["streamed"]:
        model = type(model).from_pretrained(saved).train() if saved else model
        if job["chunks"]:
            compute_lazily(model.lm_head, job["chunks"])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)
    home = {"folder": job["folder"], "weights": saved}
    ts.stream(model, device="cpu", budget=job["budget"], loss_chunks=job["chunks"], **home)
    return model, ts.optimizer(model, torch.optim.AdamW, lr=1e-3, update=job["update"], master=job["master"])


def words_of(step: int, job: dict[str, Any], vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(0, vocabulary, (1, job["tokens"]), generator=generator)
    return {"input_ids": words, "labels": words}


def least_budget(model: Any, job: dict[str, Any]) -> int | None:
    """Bytes, as the error about a budget of one byte says; the model's budget is the job's again afterwards."""
    handle = handle_of(model)
    handle.budget = ts.Budget(1)
    try:
        model(**words_of(0, job, job["vocabulary"]))
    except BudgetError as error:
        handle.budget = ts.Budget(job["budget"])
        return error.least_nbytes
    raise AssertionError("a budget of one byte was not refused")


def train(model: Any, optimizer: Any, job: dict[str, Any], vocabulary: int) -> tuple[list[str], list[float]]:
    """The losses, exactly, and the seconds of each step."""
    losses, seconds = [], []
    for step in range(job["steps"]):
        begin = time.perf_counter()
        loss = model(**words_of(step, job, vocabulary)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def main(job: dict[str, Any]) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        print(json.dumps(seen(job, before[1])))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def seen(job: dict[str, Any], hard: int) -> dict[str, Any]:
    """Of the steps of one job; ``hard``: what limits may be raised to again."""
    torch.set_num_threads(job["threads"])
    # Threads, pools and kernels exist before the limit is set: a small run first.
    train(*prepare({**job, "budget": "1 GiB", "saved": None}, 500, 64), {**job, "tokens": 64}, 500)
    made = None if job["saved"] else prepare(job, job["vocabulary"], job["width"])
    mine = 0 if job["streamed"] or made is None else sum(p.nbytes for p in made[0].parameters())
    now = status()
    if job["allowed"]:
        limit = now["VmData"] - mine + job["allowed"]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts anew
    before = status()["VmRSS"] - mine
    try:
        model, optimizer = made or prepare(job, job["vocabulary"], job["width"])
        least = least_budget(model, job) if job["tell_least"] else None
        losses, seconds = train(model, optimizer, job, job["vocabulary"])
    except (RuntimeError, MemoryError) as error:
        return {"failed": str(error).splitlines()[0]}
    resident = status()["VmHWM"] - before
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().view(torch.uint8).numpy().tobytes())
    return {"losses": losses, "seconds": seconds, "least": least, "resident": resident, "digest": digest.hexdigest()}


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(json.loads(argument))
