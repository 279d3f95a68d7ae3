"""One run of the demo in a process of its own: ``python -m tapestream.cli.demo_child ROLE JOB ALLOWANCE COMPARED``.

Says what happens as lines of JSON on standard output. Roles: ``stream`` and ``plain`` under a hard limit,
``reference`` (plain without one). The limit is what the process takes after a small training run has imported, started
and allocated what any run needs, plus the budget, plus a stated allowance.
"""

import hashlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

import tapestream as ts
from tapestream.accelerator import memory
from tapestream.cli.data import text_of
from tapestream.cli.loop import Job, Measured, optimizer_class, options_of, run, set_rate, streamed
from tapestream.models import GPT, Batches, GPTConfig
from tapestream.system.limits import data_nbytes, limit_data
from tapestream.units import parse_nbytes


def main(role: str, job: Job, allowance: int, compared: int) -> None:
    """``allowance``: bytes beside the budget (0: no limit). ``compared``: steps after which parameters are digested."""
    text = text_of(job.data)
    _warm(job, text)
    if allowance:
        say("limited", **limit_to(job, allowance))
    try:
        if role == "stream":
            _stream(job, text, compared)
        else:
            _plain(job, text, compared)
    except (RuntimeError, MemoryError) as error:
        if role == "stream" or not _is_out_of_memory(error):
            raise
        say("out of memory", error=next(iter(str(error).splitlines()), "") or type(error).__name__)


def say(kind: str, **fields: Any) -> None:
    """One line to the parent."""
    print(json.dumps({"kind": kind, **fields}), flush=True)


def limit_to(job: Job, allowance: int) -> dict[str, int]:
    """Forbid this process to take more than it has plus the budget plus ``allowance``."""
    budget = parse_nbytes(job.budget or 0)
    if job.device == "cuda":
        device = torch.device("cuda", 0)
        memory.empty_cache(device)
        taken = memory.reserved_nbytes(device)
        memory.limit_reserved(taken + budget + allowance, device)
    else:
        taken = data_nbytes()
        limit_data(taken + budget + allowance)
    return {"taken": taken, "budget": budget, "allowance": allowance, "limit": taken + budget + allowance}


def _warm(job: Job, text: Tensor) -> None:
    """The same for every role, so that limits compare."""
    small = job.small()
    data = Batches(text, small.batch, small.sequence)
    for _ in run(small, *streamed(small, lambda what, done, total: None), data, Measured()):
        pass
    for _ in _plain_steps(small, text):
        pass
    # Kernels of the real shapes start the threads that the small ones do not need.
    x = torch.randn(job.batch * job.sequence, _shape(job).width, device=job.device)
    torch.nn.functional.gelu(x @ torch.randn(_shape(job).width, 256, device=job.device)).sum().item()


def _stream(job: Job, text: Tensor, compared: int) -> None:
    model, optimizer = streamed(job, lambda what, done, total: say("progress", what=what, done=done, total=total))
    measured = Measured()
    losses = []
    for record in run(job, model, optimizer, Batches(text, job.batch, job.sequence), measured):
        losses.append(record.loss.hex())
        say("step", **asdict(record))
        if record.step + 1 == compared:
            say("digest", losses=losses, digests=digests(model))
    plan = ts.report(model).plan
    timeline = plan.simulation.timeline
    say(
        "end",
        plan=str(plan),
        simulated_peak=plan.peak_nbytes,
        simulated=[list(sample) for sample in timeline.memory[ts.Tier.DEVICE]],
        simulated_phases={phase.value: seconds for phase, seconds in plan.simulation.phase_seconds.items()},
        measured={**asdict(measured)},
    )


def _plain(job: Job, text: Tensor, compared: int) -> None:
    losses: list[str] = []
    model = None
    for model, loss in _plain_steps(job, text):
        losses.append(loss.hex())
        say("plain step", loss=loss, step=len(losses))
        if len(losses) == compared:
            say("digest", losses=losses, digests=digests(model))
            return


def _plain_steps(job: Job, text: Tensor) -> Iterator[tuple[GPT, float]]:
    with torch.device(job.device):
        model = GPT(_shape(job))
    optimizer = optimizer_class(job.optimizer)(model.parameters(), **options_of(job))
    for step, (tokens, targets) in zip(range(job.steps), Batches(text, job.batch, job.sequence), strict=False):
        set_rate(optimizer, job.rate_at(step))
        loss = model(tokens.to(job.device), targets.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield model, float(loss.detach())


def _shape(job: Job) -> GPTConfig:
    assert isinstance(job.config, GPTConfig)
    return job.config


def digests(model: nn.Module) -> dict[str, str]:
    """A digest of every parameter's bits."""
    return {
        name: hashlib.sha256(p.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, p in model.named_parameters()
    }


def _is_out_of_memory(error: BaseException) -> bool:
    words = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "memory" in words or "alloc" in words


if __name__ == "__main__":
    main(sys.argv[1], Job.from_json(json.loads(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]))
