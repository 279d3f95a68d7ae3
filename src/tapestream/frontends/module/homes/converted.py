"""Where the tensors of a model lie in saved files, be it under other names or in pieces, as Hugging Face models have
them."""

import copy
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tapestream.errors import InputError


@dataclass(frozen=True, slots=True)
class Origin:
    """One tensor of a model, ``name``, in the files: the one there is, or what ``converter`` of transformers makes of
    several (experts in one tensor) or of a part of one. ``keys``: per pattern of the converter, in its order."""

    name: str
    keys: Mapping[str, tuple[str, ...]]
    converter: Any = None
    first: str = ""  # of the tensors that the converter makes
    model: Any = None

    def read(self, found: Mapping[str, torch.Tensor], into: torch.Tensor) -> None:
        """Copy it from ``found``, by key, ``into`` its place."""
        if self.converter is None:
            into.copy_(found[self.all_keys[0]])
        elif not self._stack(found, into):
            cast = {key: found[key].to(into.dtype) for key in self.all_keys}
            into.copy_(_convert(self.converter, self.keys, self.first, self.model, cast)[self.name])

    @property
    def all_keys(self) -> tuple[str, ...]:
        """Names of all tensors of the files that it is made of."""
        return tuple(key for keys in self.keys.values() for key in keys)

    def _stack(self, found: Mapping[str, torch.Tensor], into: torch.Tensor) -> bool:
        """Where pieces are stacked, and stacks set side by side, copy each to its place: no second whole is made.
        Returns False for all other operations."""
        operations = self.converter.operations
        kinds = [type(operation).__name__ for operation in operations]
        if kinds not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return False
        stacked, parts = operations[0].dim, list[torch.Tensor]([into])
        if len(kinds) == 2:
            beside, sizes = operations[1].dim, []
            for keys in self.keys.values():
                shape = list(found[keys[0]].shape)
                shape.insert(stacked, len(keys))
                sizes.append(shape[beside])
            parts = list(torch.split(into, sizes, dim=beside))
        for part, keys in zip(parts, self.keys.values(), strict=True):
            for number, key in enumerate(keys):
                part.select(stacked, number).copy_(found[key])
        return True


def is_converted(model: nn.Module) -> bool:
    """Whether transformers loads ``model`` from files whose names may be others than its own."""
    library = sys.modules.get("transformers")
    if library is None or not isinstance(model, library.PreTrainedModel):
        return False
    return importlib.util.find_spec("transformers.conversion_mapping") is not None


def origins(model: nn.Module, found: Mapping[str, torch.Tensor]) -> tuple[dict[str, Origin], dict[str, torch.Tensor]]:
    """What the files' tensors ``found`` are in ``model``, by its names, and tensors on meta of the same shapes and
    dtypes; names that it does not have are there too.

    For Hugging Face models (from transformers 5 on) by the rules of ``from_pretrained``: the prefix of a base model,
    weights that were renamed, and those that are saved in other pieces. For others by the same names.

    Raises InputError where transformers cannot convert.
    """
    if not is_converted(model):
        return {key: Origin(key, {key: (key,)}) for key in found}, {key: t.to("meta") for key, t in found.items()}
    table: Any = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    loading: Any = importlib.import_module("transformers.core_model_loading")
    renamings = [one for one in table if not hasattr(one, "operations")]
    converters = [one for one in table if hasattr(one, "operations")]
    by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
    base, wanted = model.base_model_prefix, model.state_dict()
    gathered: dict[str, dict[str, list[str]]] = {}  # by name and pattern
    names: dict[str, str] = {}
    for key in sorted(found, key=loading.dot_natural_key):
        name, pattern = loading.rename_source_key(key, renamings, converters, base, wanted)
        if name not in wanted and key in wanted:
            name, pattern = loading.rename_source_key(key, [], [], base, wanted)
        if pattern is None:
            names.setdefault(name, key)
        else:
            gathered.setdefault(name, {}).setdefault(pattern, []).append(key)
    made = {name: Origin(name, {key: (key,)}) for name, key in names.items()}
    kinds = {name: found[key].to("meta") for name, key in names.items()}
    for first, patterns in gathered.items():
        converter = by_pattern[next(iter(patterns))]
        keys = {one: tuple(patterns[one]) for one in converter.source_patterns if one in patterns}
        meta = {key: found[key].to("meta") for part in keys.values() for key in part}
        for name, tensor in _convert(converter, keys, first, model, meta).items():
            made[name], kinds[name] = Origin(name, keys, converter, first, model), tensor
    return made, kinds


def ignored(model: nn.Module, name: str) -> bool:
    """Whether ``from_pretrained`` drops the tensor ``name`` of the files without a word."""
    if not is_converted(model):
        return False
    patterns = list(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    buffers = ("rotary_emb.inv_freq", "position_ids")  # that older models saved
    there = [one for one in buffers if any(name.endswith(one) for name, _ in model.named_buffers())]
    patterns += [rf"(^|\.){re.escape(one)}$" for one in there]
    return any(re.search(pattern, name) for pattern in patterns)


def _convert(
    converter: Any, keys: Mapping[str, tuple[str, ...]], first: str, model: Any, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """All tensors that ``converter`` makes of ``tensors``."""
    own = copy.deepcopy(converter)
    for pattern, members in keys.items():
        for key in members:
            own.add_tensor(first, key, pattern, tensors[key])
    try:
        made = own.convert(first, model=model, config=model.config)
    except Exception as error:
        raise InputError(
            f"transformers cannot make {first!r} of what the files have ({error!r}); make the model from the "
            "configuration that the weights were saved with"
        ) from error
    return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}
