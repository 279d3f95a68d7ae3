"""Full fine-tuning of an 8B-shaped Llama (bfloat16 with fp32 masters in host memory) in 12 GB of GPU memory, 2,048 and
8,192 tokens a step, beside FSDP2's CPUOffloadPolicy with one activation checkpoint per block on the same machine.

FLOPs are those of the matrix products of one forward and one backward (twice the forward's), causal attention counted
once, recomputes not at all. "share" is the longer of two bounds over the step: those FLOPs at the speed of a measured
bfloat16 product, and the bytes moved at the measured speed of the link; the least bytes stand beside. The vocabulary is
Llama 3's, and 32,000 where that does not fit. Every side runs in a process of its own, in turn; needs transformers.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import tapestream as ts
from benchmarks.common import Row, Settings, mebibytes, milliseconds, save, settings, synchronize
from benchmarks.from_disk import link_seconds
from benchmarks.gpu.speeds import product_flops_per_second
from benchmarks.least_moved import least_moved
from tapestream.frontends.available import host_nbytes

TITLE = "Full fine-tuning of an 8B-shaped Llama in 12 GB of GPU memory"
BUDGET = 12 * 10**9
SIDES = ("ours", "FSDP2")
Step = Callable[[], float]


def main(device: str = "cuda", name: str = "gpu_eight_billion") -> None:
    """Measure every length, or in a child process one side."""
    if "--side" in sys.argv:
        print(json.dumps(_child()))
        return
    chosen = settings(device, rounds=5)
    save(name, TITLE, chosen, rows(chosen), budget=BUDGET, optimizer="AdamW, masters in fp32")


def rows(chosen: Settings) -> Iterator[Row]:
    """One for each side and length; the smaller vocabulary where the larger does not fit."""
    for tokens in (64,) if chosen.quick else (2048, 8192):
        for vocabulary in (256,) if chosen.quick else (128_256, 32_000):
            found = [{"tokens": tokens, "vocabulary": vocabulary, **run(s, tokens, vocabulary, chosen)} for s in SIDES]
            yield from found
            if "ms" in found[0]:
                break


def run(side: str, tokens: int, vocabulary: int, chosen: Settings) -> Row:
    """One side in a child: a row, or what it died of (the system's own limit on memory may kill it)."""
    command = [sys.executable, "-m", "benchmarks.gpu.eight_billion", "--side", side, "--tokens", str(tokens)]
    command += ["--vocabulary", str(vocabulary), "--device", chosen.device, "--folder", chosen.folder]
    command += [
        "--rounds",
        str(chosen.rounds),
        "--threads",
        str(chosen.threads),
        *(["--quick"] if chosen.quick else []),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return {"side": side, "failed": lines[-1][:300] if lines else f"exit status {done.returncode}"}
    found: Row = json.loads(done.stdout.splitlines()[-1])
    return {"side": side, **found}


def config_of(vocabulary: int, tokens: int, quick: bool) -> LlamaConfig:
    """Llama 3 8B's shape, or a tiny one."""
    width, layers = (64, 4) if quick else (4096, 32)
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 7 // 2, num_hidden_layers=layers,
        num_attention_heads=width // 16 if quick else 32, num_key_value_heads=2 if quick else 8,
        max_position_embeddings=tokens, rope_theta=500_000.0, use_cache=False, attn_implementation="sdpa",
    )  # fmt: skip


def flops_of(config: LlamaConfig, tokens: int) -> float:
    """Of the matrix products of a forward and a backward of one sequence."""
    width, heads = config.hidden_size, config.num_attention_heads
    narrow = width * config.num_key_value_heads // heads
    weights = config.num_hidden_layers * (2 * width * (width + narrow) + 3 * width * config.intermediate_size)
    weights += width * config.vocab_size
    attention = config.num_hidden_layers * 2 * tokens**2 * width  # two products, half of each by causality
    return 3.0 * (2 * weights * tokens + attention)


def _child() -> Row:
    parser = argparse.ArgumentParser()
    for name, kind in {"side": str, "tokens": int, "vocabulary": int, "device": str, "folder": str, "rounds": int,
                       "threads": int}.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    config = config_of(given.vocabulary, given.tokens, given.quick)
    row = _ours(given, config) if given.side == "ours" else _theirs(given, config)
    flops = flops_of(config, given.tokens)
    widest = given.tokens, config.hidden_size, config.intermediate_size
    speed = product_flops_per_second(*widest, torch.bfloat16, given.device)
    seconds = row.pop("seconds")
    bound = max(flops / speed, row.pop("link seconds", 0.0))
    found = {
        **row, "ms": milliseconds(seconds), "tokens a second": round(given.tokens / seconds, 1),
        "TFLOP/s": round(flops / seconds / 1e12, 3), "matmul TFLOP/s": round(speed / 1e12, 3),
        "matmul bound ms": milliseconds(flops / speed),
    }  # fmt: skip
    return found | ({"share": round(bound / seconds, 4)} if given.side == "ours" else {})


def _ours(given: argparse.Namespace, config: LlamaConfig) -> Row:
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    on_gpu = given.device == "cuda"
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        machine = ts.measure_machine(given.device, None if on_gpu else folder)
        budget = ts.Budget(BUDGET if on_gpu else 2_000_000, host=_host_nbytes() if on_gpu else None)
        ts.stream(
            model, device=given.device, budget=budget, home="host" if on_gpu else "disk",
            folder=None if on_gpu else folder, machine=machine, loss_chunks="auto",
        )  # fmt: skip
        optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-5, update="backward", fused=True)
        step = _step(model, optimizer, _tokens(given))
        step()
        ts.report(model)  # counts from here
        step()
        report = ts.report(model)
        timed = _timed(step, given)
        moved, link = sum(report.bytes_moved.values()), link_seconds(report.bytes_moved, machine)
        ts.unstream(model) if not on_gpu else None  # brings all home memory together: the process ends anyway
    return {
        **timed, "plan": f"{report.plan.planner}, {report.plan.simulation.forwards} forwards",
        "planned MiB": mebibytes(report.plan.peak_nbytes), "moved MiB": mebibytes(moved),
        "least MiB": mebibytes(least_moved(report.plan)), "link bound ms": milliseconds(link), "link seconds": link,
    }  # fmt: skip


def _theirs(given: argparse.Namespace, config: LlamaConfig) -> Row:
    """FSDP2 on one device: fp32 parameters, gradients and AdamW state in pinned host memory, bfloat16 on the device.
    Where the host has no room for these 16 bytes a parameter, it ends with a sentence instead of by the system's hand;
    `benchmarks.gpu.first_contact` compares at a size that fits."""
    on_gpu = given.device == "cuda"
    with torch.device("meta"):
        needed, free = 16 * sum(p.numel() for p in LlamaForCausalLM(config).parameters()), host_nbytes()
    if needed > free:
        sys.exit(f"FSDP2 needs {needed / 1e9:.1f} GB of host memory for this model; {free / 1e9:.1f} GB are available")
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo", init_method=f"file://{file.name}", rank=0, world_size=1
        )
        mesh = init_device_mesh(given.device, (1,))
        model = LlamaForCausalLM(config)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        options: dict[str, Any] = {
            "mesh": mesh, "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            "offload_policy": CPUOffloadPolicy(pin_memory=on_gpu),
        }  # fmt: skip
        for layer in model.model.layers:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        for name, buffer in model.named_buffers():  # the policy moves parameters alone
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, buffer.to(given.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
        step = _step(model, optimizer, _tokens(given))
        step()
        timed = _timed(step, given)
        dist.destroy_process_group()
    return timed


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> Step:
    def step() -> float:
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


def _timed(step: Step, given: argparse.Namespace) -> Row:
    """The median of the rounds, the last loss, and on a GPU the most bytes reserved and allocated."""
    if given.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, loss = [], 0.0
    for _ in range(given.rounds):
        synchronize(given.device)
        begin = time.perf_counter()
        loss = step()
        synchronize(given.device)
        seconds.append(time.perf_counter() - begin)
    found: Row = {"seconds": median(seconds), "loss": round(loss, 4)}
    if given.device == "cuda":
        found["allocated MiB"] = mebibytes(torch.cuda.max_memory_allocated())
        found["reserved MiB"] = mebibytes(torch.cuda.max_memory_reserved())
    return found


def _tokens(given: argparse.Namespace) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(given.vocabulary, (1, given.tokens), generator=generator).to(given.device)


def _host_nbytes() -> int:
    """Parameters, masters and AdamW state take 105 GiB: more than the default share of a machine of 128 GiB."""
    return round(0.95 * host_nbytes())


if __name__ == "__main__":
    main()
