"""Names of a package that are imported when they are first used.

A package's `__init__` lists the modules of its names twice: for the type checker, and for Python, which imports a module when
one of its names is first used (PEP 562). Therefore `python -m lpes_jax.VERB --help` runs that `__init__` without importing JAX.

    if TYPE_CHECKING:
        from lpes_jax.search.run import run_search
    else:
        __getattr__, __dir__ = lazy.names(__name__, {"run_search": "lpes_jax.search.run"})
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package. `modules` maps each of its names to the module that defines it."""

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)  # later uses do not call this function
        return value

    def names_of_package() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names_of_package
