"""Plans, and machines, as files: JSON, written beside the target and renamed, readable by its owner only."""

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tapestream.costs import BlockCost, Carried, Link, Machine, Profile, StageCost, UniformStages
from tapestream.costs.checks import duration
from tapestream.errors import InputError, StorageError, TapestreamError
from tapestream.ir import Schedule, Tier
from tapestream.ir.text import dumps, loads

_MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What Python raises where a document is not of the shape that it should be."""


def write(path: str | os.PathLike[str], document: Mapping[str, object], what: str = "plan") -> None:
    """Write ``document``, a ``what``; an existing file is replaced at once or, with StorageError, left alone."""
    target = Path(path)
    try:
        # A temporary file of this kind has mode 0600, and renaming keeps it.
        handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"format": _format(what), **document}, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        except BaseException:
            os.unlink(beside)
            raise
    except OSError as error:
        raise StorageError(f"cannot write the {what} to {target}: {error}; choose a folder that exists") from error


@contextlib.contextmanager
def reading(path: str | os.PathLike[str], what: str = "plan") -> Iterator[Any]:
    """The document in ``path``; whatever goes wrong with it inside the ``with`` becomes InputError."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read a {what} from {path}: {error}") from error
    try:
        document = json.loads(text, parse_int=_counted, parse_constant=_refused)
        if document.get("format") != _format(what):
            raise InputError(f"its format is {document.get('format')!r}, not {_format(what)!r}")
        yield document
    except (TapestreamError, *_MALFORMED) as error:
        raise InputError(f"{path} is damaged or no {what} of this version ({error}); make and save it again") from error


def _counted(digits: str) -> int:
    """A whole number that a count of bytes or stages may be: with more digits, no one could be told of it."""
    number = int(digits)
    if abs(number) >= 2**63:
        raise InputError(f"a number of {len(digits)} digits is no count of anything")
    return number


def _refused(constant: str) -> float:
    raise InputError(f"{constant} is no number")


def _format(what: str) -> str:
    return f"tapestream {what} 1"


def schedule_to_json(schedule: Schedule) -> str:
    """The schedule's text form."""
    return dumps(schedule)


def schedule_from_json(text: str) -> Schedule:
    """The schedule from its text form."""
    return loads(text)


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """Every field by name; equal stages once, with their count."""
    stages = profile.stages
    uniform = isinstance(stages, UniformStages)
    costs = (stages.cost,) if isinstance(stages, UniformStages) else stages
    return {
        "stages": [asdict(cost) for cost in costs],
        "count": len(stages) if uniform else None,
        "blocks": [asdict(block) for block in profile.blocks],
        "carried": [asdict(storage) for storage in profile.carried],
        "ends": profile.ends,
        **{name: getattr(profile, name) for name in _PROFILE_NUMBERS},
    }


_PROFILE_NUMBERS = ("initial_nbytes", "outside_nbytes", "turn_nbytes", "turn_seconds", "shards")


def profile_from_json(found: Mapping[str, Any]) -> Profile:
    """The inverse of `profile_to_json`."""
    costs = tuple(StageCost(**cost) for cost in found["stages"])
    return Profile(
        costs if found["count"] is None else UniformStages(costs[0], found["count"]),
        blocks=tuple(BlockCost(**block) for block in found["blocks"]),
        carried=tuple(Carried(**storage) for storage in found["carried"]),
        ends=found.get("ends", ()),
        **{name: found[name] for name in _PROFILE_NUMBERS if name in found},
    )


def alternatives_from_json(found: Any) -> tuple[tuple[str, float | None, str], ...]:
    """The planners that were tried: name, seconds of a step (None: it does not fit), and why."""
    for _, seconds, _ in found:
        if seconds is not None:
            duration("Plan", "seconds of an alternative", seconds)
    return tuple((str(name), seconds, str(reason)) for name, seconds, reason in found)


def machine_to_json(machine: Machine | None) -> dict[str, Any] | None:
    """Links as a list, since their keys are pairs."""
    if machine is None:
        return None
    links = [[source.name, target.name, asdict(link)] for (source, target), link in machine.links.items()]
    peers = None if machine.peers is None else asdict(machine.peers)
    return {"links": links, "peers": peers, **{name: getattr(machine, name) for name in ("name", *_RATES)}}


_RATES = ("flops_per_second", "memory_bytes_per_second", "launch_seconds", "host_updates_per_second")


def machine_from_json(found: Mapping[str, Any] | None) -> Machine | None:
    """The inverse of `machine_to_json`."""
    if found is None:
        return None
    links = {(Tier[source], Tier[target]): Link(**link) for source, target, link in found["links"]}
    peers = None if found.get("peers") is None else Link(**found["peers"])
    return Machine(links, name=found["name"], peers=peers, **{name: found.get(name) for name in _RATES})
