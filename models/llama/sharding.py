"""How the weights of a `Llama` are split over the model axis of a mesh (`lpes_jax.mesh`).

Queries, keys, values, gate and up are split by their outputs, that is, by heads and channels; output and down by their inputs.
The rest (embedding, head, norms) is replicated on every device. Along the population axis every device has a copy.
"""

import math
from typing import Any

from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lpes_jax.errors import UserError
from lpes_jax.mesh import EVERYWHERE, divisors, put
from lpes_jax.models.llama.model import Llama

_BY_OUTPUT = ("query", "key", "value", "gate", "up")
_BY_INPUT = ("output", "down")


def weight_spec(path: tuple[Any, ...]) -> PartitionSpec:
    """How a leaf of `Llama` is split over the model axis, by its path, such as `("layers", "query_bias")`."""
    name = str(path[-1])
    if name in ("values", "scales"):  # of a weight in 8 bits, [L, O, I] and [L, O]
        by_output = str(path[-2]) in _BY_OUTPUT
        if name == "scales":
            return PartitionSpec(None, "model") if by_output else EVERYWHERE
        return PartitionSpec(None, "model") if by_output else PartitionSpec(None, None, "model")
    if name.removesuffix("_bias") in _BY_OUTPUT:
        return PartitionSpec(None, "model") if name.endswith("_bias") else PartitionSpec(None, None, "model")
    return PartitionSpec(None, "model") if name in _BY_INPUT else EVERYWHERE


def check_model_axis(mesh: Mesh, num_kv_heads: int, intermediate_size: int) -> None:
    """Raise UserError if a model of this shape cannot be split over the model axis."""
    both, model_axis = math.gcd(num_kv_heads, intermediate_size), mesh.shape["model"]
    if both % model_axis:
        raise UserError(
            f"--model-axis {model_axis}: does not divide the model's {num_kv_heads} key-value heads and its intermediate size "
            f"of {intermediate_size}; it can be {divisors(math.gcd(both, mesh.size))}"
        )


def put_model(model: Llama, mesh: Mesh) -> Llama:
    """Put the model on a mesh, without copying what is already there. Raises UserError if it cannot be split."""
    check_model_axis(mesh, model.config.num_kv_heads, model.config.intermediate_size)
    graph, state = nnx.split(model)
    leaves = [
        (path, leaf.replace(put(leaf[...], NamedSharding(mesh, weight_spec(path))))) for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))
