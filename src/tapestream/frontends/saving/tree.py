"""State dictionaries as JSON and tensors: `pack` takes a tree apart, `unpack` puts it together again."""

import base64
import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy
import torch
from torch.nn.parameter import is_lazy

from tapestream.errors import InputError
from tapestream.optim.shown import StateInParts
from tapestream.storage.tensor_files import RESERVED

Json: TypeAlias = Any
_TAG = "$"  # the key that marks an object which stands for something JSON lacks
_DEEPEST = 100  # as deep as is sure to be read again, within what Python allows of recursion
_LONGEST = 4096  # bits of a number that is written in decimal, which Python refuses to read beyond 4300 digits


def pack(tree: Any, where: str) -> tuple[Json, dict[str, torch.Tensor]]:
    """JSON for ``tree``, and its tensors by name (their path within it); a tensor that appears twice is listed once.

    Dictionaries keep their order and their keys' types. Dictionaries, ordered ones (with the ``_metadata`` that a
    module's ``state_dict()`` has), lists, tuples, sets, sizes, bytes, integers, floats, strings, dtypes, devices,
    tensors, NumPy arrays and numbers come back as they were; what is of a class that builds on one of these, as that
    one. Raises InputError, which names the place below ``where``, for anything else.
    """
    packer = _Packer(where)
    return packer.pack(tree, ()), packer.tensors


class _Packer:
    def __init__(self, where: str) -> None:
        self._where = where
        self._names: dict[object, str] = {}  # by what tells that two tensors are the same bytes
        self.tensors: dict[str, torch.Tensor] = {}

    def pack(self, node: Any, path: tuple[Any, ...]) -> Json:
        if len(path) > _DEEPEST:
            raise InputError(
                f"{self._where}{''.join(f'[{key!r}]' for key in path[:3])}... is nested more than {_DEEPEST} deep, or "
                "holds itself; keep it out of the state_dict, or make it flat"
            )
        match node:
            case numpy.generic() if node.dtype.kind in "biufc":
                return _tagged("number", [node.dtype.str, base64.b64encode(node.tobytes()).decode()])
            case numpy.ndarray() if (array := _as_tensor(node)) is not None:
                return _tagged("array", self.pack(array, path), scalar=False)
            case None | bool() | str():
                return node
            case int():
                return node if node.bit_length() <= _LONGEST else _tagged("int", hex(node))
            case float():
                return node if math.isfinite(node) else _tagged("float", repr(float(node)))
            case bytes():
                return _tagged("bytes", base64.b64encode(node).decode())
            case OrderedDict():
                return _tagged("ordered", self._items(node, path), **self._metadata(node, path))
            case dict() if _TAG not in node and all(type(key) is str for key in node):
                return {key: self.pack(value, (*path, key)) for key, value in node.items()}
            case dict():
                return _tagged("dict", self._items(node, path))
            case list():
                return [self.pack(value, (*path, i)) for i, value in enumerate(node)]
            case tuple() | set() | frozenset():
                kind = next(name for name, cls in _SEQUENCES.items() if isinstance(node, cls))
                return _tagged(kind, [self.pack(value, (*path, i)) for i, value in enumerate(node)])
            case torch.Tensor():
                return _tagged("tensor", self._named(node, path), **_extra(node))
            case torch.dtype() | torch.device():
                return _tagged(type(node).__name__, str(node))
        kind = f"{type(node).__module__}.{type(node).__qualname__}"
        if isinstance(node, numpy.ndarray):
            kind += f" of dtype {node.dtype.str}"
        raise InputError(
            f"{self._place(path)} is a {kind}, which cannot be saved without pickle: keep it out of the state_dict, or "
            "make it tensors, numbers, strings and containers of them"
        )

    def _place(self, path: tuple[Any, ...]) -> str:
        return ".".join(map(str, (self._where, *path)))

    def _items(self, node: dict[Any, Any], path: tuple[Any, ...]) -> Json:
        return [[self.pack(key, (*path, "key")), self.pack(value, (*path, key))] for key, value in node.items()]

    def _metadata(self, node: OrderedDict[Any, Any], path: tuple[Any, ...]) -> dict[str, Json]:
        found = vars(node).get("_metadata")  # the versions of modules, which some read older states by
        return {} if found is None else {"metadata": self.pack(found, (*path, "_metadata"))}

    def _named(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        if isinstance(tensor, StateInParts) and tensor.pieces:
            known = "in parts", id(tensor)
            return self._names[known] if known in self._names else self._add(known, tensor, path)
        if is_lazy(tensor):
            raise InputError(f"{self._place(path)} has no shape yet; call the module once, then save it")
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_quantized:
            raise InputError(
                f"{self._place(path)} is a {type(tensor).__name__} of layout {tensor.layout} and dtype {tensor.dtype}; "
                "only dense tensors can be saved: convert it first"
            )
        if tensor.is_meta:
            raise InputError(f"{self._place(path)} is on the meta device, without values; give it some, then save it")
        tensor = tensor.resolve_conj().resolve_neg()  # whose bytes are not those of the tensor that they are views of
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        key: object = len(self.tensors)
        if tensor.numel():
            key = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        return self._names[key] if key in self._names else self._add(key, tensor, path)

    def _add(self, key: object, tensor: torch.Tensor, path: tuple[Any, ...]) -> str:
        name = ".".join(map(str, path)) or "value"
        while name in self.tensors or name == RESERVED:
            name += "_"
        self._names[key], self.tensors[name] = name, tensor
        return name


def unpack(node: Json, tensor_of: Callable[[str], torch.Tensor]) -> Any:
    """The tree that `pack` took apart. Raises ValueError, or another of `MALFORMED`, for what it does not make."""
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
        case "int":
            return int(value, 16)
        case "dict":
            return {unpack(k, tensor_of): unpack(v, tensor_of) for k, v in value}
        case "ordered":
            made = OrderedDict((unpack(k, tensor_of), unpack(v, tensor_of)) for k, v in value)
            if "metadata" in node:
                made._metadata = _versions(unpack(node["metadata"], tensor_of))  # type: ignore[attr-defined]
            return made
        case "Size" | "tuple" | "set" | "frozenset":
            return _SEQUENCES[kind]([unpack(one, tensor_of) for one in value])
        case "tensor":
            tensor = tensor_of(value)
            return torch.view_as_complex(tensor) if node.get("complex") else tensor
        case "number":
            return numpy.frombuffer(base64.b64decode(value[1]), value[0])[0]
        case "array":
            array = unpack(value, tensor_of).numpy().copy()
            return array[()] if node["scalar"] else array
        case "dtype":
            return _dtype(value)
        case "device":
            return torch.device(value)
    raise ValueError(f"{kind!r} is not something that a save holds")


def _versions(found: Any) -> Any:
    """By module, as PyTorch reads them."""
    if not all(isinstance(one, dict) for one in (found, *found.values())):
        raise ValueError(f"{found!r} are no versions of modules")
    return found


MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What Python and PyTorch raise where a state is not of the shape that it should be."""
_SEQUENCES: dict[str, type[Any]] = {"Size": torch.Size, "tuple": tuple, "set": set, "frozenset": frozenset}


def _tagged(kind: str, value: Json, **more: Json) -> Json:
    return {_TAG: kind, "value": value, **more}


def _extra(tensor: torch.Tensor) -> dict[str, Json]:
    return {"complex": True} if tensor.is_complex() else {}


def _dtype(text: str) -> torch.dtype:
    found = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{text!r} is not a dtype of this PyTorch")
    return found


def _as_tensor(found: Any) -> torch.Tensor | None:
    """A NumPy array as a tensor; None where PyTorch has no such dtype, or would drop a mask."""
    if isinstance(found, numpy.ma.MaskedArray):
        return None
    try:
        return torch.from_numpy(numpy.array(found))
    except (TypeError, ValueError):
        return None
