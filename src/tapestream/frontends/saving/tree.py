"""State dictionaries as JSON and tensors: `pack` takes a tree apart, `unpack` puts it together again."""

import base64
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import torch

from tapestream.errors import InputError
from tapestream.optim.shown import StateInParts

Json: TypeAlias = Any
_TAG = "$"  # the key that marks an object which stands for something JSON lacks


def pack(tree: Any, where: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """JSON for ``tree``, and its tensors by name (their path within it); a tensor that appears twice is listed once.

    Dictionaries keep their order and their keys' types; floats, bytes, tuples, sets, dtypes, NumPy arrays and numbers
    come back as they were. Raises InputError, which names the place below ``where``, for anything else.
    """
    packer = _Packer(where)
    return packer.pack(tree, ()), packer.tensors


class _Packer:
    def __init__(self, where: str) -> None:
        self._where = where
        self._names: dict[object, str] = {}  # by what tells that two tensors are the same bytes
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, node: Any, path: tuple[Any, ...]) -> Json:
        match node:
            case None | bool() | int() | str():
                return node
            case float():
                return node if math.isfinite(node) else _tagged("float", repr(node))
            case bytes():
                return _tagged("bytes", base64.b64encode(node).decode())
            case dict() if _TAG not in node and all(type(key) is str for key in node):
                return {key: self.pack(value, (*path, key)) for key, value in node.items()}
            case dict():
                return _tagged("dict", [[self.pack(k, path), self.pack(v, (*path, k))] for k, v in node.items()])
            case list():
                return [self.pack(value, (*path, i)) for i, value in enumerate(node)]
            case tuple() | set() | frozenset():
                kind = next(name for name, cls in _SEQUENCES.items() if isinstance(node, cls))
                return _tagged(kind, [self.pack(value, (*path, i)) for i, value in enumerate(node)])
            case torch.Tensor():
                return _tagged("tensor", self._named(node, path), **_extra(node))
            case numpy.ndarray() | numpy.generic() if node.dtype.kind in "biufc":
                array = torch.from_numpy(numpy.array(node))
                return _tagged("array", self.pack(array, path), scalar=isinstance(node, numpy.generic))
            case torch.dtype() | torch.device():
                return _tagged(type(node).__name__, str(node))
        raise InputError(
            f"{'.'.join(map(str, (self._where, *path)))} is a {type(node).__module__}.{type(node).__qualname__}, which "
            "cannot be saved without pickle: keep it out of the state_dict, or make it tensors, numbers, strings and "
            "containers of them"
        )

    def _named(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        if isinstance(tensor, StateInParts) and tensor.pieces:
            return self._add(object(), tensor, path)
        tensor = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            raise InputError(
                f"{'.'.join(map(str, (self._where, *path)))} is a {type(tensor).__name__} of layout {tensor.layout}; "
                "only dense tensors can be saved: convert it first"
            )
        key: object = len(self.tensors)
        if tensor.numel() and not tensor.is_meta:
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return self._names[key] if key in self._names else self._add(key, tensor, path)

    def _add(self, key: object, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = ".".join(map(str, path)) or "value"
        while name in self.tensors:
            name += "_"
        self._names[key], self.tensors[name] = name, tensor
        return name


def unpack(node: Json, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The tree that `pack` took apart. Raises InputError for what it does not make."""
    if isinstance(node, list):
        return [unpack(value, tensor_of) for value in node]
    if not isinstance(node, dict):
        return node
    if _TAG not in node:
        return {key: unpack(value, tensor_of) for key, value in node.items()}
    kind, value = node[_TAG], node["value"]
    match kind:
        case "float":
            return float(value)
        case "bytes":
            return base64.b64decode(value)
        case "dict":
            return {unpack(k, tensor_of): unpack(v, tensor_of) for k, v in value}
        case "tuple" | "set" | "frozenset":
            return _SEQUENCES[kind](unpack(one, tensor_of) for one in value)
        case "tensor":
            tensor = tensor_of(value)
            return torch.view_as_complex(tensor) if node.get("complex") else tensor
        case "array":
            array = unpack(value, tensor_of).numpy().copy()
            return array[()] if node["scalar"] else array
        case "dtype":
            return _dtype(value)
        case "device":
            return torch.device(value)
    raise InputError(f"{kind!r} is not something that a save holds; it was made by a newer tapestream, or damaged")


_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def _tagged(kind: str, value: Json, **more: Json) -> Json:
    return {_TAG: kind, "value": value, **more}


def _extra(tensor: torch.Tensor) -> dict[str, Json]:
    return {"complex": True} if tensor.is_complex() else {}


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise InputError(f"{text!r} is not a dtype of this PyTorch")
    return found
