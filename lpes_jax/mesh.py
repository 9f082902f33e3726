"""The device mesh, and arrays on it: the only module that distributes values over devices and collects them.

The devices of all processes form a mesh of two axes. Along `population`, devices hold different individuals or prompts and do
not communicate. Along `model`, devices share one copy of the weights (tensor parallelism). With a model axis of 1, the default,
each device has the whole model.

    mesh = make_mesh(model_axis=2)
    model = put_model(model, mesh)  # or in one step: load(name, mesh=mesh)
    scores = jax.jit(over_population(score, mesh, in_specs, out_specs))(model, ...)
    values = to_host(scores)

Inside `over_population` the population axis is manual and the model axis automatic: the partitioner sees how the weights are
split and inserts the reductions. Every function of the model, and its gradient, is therefore correct on any mesh. Only
attention is mapped by hand over the heads of a device, in `over_heads`: cuDNN's kernel does not support meshes.

`lpes_jax.models.llama.sharding` says which weights the model axis splits.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lpes_jax import process
from lpes_jax.errors import UserError

Tree = TypeVar("Tree")

EVERYWHERE, BY_POPULATION = PartitionSpec(), PartitionSpec("population")


def make_mesh(model_axis: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `devices` (None: all, including those of other processes), with `model_axis` devices per copy of the model.

    Raises UserError if `model_axis` does not divide the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if model_axis < 1 or len(devices) % model_axis:
        raise UserError(
            f"--model-axis {model_axis}: does not divide the number of devices, {len(devices)}; "
            f"it can be {divisors(len(devices))}"
        )
    return Mesh(np.array(devices).reshape(-1, model_axis), ("population", "model"), axis_types=(AxisType.Auto,) * 2)


def mesh_of(model: nnx.Module) -> Mesh | None:
    """The mesh of a model's weights. None if it is not one of ours, and inside transformations."""
    sharding = getattr(jax.tree.leaves(model)[0], "sharding", None)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None  # a tracer's is an abstract one
    return mesh if isinstance(mesh, Mesh) and mesh.axis_names == ("population", "model") else None


def over_population(function: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Map `function` over the shards of the population axis (see above). For use inside `jax.jit`.

    All operands, and the constants in `function`, must have elements: on GPUs, XLA's Shardy pass ends in a segmentation fault
    otherwise (jax 0.11.2, `experiments/shardy_crash.py`). `x.at[0:n].set(y)` of a whole axis has such a constant, its indices.
    """
    manual = {"population"} if mesh.shape["model"] > 1 else set(mesh.axis_names)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=manual, check_vma=False)


def over_heads(function: Callable[..., Any], by_heads: Sequence[jax.Array], others: Sequence[Any] = ()) -> jax.Array:
    """`function(*by_heads, *others)`, on each device with its own heads: the third axis of `by_heads` and of the result.

    Makes all automatic axes of the context's mesh manual. Without automatic axes this is a plain call.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    if mesh.empty or "model" not in free:
        return function(*by_heads, *others)
    heads = PartitionSpec(None, None, "model")
    specs = (*(heads for _ in by_heads), *(jax.tree.map(lambda _: EVERYWHERE, other) for other in others))
    return jax.shard_map(function, in_specs=specs, out_specs=heads, axis_names=free, check_vma=False)(*by_heads, *others)


def on_one_device(model: Any) -> Any:
    """The model on one device of this process if every device holds all of it; otherwise the model unchanged."""
    mesh = mesh_of(model)
    if mesh is None or mesh.shape["model"] > 1:
        return model
    return jax.tree.map(lambda leaf: leaf.addressable_data(0), model)


def put(tree: Tree, sharding: NamedSharding) -> Tree:
    """Put values that every process has on the devices of a sharding, which may belong to other processes."""
    if sharding.is_fully_addressable:
        return jax.device_put(tree, sharding)

    def leaf(value: Any) -> jax.Array:
        if isinstance(value, jax.Array) and not value.is_fully_addressable:
            return jax.device_put(value, sharding)
        value = np.asarray(value)
        return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index])

    return jax.tree.map(leaf, tree)


def to_host(tree: Any) -> Any:
    """NumPy copies of arrays that may span several processes. All processes must call it in the same order."""
    leaves, structure = jax.tree.flatten(tree)
    spread = [
        index
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)
    ]
    if spread:
        jax.block_until_ready([leaves[index] for index in spread])  # this process's own part
        with process.waiting("the other processes"):
            gathered = jax.block_until_ready(_gather(leaves[spread[0]].sharding.mesh)([leaves[index] for index in spread]))
        for index, leaf in zip(spread, gathered, strict=True):
            leaves[index] = leaf
    return jax.tree.unflatten(structure, [np.asarray(leaf) for leaf in leaves])


@cache
def _gather(mesh: Mesh) -> Callable[[list[jax.Array]], list[jax.Array]]:
    return jax.jit(lambda leaves: leaves, out_shardings=NamedSharding(mesh, EVERYWHERE))


def least(value: int) -> int:
    """The minimum of the processes' values, in all of them. All processes must call it in the same order."""
    if jax.process_count() == 1:
        return value
    halves = multihost_utils.process_allgather(np.array([value], np.int64).view(np.uint32))  # JAX truncates int64 to 32 bits
    return int(np.ascontiguousarray(halves).view(np.int64).min())


def divisors(number: int) -> str:
    """All divisors of a number, as text for a message."""
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
