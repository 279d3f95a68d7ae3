"""Where blocks are updated, as the command is asked and as it answers."""

from collections.abc import Mapping
from dataclasses import replace

from tapestream.errors import BudgetError, InputError
from tapestream.frontends.outlines.answer import Answer
from tapestream.frontends.outlines.question import Question
from tapestream.ir.actions import Tier
from tapestream.planning.where import Where
from tapestream.units import format_seconds


def asked_where(option: str | None) -> Where:
    """What ``--where`` means; auto: no kernels of the CPU were measured to give the bits of the device's yet."""
    return "host" if option == "host" else "mixed" if option == "mixed" else "device"


def seconds_where(question: Question, found: Answer) -> dict[str, float | None]:
    """Of a step with updates there (``found``), with all on the device, and with all in RAM; None: does not fit."""
    seconds: dict[str, float | None] = {question.where: found.seconds}
    others: tuple[Where, ...] = ("device", "host")
    for other in others:
        if other != question.where:
            try:
                seconds[other] = replace(question, where=other).plan().seconds
            except (BudgetError, InputError):
                seconds[other] = None
    return seconds


def updates_where(question: Question, seconds: Mapping[str, float | None], on_device: int, in_ram: int) -> str:
    """Where blocks are updated, so many ``on_device``, and what other ways take."""
    told = {where: "does not fit" if took is None else format_seconds(took) for where, took in seconds.items()}
    bits = "with the bits of torch's optimizer on the CPU"
    match question.where:
        case "host":
            return f"in RAM, {bits}; on the device a step: {told['device']}"
        case "mixed":
            others = f"all on the device a step: {told['device']}, all in RAM: {told['host']}"
            return f"of {on_device} blocks on the device, of {in_ram} in RAM, {bits}; {others}"
        case _:
            return f"on the device; in RAM (--where host, {bits[5:]}) a step: {told['host']}"


def blocks_updated(found: Answer) -> dict[str, int]:
    """How many blocks are updated on the device, and in RAM below it."""
    tiers = {"device": Tier.DEVICE, "host": Tier.HOST}
    return {
        name: sum(len(plan.simulation.updated.get(tier, ())) for plan in found.plans) for name, tier in tiers.items()
    }
