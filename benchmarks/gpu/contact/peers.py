"""Beside others that train from host memory: FSDP2 with CPU offload, and DeepSpeed's ZeRO-3 where it is installed.

Both keep float32 parameters, gradients and two moments in host memory, 16 bytes a parameter, page-locked, compute in
bfloat16, and update on the CPU. The model is as large as 60% of the host's memory allows. Ours has the same: float32
parameters that are cast by autocast.
"""

import importlib.util
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tapestream as ts
from benchmarks.gpu.contact.children import ROOT
from benchmarks.gpu.contact.chosen import Chosen, say
from benchmarks.gpu.contact.models import LLAMA_8B, TINY, Llama, Shape, batch, llama, on_device
from benchmarks.gpu.contact.results import Result, Results
from benchmarks.gpu.contact.training import Memory, step_of, timed
from tapestream.frontends.available import host_nbytes

_BYTES_A_PARAMETER = 16
_SHARE = 0.6
TOKENS = 4096
_ROUNDS = 3


def fsdp2(chosen: Chosen) -> Iterator[Result]:
    """FSDP2 first, then ours within the memory that it took; each in a process of its own."""
    if chosen.dry:
        yield Result("FSDP2", numbers={"skipped": "the simulated GPU has no NCCL"})
        return
    if chosen.part is None:
        _in_turn(chosen, 2)
    elif chosen.part[0] == 0:
        yield _measured("FSDP2", _fsdp2_model, chosen)
    else:
        yield from _beside(chosen)


def deepspeed(chosen: Chosen) -> Iterator[Result]:
    """The same with DeepSpeed."""
    if chosen.dry or importlib.util.find_spec("deepspeed") is None:
        yield Result("DeepSpeed", numbers={"skipped": "DeepSpeed is not installed"})
        return
    yield _measured("DeepSpeed", _deepspeed_model, chosen)


def shape_for(nbytes: int, chosen: Chosen) -> Shape:
    """Llama 8B's, with a small vocabulary and as many layers as ``nbytes`` hold."""
    shape = chosen.size(replace(LLAMA_8B, vocabulary=32_000), TINY)
    shape = replace(shape, dtype=torch.float32)
    outside = shape.parameters - shape.layers * shape.block_parameters
    layers = (int(_SHARE * nbytes) // _BYTES_A_PARAMETER - outside) // shape.block_parameters
    return replace(shape, layers=max(1, min(shape.layers, layers)))


def _in_turn(chosen: Chosen, parts: int) -> None:
    for part in range(parts):
        command = [sys.executable, *chosen.command, "--part", f"{part}/{parts}"]
        subprocess.run(command, cwd=ROOT, check=True)


def _measured(name: str, make: Callable[[Shape, Chosen], Callable[[], Tensor]], chosen: Chosen) -> Result:
    """Seconds of a peer's step, and what it takes of the card."""
    shape, memory = shape_for(host_nbytes(), chosen), Memory()
    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{file.name}", rank=0, world_size=1)
        step = make(shape, chosen)
        say(f"{name}: {shape.parameters / 1e9:.2f} billion parameters at home")
        first, _ = timed(step, 1, chosen)
        seconds, losses = timed(step, _ROUNDS, chosen)
        dist.destroy_process_group()
    numbers = {
        "step_seconds": median(seconds), "first_step_seconds": first[0], "tokens_per_second": TOKENS / median(seconds),
        "parameters": shape.parameters, "layers": shape.layers, "losses": losses, **memory.taken(),
    }  # fmt: skip
    return Result(name, numbers=numbers)


def _fsdp2_model(shape: Shape, chosen: Chosen) -> Callable[[], Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    model = on_device(llama(shape), "cpu")
    assert isinstance(model, Llama)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(chosen.device, (1,)), "offload_policy": CPUOffloadPolicy(pin_memory=True),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    }  # fmt: skip
    model.recompute = True
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    return step_of(model, optimizer, batch(shape.vocabulary, 1, TOKENS, chosen.device))


def _deepspeed_model(shape: Shape, chosen: Chosen) -> Callable[[], Tensor]:
    library, offloaded = import_module("deepspeed"), {"device": "cpu", "pin_memory": True}
    model = on_device(llama(shape), "cpu")
    assert isinstance(model, Llama)
    model.recompute = True
    config = {
        "train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "offload_param": offloaded, "offload_optimizer": offloaded},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }  # fmt: skip
    engine, *_ = library.initialize(model=model, config=config)
    data = batch(shape.vocabulary, 1, TOKENS, chosen.device)

    def step() -> Tensor:
        loss: Tensor = engine(*data)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _beside(chosen: Chosen) -> Iterator[Result]:
    """Ours within the bytes that the peer allocated, by the last line that it wrote."""
    [*_, theirs] = [line for line in Results(chosen.folder, "").read() if line["result"] == "FSDP2"]
    shape = replace(shape_for(host_nbytes(), chosen), layers=theirs["layers"])
    machine, memory = ts.measure_machine(chosen.device, quick=True), Memory()
    budget = ts.Budget(theirs["allocated_peak_bytes"], host=int(0.9 * host_nbytes()))
    model: nn.Module = ts.stream(
        llama(shape), device=chosen.device, budget=budget, home="host", machine=machine, loss_chunks="auto", head="head"
    )
    optimizer = ts.optimizer(model, torch.optim.AdamW, lr=1e-5, fused=True, update="backward")
    data = batch(shape.vocabulary, 1, TOKENS, chosen.device)

    def step() -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss: Tensor = model(*data)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first, _ = timed(step, 1, chosen)
    seconds, losses = timed(step, _ROUNDS, chosen)
    ratio = median(seconds) / theirs["step_seconds"]
    numbers = {
        "step_seconds": median(seconds), "first_step_seconds": first[0], "tokens_per_second": TOKENS / median(seconds),
        "over_fsdp2": ratio, "losses": losses, **memory.taken(),
    }  # fmt: skip
    good = ratio <= 1 and all(map(math.isfinite, losses))
    yield Result("ours beside FSDP2", "no slower, within its memory", good, numbers)
