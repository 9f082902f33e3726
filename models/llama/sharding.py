"""How the weights of a `Llama` are split over the model axis of a mesh (`lpes_jax.mesh`).

Queries, keys, values, gate and up are split by their outputs, that is, by heads and channels; output and down by their inputs.
Packed matrices are split in the same way; those split by inputs need as many whole blocks on each device.
The rest (embedding, head, norms) is replicated on every device. Along the population axis every device has a copy.
"""

import math
from typing import Any

from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lpes_jax.errors import UserError
from lpes_jax.mesh import EVERYWHERE, divisors, put
from lpes_jax.models.llama.model import Llama
from lpes_jax.models.llama.packed import Packed

_BY_OUTPUT = ("query", "key", "value", "gate", "up")
_BY_INPUT = ("output", "down")


def weight_spec(path: tuple[Any, ...]) -> PartitionSpec:
    """How a leaf of `Llama` is split over the model axis, by its path, such as `("layers", "query_bias")`."""
    if path[0] == "layers" and len(path) == 3:
        return _part_spec(*path[1:])
    name = str(path[-1])
    if name.removesuffix("_bias") in _BY_OUTPUT:
        return PartitionSpec(None, "model") if name.endswith("_bias") else PartitionSpec(None, None, "model")
    return PartitionSpec(None, "model") if name in _BY_INPUT else EVERYWHERE


def _part_spec(name: str, part: str) -> PartitionSpec:
    """How a part of a matrix in 8 bits or packed is split: numbers of each weight or block [L, O, n], or of rows or inputs."""
    if part == "offset":
        return EVERYWHERE
    if part in ("scales", "row_gains"):
        return PartitionSpec(None, "model") if name in _BY_OUTPUT else EVERYWHERE
    if part == "input_gains":
        return PartitionSpec(None, "model") if name in _BY_INPUT else EVERYWHERE
    return PartitionSpec(None, "model") if name in _BY_OUTPUT else PartitionSpec(None, None, "model")


def check_model_axis(mesh: Mesh, num_kv_heads: int, intermediate_size: int) -> None:
    """Raise UserError if a model of this shape cannot be split over the model axis."""
    both, model_axis = math.gcd(num_kv_heads, intermediate_size), mesh.shape["model"]
    if both % model_axis:
        raise UserError(
            f"--model-axis {model_axis}: does not divide the model's {num_kv_heads} key-value heads and its intermediate size "
            f"of {intermediate_size}; it can be {divisors(math.gcd(both, mesh.size))}"
        )


def check_blocks(mesh: Mesh, name: str, inputs: int, group: int) -> None:
    """Raise UserError if the model axis would cut blocks of a packed matrix that is split by its inputs."""
    groups, model_axis = inputs // group, mesh.shape["model"]
    if name in _BY_INPUT and groups % model_axis:
        raise UserError(
            f"--model-axis {model_axis}: does not divide the {groups} blocks of {group} packed weights in a row of {name!r}; "
            "use --weight-format full"
        )


def put_model(model: Llama, mesh: Mesh) -> Llama:
    """Put the model on a mesh, without copying what is already there. Raises UserError if it cannot be split."""
    check_model_axis(mesh, model.config.num_kv_heads, model.config.intermediate_size)
    for name in _BY_INPUT:
        if isinstance(weights := getattr(model.layers, name), Packed):
            check_blocks(mesh, name, weights.inputs, weights.inputs // weights.scale.shape[-1])
    graph, state = nnx.split(model)
    leaves = [
        (path, leaf.replace(put(leaf[...], NamedSharding(mesh, weight_spec(path))))) for path, leaf in nnx.to_flat_state(state)
    ]
    return nnx.merge(graph, nnx.from_flat_state(leaves))
