"""Frozen dataclasses as pytrees that JAX may fill with whatever it likes.

`jax.tree_util.register_dataclass` rebuilds them through `__init__`, which checks shapes where jaxtyping is on; but JAX also
puts in what only describes an array (`jax.stages.ArgInfo`, shardings, axes of a vmap). So nothing is checked here, as JAX's
manual advises ("Custom pytrees and initialization").
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar

import jax

Class = TypeVar("Class", bound=type)


def pytree(*static: str) -> Callable[[Class], Class]:
    """Registers a dataclass, above `@dataclass`. Fields named `static` are part of its structure: hashable, compiled in."""

    def register(cls: Class) -> Class:
        leaves = [field.name for field in fields(cls) if field.name not in static]

        def flatten(it: Any) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
            keyed = [(jax.tree_util.GetAttrKey(name), getattr(it, name)) for name in leaves]
            return keyed, tuple(getattr(it, name) for name in static)

        def unflatten(of_static: tuple[Any, ...], of_leaves: Any) -> Any:
            it = object.__new__(cls)
            for name, value in zip([*static, *leaves], [*of_static, *of_leaves], strict=True):
                object.__setattr__(it, name, value)
            return it

        jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
        return cls

    return register
