"""NumPy arrays become JAX's without a program.

From JAX 0.10 on, `jnp.asarray` of a NumPy array or of a list compiles a program that copies it, one for each shape. A third of
the programs of a search were such copies. A copy on the host has the same result. (This is not of JAX's public interface.)
"""

from typing import Any

import jax
import numpy as np
from jax._src import core
from jax._src.lax import lax


def _without_a_program(primitive: Any) -> None:
    compiled = primitive.impl

    def impl(value: Any, **parameters: Any) -> Any:
        weak = getattr(value, "weak_type", False) or parameters.get("weak_type")
        dtype = parameters.get("new_dtype", getattr(value, "dtype", None))
        kept = isinstance(value, np.ndarray) and value.dtype == dtype == jax.dtypes.canonicalize_dtype(value.dtype)
        if kept and not weak and parameters.get("sharding") is None:
            return jax.device_put(np.array(value, subok=False))  # a copy, which nobody else changes
        return compiled(value, **parameters)

    primitive.def_impl(impl)


if hasattr(core, "stage_p"):
    _without_a_program(core.stage_p)
    _without_a_program(lax.convert_element_type_p)
