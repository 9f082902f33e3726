"""Llama checkpoints to Flax and back, without torch: Hugging Face folders (safetensors, sharded or not) and GGUF files.

    checkpoint = open_checkpoint(Path("model-folder"))  # reads headers only
    model = load_llama(checkpoint, "bfloat16")
    save_llama(model, Path("other-folder"))  # transformers can read it

Loading fills one stacked leaf after another, tensor by tensor, in the target dtype. On a GPU, tensors are copied as they lie in
the file, and transposed and stacked there: in addition to the model, the device holds a few tensors (`_TENSORS_AHEAD`). On a
CPU, and for packed weights, a leaf is put on the device while the next one is read: peak memory is the loaded model, two more
leaves and a few tensors. A checkpoint is loaded completely or refused:
one error lists all tensors that are missing, unknown or of another shape, before anything large is allocated. Pickle files are
never opened.

`Checkpoint` is the common interface of folders and GGUF files: a `LlamaConfig`, and tensors under their Hugging Face names.
"""

import json
import math
import os
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from lpes_jax.choices import WeightFormat
from lpes_jax.errors import UserError
from lpes_jax.json_files import read_json
from lpes_jax.mesh import put
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.eight_bits import PROJECTIONS
from lpes_jax.models.llama.gguf import ALL, GgufFile
from lpes_jax.models.llama.gguf_model import hf_names, llama_config, read_hf, read_hf_packed
from lpes_jax.models.llama.model import Llama, with_full_weights, with_weights
from lpes_jax.models.llama.packed import Packed
from lpes_jax.models.llama.packing import LAYOUTS, Blocks, Layout, Stack, combined, from_gguf, int8_layout, rounded
from lpes_jax.models.llama.sharding import check_blocks, check_model_axis, weight_spec
from lpes_jax.models.weight_hash import sha256_of
from lpes_jax.store.files import replacing, write_text

# Leaf of `Llama` -> its Hugging Face tensor ({} is the layer; layers are stacked on the first axis), and whether it is
# transposed: torch stores [out, in], we store [in, out].
RULES: dict[tuple[Any, ...], tuple[str, bool]] = {
    ("embed",): ("model.embed_tokens.weight", False),
    ("layers", "attention_norm"): ("model.layers.{}.input_layernorm.weight", False),
    ("layers", "query"): ("model.layers.{}.self_attn.q_proj.weight", True),
    ("layers", "key"): ("model.layers.{}.self_attn.k_proj.weight", True),
    ("layers", "value"): ("model.layers.{}.self_attn.v_proj.weight", True),
    ("layers", "output"): ("model.layers.{}.self_attn.o_proj.weight", True),
    ("layers", "mlp_norm"): ("model.layers.{}.post_attention_layernorm.weight", False),
    ("layers", "gate"): ("model.layers.{}.mlp.gate_proj.weight", True),
    ("layers", "up"): ("model.layers.{}.mlp.up_proj.weight", True),
    ("layers", "down"): ("model.layers.{}.mlp.down_proj.weight", True),
    ("layers", "query_bias"): ("model.layers.{}.self_attn.q_proj.bias", False),
    ("layers", "key_bias"): ("model.layers.{}.self_attn.k_proj.bias", False),
    ("layers", "value_bias"): ("model.layers.{}.self_attn.v_proj.bias", False),
    ("layers", "output_bias"): ("model.layers.{}.self_attn.o_proj.bias", False),
    ("layers", "gate_bias"): ("model.layers.{}.mlp.gate_proj.bias", False),
    ("layers", "up_bias"): ("model.layers.{}.mlp.up_proj.bias", False),
    ("layers", "down_bias"): ("model.layers.{}.mlp.down_proj.bias", False),
    ("layers", "query_norm"): ("model.layers.{}.self_attn.q_norm.weight", False),
    ("layers", "key_norm"): ("model.layers.{}.self_attn.k_norm.weight", False),
    ("norm",): ("model.norm.weight", False),
    ("head",): ("lm_head.weight", True),
}

# If the config is fused (Phi-3), these leaves are parts of one tensor, concatenated along its rows.
FUSED = {
    "model.layers.{}.self_attn.qkv_proj.weight": [("layers", "query"), ("layers", "key"), ("layers", "value")],
    "model.layers.{}.mlp.gate_up_proj.weight": [("layers", "gate"), ("layers", "up")],
}
_HEAD, _EMBEDDING = RULES[("head",)][0], RULES[("embed",)][0]

DTYPES = ("bfloat16", "float16", "float32")
_SAFETENSORS_DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
_ROWS = 64
_READERS = min(8, os.cpu_count() or 1)  # threads that read, dequantise and copy tensors, each with one tensor in memory
_TENSORS_AHEAD = 8  # tensors that are read or on their way to the device while one is stacked
_MOST_HEADER_BYTES = 100_000_000  # the library's limit
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class Checkpoint(ABC):
    """Weights on disk under their Hugging Face names, and the model's config. Holds headers only."""

    path: Path
    config: LlamaConfig

    @abstractmethod
    def names(self) -> set[str]:
        """All tensors in the files."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in torch order, [out, in]."""

    @abstractmethod
    def read(self, name: str, rows: slice = ALL) -> Shaped[np.ndarray, "*shape"]:
        """Read one tensor, or some of its rows, in torch order and a floating dtype (ml_dtypes' for bfloat16)."""

    def layout(self, name: str) -> Layout | None:
        """How the tensor can stay packed; None: the files have plain numbers, or codes that are only dequantised."""
        return None

    def read_blocks(self, name: str, rows: slice = ALL) -> Blocks:
        """Read a tensor that has a layout, or some of its rows, without dequantising."""
        raise NotImplementedError(f"{self.path} has no packed tensors")

    @abstractmethod
    def weight_files(self) -> list[Path]:
        """The files that hold the weights, sorted by name."""

    def sha256(self) -> str:
        """A hash of the concatenated weight files. A command has begun it early (`weight_hash`)."""
        return sha256_of(self.weight_files())


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a Hugging Face folder or a .gguf file. Raises UserError for anything else, damaged files and unsupported models."""
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    if path.suffix == ".gguf":
        return GgufCheckpoint(path)
    raise UserError(f"{path}: neither a folder with config.json and model.safetensors nor a .gguf file")


class SafetensorsCheckpoint(Checkpoint):
    """A folder with config.json and model.safetensors, or model.safetensors.index.json and its shards."""

    def __init__(self, path: Path):
        weights, index = path / "model.safetensors", path / "model.safetensors.index.json"
        if not weights.exists() and not index.exists():
            if pickles := sorted(file.name for pattern in _PICKLES for file in path.glob(pattern)):
                raise UserError(
                    f"{path}: only pickled weights ({_few(pickles)}), which are never opened; convert them to safetensors"
                )
            raise UserError(f"{path}: no model.safetensors or model.safetensors.index.json; is this a model folder?")
        self.path = path
        self.config = LlamaConfig.from_hf(_read_json(path / "config.json"), str(path / "config.json"))
        self._files: dict[str, Path] = {}  # tensor -> its file
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._data: dict[str, tuple[np.dtype, int]] = {}  # tensor -> its dtype, and where it begins in the file
        if weights.exists():
            self._scan(weights)
        else:
            self._scan_shards(index)

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, rows: slice = ALL) -> Shaped[np.ndarray, "*shape"]:
        # A view of the mapped file, because safetensors' own reader copies with the interpreter locked. It is mapped for each
        # tensor, and its pages stay resident as long as the view exists.
        path, (dtype, begin), shape = self._files[name], self._data[name], self._shapes[name]
        if not math.prod(shape):
            return np.empty(shape, dtype)[rows]
        try:
            with open(path, "rb") as file:
                if hasattr(os, "posix_fadvise"):  # reads ahead what is not in the page cache
                    os.posix_fadvise(file.fileno(), begin, math.prod(shape) * dtype.itemsize, os.POSIX_FADV_WILLNEED)
                tensor = np.asarray(np.memmap(file, dtype, "r", begin, shape))[rows]
        except (OSError, ValueError) as error:
            raise UserError(f"{path}: truncated or not a safetensors file ({error}); fetch it again") from error
        return tensor if tensor.flags.aligned else tensor.copy()

    def weight_files(self) -> list[Path]:
        return sorted(set(self._files.values()))

    def _scan(self, path: Path) -> set[str]:
        _check_length(path)
        with _open_safetensors(path) as file:
            names = set(file.keys())
            entries, begin = _header(path)
            if twice := sorted(names & self._files.keys()):
                raise UserError(f"{path}: also in {self._files[twice[0]].name}: {_few(twice)}; fetch the folder again")
            for name in names:
                self._files[name] = path
                header = file.get_slice(name)
                self._shapes[name] = tuple(header.get_shape())
                if (dtype := header.get_dtype()) not in _SAFETENSORS_DTYPES:
                    raise UserError(f"{path}: {name} is {dtype}; supported: {', '.join(_SAFETENSORS_DTYPES)}")
                self._data[name] = _SAFETENSORS_DTYPES[dtype], begin + entries[name]["data_offsets"][0]
        return names

    def _scan_shards(self, index: Path) -> None:
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise UserError(f"{index}: no weight_map of tensor names to file names; fetch it again")
        shards = sorted(set(weight_map.values()))
        if outside := [shard for shard in shards if Path(shard).name != shard]:
            raise UserError(f"{index}: names files outside its folder: {_few(outside)}")
        if missing := [shard for shard in shards if not (self.path / shard).is_file()]:
            raise UserError(f"{self.path}: {len(missing)} of {len(shards)} shards missing: {_few(missing)}; fetch them again")
        held = {shard: self._scan(self.path / shard) for shard in shards}
        if absent := [f"{name} in {shard}" for name, shard in weight_map.items() if name not in held[shard]]:
            raise UserError(f"{index}: names tensors that are not in their files: {_few(absent)}; fetch the folder again")


class GgufCheckpoint(Checkpoint):
    """A .gguf file, dequantised to float32 when it is read; or its blocks, as they are."""

    def __init__(self, path: Path):
        self.path = path
        self.gguf = GgufFile.open(path)
        self.config = llama_config(self.gguf)
        self._names = hf_names(self.gguf)

    def names(self) -> set[str]:
        return set(self._names)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.gguf.tensors[self._names[name]].shape

    def read(self, name: str, rows: slice = ALL) -> Shaped[np.ndarray, "*shape"]:
        return read_hf(self.gguf, name, self._names[name], self.config, rows)

    def layout(self, name: str) -> Layout | None:
        return LAYOUTS.get(self.gguf.tensors[self._names[name]].type)

    def read_blocks(self, name: str, rows: slice = ALL) -> Blocks:
        kind = self.gguf.tensors[self._names[name]].type
        return from_gguf(read_hf_packed(self.gguf, name, self._names[name], self.config, rows), kind)

    def weight_files(self) -> list[Path]:
        return [self.path]


def load_llama(
    checkpoint: Checkpoint,
    dtype: DTypeLike,
    mesh: Mesh | None = None,
    weight_format: WeightFormat = "full",
    between: Callable[[], object] = lambda: None,
) -> Llama:
    """Load a model.

    On a mesh, every leaf is put directly on its shards, so no device holds more than its part of the model.

    Args:
        checkpoint: The weights.
        dtype: See `checked_dtype`.
        mesh: See `lpes_jax.mesh`; None means the default device.
        weight_format: How the layers' matrices are stored. full: in `dtype`; packed: as in a quantised .gguf file; int8: like
            packed, and matrices that the file does not quantise are rounded to 8 bits, in blocks of 32 with a 16-bit scale.
        between: Called before each leaf; what it raises ends the loading.

    Raises:
        UserError: Tensors are missing, unknown or of another shape (it lists all of them), the mesh cannot split the model, or
            `weight_format` is packed and the files have nothing packed.
    """
    dtype = checked_dtype(dtype)
    layers, found = checkpoint.config.num_layers, len(checkpoint.names())
    if layers > found:  # checked before any loop over the layers, because a damaged config may name any number
        raise UserError(f"{checkpoint.path}: the config says {layers:,} layers, but the files hold only {found:,} tensors")
    if mesh is not None:
        check_model_axis(mesh, checkpoint.config.num_kv_heads, checkpoint.config.intermediate_size)
    graphdef, leaves = _leaves(checkpoint.config, dtype)
    _check_tensors(checkpoint, leaves)
    if checkpoint.config.tie_word_embeddings and not is_tied(checkpoint):
        print(
            f"note: {checkpoint.path}: {_HEAD} differs from the embedding, though the config ties them; using {_HEAD}, as "
            "transformers 5 does (4 uses the embedding)",
            file=sys.stderr,
        )
        graphdef, leaves = _leaves(replace(checkpoint.config, tie_word_embeddings=False), dtype)
    layouts = packed_layouts(checkpoint, weight_format)
    if mesh is not None:
        for path, layout in layouts.items():
            check_blocks(mesh, path[1], dict(leaves)[path].shape[1], layout.group)
    stacked = {path for path, _ in leaves if RULES[path][1] and path not in layouts} if _off_the_cpu(mesh) else set()
    reads = [
        partial(_read_leaf, checkpoint, path, leaf.shape, layouts.get(path, dtype))
        for path, leaf in leaves
        if path not in stacked
    ]
    loaded, packed, on_host = [], {}, _one_ahead(reads)
    for path, leaf in leaves:
        between()
        if path in stacked:
            on_device = _stacked_on_device(checkpoint, path, leaf.shape, dtype, mesh)
        else:
            on_device = _placed(path, next(on_host), mesh)
        if isinstance(on_device, dict):
            packed[path[1]] = Packed(**on_device)
            loaded.append((path, leaf.replace(jnp.zeros(0, dtype))))  # replaced below
        else:
            loaded.append((path, leaf.replace(on_device)))
    model = nnx.merge(graphdef, nnx.from_flat_state(loaded))
    return with_weights(model, **packed) if packed else model


def packed_layouts(checkpoint: Checkpoint, weight_format: WeightFormat) -> dict[tuple[Any, ...], Layout]:
    """The layout of each matrix that is stored packed, by its path in `Llama`. Reads headers only.

    Raises UserError if `weight_format` is packed and the files have nothing packed.
    """
    if weight_format == "full":
        return {}
    found = {}
    for path, leaf in _leaves(checkpoint.config, np.dtype(np.float32))[1]:
        if path[-1] not in PROJECTIONS:
            continue
        layouts = [checkpoint.layout(name) for name, *_ in tensors_of(path, leaf.shape, checkpoint.config)]
        if weight_format == "int8":
            layouts = [layout or int8_layout(leaf.shape[1]) for layout in layouts]
        if None not in layouts:
            found[path] = combined([layout for layout in layouts if layout is not None])
    if not found:
        raise UserError(
            f"--weight-format packed: {checkpoint.path} has no quantised weights of a known type; give a quantised .gguf "
            "file, or --weight-format int8, which rounds them"
        )
    return found


def weight_bytes(config: LlamaConfig, itemsize: int, layouts: Mapping[tuple[Any, ...], Layout] | Layout) -> int:
    """Bytes of the weights of a model in memory.

    Args:
        config: The model's sizes.
        itemsize: Bytes of a number that is not packed.
        layouts: Of each packed matrix (`packed_layouts`); or one for all matrices of the layers.
    """
    total = 0
    for path, leaf in _leaves(config, np.dtype(np.float32))[1]:
        layout = layouts.get(path) if isinstance(layouts, Mapping) else layouts if path[-1] in PROJECTIONS else None
        total += math.ceil(math.prod(leaf.shape) * (itemsize if layout is None else layout.bits_per_weight / 8))
    return total


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raise UserError that lists all tensors that are missing, unknown or of another shape; loads nothing."""
    _check_tensors(checkpoint, _leaves(checkpoint.config, np.dtype(np.float32))[1])


def checked_dtype(dtype: DTypeLike) -> np.dtype:
    """The dtype of weights; `auto` is bfloat16 on a GPU and float32 on a CPU. Raises UserError for an unsupported one."""
    if isinstance(dtype, str) and dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or found.name not in DTYPES:
        given = repr(dtype) if found is None else repr(found.name)
        raise UserError(f"dtype {given:.40} is not supported; supported: {', '.join(DTYPES)} and auto")
    return found


def save_llama(model: Llama, folder: Path) -> None:
    """Write config.json and model.safetensors in Hugging Face layout, each atomically.

    Holds one copy of the weights on the host. Packed weights are written unpacked.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model = with_full_weights(model)
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(nnx.split(model)[1]):
        for name, index, rows, shape in tensors_of(path, leaf.shape, model.config):
            array = np.asarray(leaf[index])
            whole = tensors.setdefault(name, np.empty(shape, array.dtype))
            whole[rows] = array.T if RULES[path][1] else array
    with replacing(folder / "model.safetensors") as part:
        save_file(tensors, part, metadata={"format": "pt"})
    config = model.config.to_hf() | {"dtype": model.embed[...].dtype.name}
    write_text(folder / "config.json", json.dumps(config, indent=2) + "\n")


def _leaves(config: LlamaConfig, dtype: np.dtype) -> tuple[nnx.GraphDef[Llama], list[tuple[tuple[Any, ...], Any]]]:
    """The model without memory for its weights, and its leaves by path."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0), dtype=dtype)))
    return graphdef, list(nnx.to_flat_state(state))


def _check_tensors(checkpoint: Checkpoint, leaves: Iterable[tuple[tuple[Any, ...], Any]]) -> None:
    """Raise one UserError for all tensors that are missing, unknown or of another shape."""
    config = checkpoint.config
    wanted = {name: shape for path, leaf in leaves for name, _, _, shape in tensors_of(path, leaf.shape, config)}
    names = checkpoint.names()
    missing = sorted(wanted.keys() - names)
    if config.tie_word_embeddings and _HEAD in names:
        wanted[_HEAD] = wanted[_EMBEDDING]
    # Old files store the RoPE frequencies, which follow from the config.
    unknown = sorted(name for name in names - wanted.keys() if not name.endswith(".rotary_emb.inv_freq"))
    misshaped = sorted(
        f"{name} is {list(checkpoint.shape(name))}, wanted {list(shape)}"
        for name, shape in wanted.items()
        if name in names and checkpoint.shape(name) != shape
    )
    problems = {"missing": missing, "of another shape than the config says": misshaped, "unknown to this port": unknown}
    if found := [f"{len(tensors)} {what}: {_few(tensors)}" for what, tensors in problems.items() if tensors]:
        raise UserError(f"{checkpoint.path}: the tensors do not fit the model: {'; '.join(found)}")


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether the head is the embedding: the config says so, and the files have no different head.

    If the files have one, transformers 5 and we use it; transformers 4 follows the config.
    """
    if not checkpoint.config.tie_word_embeddings or _HEAD not in checkpoint.names():
        return checkpoint.config.tie_word_embeddings
    return bool(np.array_equal(checkpoint.read(_HEAD), checkpoint.read(_EMBEDDING)))


def tensors_of(
    path: tuple[Any, ...], shape: tuple[int, ...], config: LlamaConfig
) -> Iterator[tuple[str, tuple[int, ...], slice, tuple[int, ...]]]:
    """The Hugging Face tensors of a leaf: name, index into the leaf, rows of the tensor, and full shape in torch order."""
    (name, transposed), rows = RULES[path], ALL
    part = shape[1:] if "{}" in name else shape
    tensor = part[::-1] if transposed else part
    for fused, parts in FUSED.items() if config.fused else ():
        if path in parts:
            heights = [_height(part, config) for part in parts]
            index = parts.index(path)
            rows = slice(sum(heights[:index]), sum(heights[: index + 1]))
            name, tensor = fused, (sum(heights), *tensor[1:])
    for index in [(layer,) for layer in range(shape[0])] if "{}" in name else [()]:
        yield name.format(*index), index, rows, tensor


def _height(path: tuple[Any, ...], config: LlamaConfig) -> int:
    """The number of rows of a part of a fused tensor."""
    heads = {"query": config.num_heads, "key": config.num_kv_heads, "value": config.num_kv_heads}
    return heads[path[1]] * config.head_dim if path[1] in heads else config.intermediate_size


def _read_leaf(
    checkpoint: Checkpoint, path: tuple[Any, ...], shape: tuple[int, ...], form: np.dtype | Layout
) -> np.ndarray | dict[str, np.ndarray]:
    """A leaf on the host: in a dtype, or the parts of a packed matrix."""
    if isinstance(form, Layout):
        layers, inputs, outputs = shape
        stack = Stack(form, (layers, outputs, inputs))
        read, leaf = partial(_read_packed, checkpoint, stack), stack.parts
    else:
        leaf = np.empty(shape, form)
        read = partial(_read_tensor, checkpoint, leaf, transposed=RULES[path][1])
    with ThreadPoolExecutor(_READERS) as pool:
        deque(pool.map(lambda tensor: read(*tensor[:3]), tensors_of(path, shape, checkpoint.config)), maxlen=0)  # raises errors
    return leaf


def _read_tensor(
    checkpoint: Checkpoint, leaf: np.ndarray, name: str, index: tuple[int, ...], rows: slice, *, transposed: bool
) -> None:
    tensor = checkpoint.read(name, rows)
    if not transposed:
        leaf[index] = tensor
        return
    for start in range(0, len(tensor), _ROWS):  # in blocks that fit the CPU cache: several times as fast as all at once
        leaf[index][:, start : start + _ROWS] = tensor[start : start + _ROWS].astype(leaf.dtype).T


def _read_packed(checkpoint: Checkpoint, stack: Stack, name: str, index: tuple[int, ...], rows: slice) -> None:
    packed = checkpoint.layout(name) is not None
    stack.fill(index[0], checkpoint.read_blocks(name, rows) if packed else rounded(checkpoint.read(name, rows)))


def _off_the_cpu(mesh: Mesh | None) -> bool:
    """Whether the weights go to a GPU or TPU, which transposes them faster than the host."""
    return (jax.default_backend() if mesh is None else mesh.devices.flat[0].platform) != "cpu"


def _stacked_on_device(
    checkpoint: Checkpoint, path: tuple[Any, ...], shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh | None
) -> jax.Array:
    """A transposed leaf: its tensors are copied to the devices in torch order, and transposed and stacked there."""
    own = raw = None
    if mesh is not None:
        spec = weight_spec(path)
        own = NamedSharding(mesh, spec)
        raw = NamedSharding(mesh, PartitionSpec(*(*spec, *[None] * len(shape))[: len(shape)][:-3:-1]))  # of one tensor
    empty, set_layer, transposed = _programs(own)

    def read(tensor: tuple[Any, ...]) -> np.ndarray:
        name, _, rows, _ = tensor
        return checkpoint.read(name, rows).astype(dtype, copy=False)

    tensors = list(tensors_of(path, shape, checkpoint.config))
    stack = empty(shape, dtype) if len(shape) == 3 else None
    on_their_way: deque[tuple[tuple[int, ...], Any]] = deque()  # index, array on the device

    def take() -> None:
        nonlocal stack
        index, tensor = on_their_way.popleft()
        tensor.block_until_ready()
        stack = transposed(tensor) if stack is None else set_layer(stack, tensor, *index)

    for tensor, array in zip(tensors, _some_ahead(read, tensors), strict=True):
        on_their_way.append((tensor[1], jax.device_put(array) if raw is None else put(array, raw)))
        if len(on_their_way) == _TENSORS_AHEAD:
            take()
    while on_their_way:
        take()
    assert stack is not None  # every leaf has a tensor
    return stack.block_until_ready()


@cache
def _programs(sharding: NamedSharding | None) -> tuple[Callable[..., jax.Array], ...]:
    """Compiled functions whose result has a sharding: an empty stack, a stack with a layer set in place, a transposition."""
    jit = partial(jax.jit, out_shardings=sharding)
    return (
        jit(jnp.zeros, static_argnums=(0, 1)),
        jit(
            lambda stack, tensor, index: jax.lax.dynamic_update_index_in_dim(stack, tensor.T, index, 0),
            donate_argnums=0,
        ),
        jit(jnp.transpose),
    )


def _some_ahead(read: Callable[[Any], np.ndarray], tensors: list[Any]) -> Iterator[np.ndarray]:
    """The results of `read` in order, computed by threads, with at most `_READERS` ahead of the one in use."""
    with ThreadPoolExecutor(_READERS) as pool:
        pending = deque(pool.submit(read, tensor) for tensor in tensors[:_READERS])
        for tensor in [*tensors[_READERS:], *[None] * len(pending)]:
            result = pending.popleft().result()
            if tensor is not None:
                pending.append(pool.submit(read, tensor))
            yield result


def _one_ahead(reads: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """The results of the functions in order. While one is in use, the next is computed in a thread."""
    with ThreadPoolExecutor(1) as pool:
        pending = None
        for read in reads:
            following = pool.submit(read)
            if pending is not None:
                yield pending.result()
            pending = following
        if pending is not None:
            yield pending.result()


def _placed(path: tuple[Any, ...], leaf: np.ndarray | dict[str, np.ndarray], mesh: Mesh | None) -> Any:
    """A leaf or its parts on the devices, when the copies are finished."""

    def placed(array: np.ndarray, path: tuple[Any, ...]) -> Any:
        return jax.device_put(array) if mesh is None else put(array, NamedSharding(mesh, weight_spec(path)))

    if isinstance(leaf, dict):
        return jax.block_until_ready({name: placed(part, (*path, name)) for name, part in leaf.items()})
    return jax.block_until_ready(placed(leaf, path))


def _open_safetensors(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or not a safetensors file ({error}); fetch it again") from error


def _header(path: Path) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file that the library has checked, and where the data begin."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return json.loads(file.read(length)), 8 + length


def _check_length(path: Path) -> None:
    """Raise UserError, with both sizes, for a file whose length differs from what its header declares.

    The header is its length in bytes (a uint64), then JSON with the begin and end of each tensor after the header.
    """
    size = path.stat().st_size
    if size == 0:
        raise UserError(f"{path}: the file is empty; fetch it again")
    with open(path, "rb") as file:
        begin = file.read(8)
        header = int.from_bytes(begin, "little")
        if begin == b"version ":
            raise UserError(f"{path}: a pointer of Git LFS, {size:,} bytes, not the weights; fetch them (git lfs pull)")
        if size < 8 or header > _MOST_HEADER_BYTES:
            return  # not of this format at all; the library reports that
        declared = 8 + header
        if declared <= size:
            try:
                entries = json.loads(file.read(header))
                declared += max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                return  # damaged in another way; the library reports that
    if declared > size:
        raise UserError(f"{path}: {size:,} bytes, but its header declares {declared:,}; it is truncated, fetch it again")
    if declared < size:
        raise UserError(
            f"{path}: {size:,} bytes, but its header declares {declared:,}: {size - declared:,} too many; fetch it again"
        )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise UserError(f"{path}: no such file; a model folder needs config.json and model.safetensors")
    return read_json(path, dict, finite=False, hint="; fetch it again")


def _few(items: list[str], most: int = 6) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(items[:most]) + more
