"""Packages whose names are imported when they are first asked for: what is not used takes no time."""

import importlib
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def offer(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of ``package``. ``homes``: the module of each name that it offers, which may be
    that of a submodule, too."""
    module = sys.modules[package]

    class Package(ModuleType):
        """A package in which Python cannot put a submodule in the place of what has its name."""

        def __setattr__(self, name: str, value: Any) -> None:
            if not (isinstance(value, ModuleType) and name in homes):
                super().__setattr__(name, value)

        def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
            """As of a plain module, which cloudpickle takes by its name."""
            return importlib.import_module, (self.__name__,)

    module.__class__ = Package

    def attribute(name: str) -> Any:
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
            setattr(module, name, found)
            return found
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute, lambda: sorted({*vars(module), *homes})
