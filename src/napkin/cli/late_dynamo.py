"""torch._dynamo is loaded when something is compiled, not when a step is counted.

It takes a second of a start: with it come sympy, FSDP and a part of Inductor. torch also imports it for trifles:
FakeTensorMode reads two of its settings, and optimizers, checkpointing and dispatch modes mark functions that it must
not compile, which needs no dynamo until something is compiled. A placeholder module answers these, and becomes the real
one at anything else.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "torch._dynamo"
_FIRST = f"{NAME}.config"
"""The settings of torch._dynamo, which import nothing else of it."""


def load_late() -> None:
    """Make `import torch._dynamo` give the placeholder, unless the real module is loaded already."""
    if NAME not in sys.modules and not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds the module in its place and, for any part of the real one but its settings, the real one first."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if fullname == NAME:
            real = PathFinder.find_spec(fullname, path)
            return real and ModuleSpec(fullname, _InItsPlace(real), origin=real.origin, is_package=True)
        if not fullname.startswith(f"{NAME}.") or fullname == _FIRST:
            return None
        real = load_real()
        if fullname not in sys.modules:
            return PathFinder.find_spec(fullname, real.__path__)
        module = sys.modules[fullname]
        spec = ModuleSpec(fullname, _Loaded(module))
        # importlib takes the spec of a module that was loaded meanwhile, and would load it again by its own.
        module.__spec__ = spec
        return spec


def load_real() -> ModuleType:
    """torch._dynamo itself, which it is from now on for everyone."""
    standing_in = sys.modules.get(NAME)
    sys.meta_path[:] = [each for each in sys.meta_path if not isinstance(each, _Finder)]
    if isinstance(standing_in, _Module):
        del sys.modules[NAME]
        package, _, name = NAME.rpartition(".")
        vars(sys.modules[package]).pop(name, None)
    return importlib.import_module(NAME)


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(load_real(), name)


class _InItsPlace(Loader):
    """Makes the placeholder module."""

    def __init__(self, real: ModuleSpec) -> None:
        self.real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        spec.submodule_search_locations = self.real.submodule_search_locations
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["disable"] = _disable


class _Loaded(Loader):
    """Gives a module that was loaded meanwhile, as a part of the real one."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec


def _disable(fn: Callable[..., Any] | None = None, recursive: bool = True, **how: Any) -> Any:
    """The function itself until something can be compiled; from then on, what torch._dynamo.disable makes of it."""
    if fn is None or not callable(fn) or isinstance(fn, type):
        return load_real().disable(fn, recursive, **how)
    disabled: list[Callable[..., Any]] = []

    @wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            if isinstance(sys.modules.get(NAME), _Module):
                return fn(*args, **kwargs)
            disabled.append(load_real().disable(fn, recursive, **how))
        return disabled[0](*args, **kwargs)

    return call
