"""The devices as a mesh, and arrays on it: the one place that spreads values over devices and fetches them.

Devices of all processes stand in a mesh of two axes: `population`, along which each device has individuals, or prompts, of its
own and says nothing to the others, and `model`, along which the devices share one copy of the weights (tensor parallelism).
With a model axis of 1, the default, every device has the whole model.

    mesh = make_mesh(model_axis=2)
    model = put_model(model, mesh)  # or at once: load(name, mesh=mesh)
    scores = jax.jit(over_population(score, mesh, in_specs, out_specs))(model, ...)
    values = to_host(scores)

Within `over_population` the population axis is manual and the model axis automatic: the partitioner sees how the weights are
split, and adds up what the devices of a model have. So every function of the model, and its gradient, is right with any mesh.
Attention alone is called on the heads of a device, by `over_heads`: cuDNN's kernel knows nothing of meshes.

Which weights the model axis splits is said beside the model, in `lpes_jax.models.llama.sharding`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lpes_jax.errors import UserError

Tree = TypeVar("Tree")

EVERYWHERE, BY_POPULATION = PartitionSpec(), PartitionSpec("population")


def make_mesh(model_axis: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """`devices` (None: all, also those of other processes), `model_axis` of them for a copy of the model.

    Raises UserError where that does not divide them.
    """
    devices = jax.devices() if devices is None else devices
    if model_axis < 1 or len(devices) % model_axis:
        raise UserError(
            f"--model-axis {model_axis}: does not divide the number of devices, {len(devices)}; "
            f"it can be {divisors(len(devices))}"
        )
    return Mesh(np.array(devices).reshape(-1, model_axis), ("population", "model"), axis_types=(AxisType.Auto,) * 2)


def mesh_of(model: nnx.Module) -> Mesh | None:
    """The mesh that a model's weights stand on. None where it is none of ours, and within transformations."""
    sharding = getattr(jax.tree.leaves(model)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None  # a tracer's is an abstract one
    return mesh if isinstance(mesh, Mesh) and mesh.axis_names == ("population", "model") else None


def over_population(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`function` on the part of its inputs that each place of the population axis has; see above. For use within `jax.jit`."""
    manual = {"population"} if mesh.shape["model"] > 1 else set(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)


def over_heads(function: Callable[..., Any], by_heads: Sequence[jax.Array], others: Sequence[Any] = ()) -> jax.Array:
    """`function(*by_heads, *others)`, each device with its own heads: the third axis of `by_heads` and of the result.

    All that the context's mesh has left to the partitioner becomes manual. Where that is nothing, a plain call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.empty or "model" not in free:
        return function(*by_heads, *others)
    heads = PartitionSpec(None, None, "model")
    specs = (*(heads for _ in by_heads), *(jax.tree.map(lambda _: EVERYWHERE, other) for other in others))
    return jax.shard_map(function, in_specs=specs, out_specs=heads, axis_names=free, check_vma=False)(*by_heads, *others)


def on_one_device(model: Any) -> Any:
    """The model on a device of this process, where each device of its mesh has all of it; else as it is."""
    mesh = mesh_of(model)
    if mesh is None or mesh.shape["model"] > 1:
        return model
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), model)


def put(tree: Tree, sharding: NamedSharding) -> Tree:
    """Values that every process has, on the devices of a sharding, which may be those of other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def leaf(value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(leaf, tree)


def to_host(tree: Any) -> Any:
    """NumPy copies of arrays that may be spread over several processes. All processes call it, in the same order."""
    leaves, structure = jax.tree.flatten(tree)
    spread = [
        at
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ]
    if spread:
        gathered = _gather(leaves[spread[0]].sharding.mesh)([leaves[at] for at in spread])
        for at, leaf in zip(spread, gathered, strict=True):
            leaves[at] = leaf
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


@cache
def _gather(mesh: Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, EVERYWHERE))


def least(value: int) -> int:
    """The least of the values that the processes give: what they must agree on. All call it, in the same order."""
    if jax.process_count() == 1:
        return value
    halves = multihost_utils.process_allgather(np.array([value], np.int64).view(np.uint32))  # JAX cuts an int64 to 32 bits
    return int(np.ascontiguousarray(halves).view(np.int64).min())


def divisors(number: int) -> str:
    """All of them, for a message."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
