"""Gains in the weights of safetensors files: what queries are linear in is multiplied, and nothing else changes by a byte.

A file with such tensors is copied, and these are overwritten in the copy: precision, order, names, shards and metadata are the
source's. Links to the source are never written through.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import gains_of_tensors
from lpes_jax.models.llama.checkpoint import tensors_of
from lpes_jax.models.llama.config import LlamaConfig

_DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}


@dataclass(frozen=True)
class Folded:
    """What was changed: tensors by dtype, and how far their rows are from row x gain by the rounding of the dtype.

    The distance of a row is relative, by the norms of both.
    """

    tensors: dict[str, int]
    mean: float
    most: float

    def line(self) -> str:
        """For people."""
        kinds = ", ".join(f"{count} of type {kind}" for kind, count in self.tensors.items())
        return (
            f"gains: in {sum(self.tensors.values())} tensors ({kinds}); rounding moves a row by {self.mean:.2g} of its norm on "
            f"average, {self.most:.2g} at most"
        )


def fold_files(folder: Path, config: LlamaConfig, factors: LayerFactors, where: str = "factors") -> Folded:
    """Put the gains into the safetensors files of a folder that holds the model of `config`, as copies where they are links.

    Raises UserError for gains that do not fit the model, and for those that the dtype of a tensor cannot hold.
    """
    changes: dict[str, tuple[slice, Float[np.ndarray, "rows"]]] = {}
    for leaf, gains in gains_of_tensors(factors, config, where).items():
        rows = gains.shape[1]
        shape = (len(gains), config.hidden_size, rows) if leaf == "query" else (len(gains), rows)
        for name, index, part, _ in tensors_of(("layers", leaf), shape, config):
            changes[name] = part, gains[index]
    counts: dict[str, int] = {}
    distances = []
    for path in sorted(folder.glob("*.safetensors")):
        begin, header = _header(path)
        if not (here := sorted(header.keys() & changes.keys())):
            continue
        if path.is_symlink():
            source = path.resolve()
            path.unlink()
            shutil.copyfile(source, path)
        with open(path, "r+b") as file:
            for name in here:
                entry, (rows, gains) = header[name], changes[name]
                dtype, first = _DTYPES[entry["dtype"]], begin + entry["data_offsets"][0]
                file.seek(first)
                values = np.frombuffer(file.read(entry["data_offsets"][1] - entry["data_offsets"][0]), dtype)
                values = values.reshape(entry["shape"]).copy()
                values[rows], distance = _multiplied(values[rows], gains, f"{where}: {name}")
                distances.append(distance)
                file.seek(first)
                file.write(values.tobytes())
                counts[entry["dtype"]] = counts.get(entry["dtype"], 0) + 1
            file.flush()
            os.fsync(file.fileno())
    rows = np.concatenate(distances)
    return Folded(counts, float(rows.mean()), float(rows.max()))


def _multiplied(
    values: Float[np.ndarray, "rows *width"], gains: Float[np.ndarray, "rows"], where: str
) -> tuple[Float[np.ndarray, "rows *width"], Float[np.ndarray, "rows"]]:
    """Rows x gains in float32 (float64 where the rows are), rounded to their dtype; and the relative distance of each row."""
    wide = values.astype(np.promote_types(values.dtype, np.float32))
    with np.errstate(over="ignore"):
        product = wide * gains.reshape(-1, *[1] * (wide.ndim - 1)).astype(wide.dtype)
        rounded = product.astype(values.dtype)
    if np.isfinite(product).all() and not np.isfinite(rounded.astype(wide.dtype)).all():
        raise UserError(
            f"{where} is of {values.dtype.name}, which overflows with these gains; give a model in bfloat16 or float32"
        )
    exact = (values.astype(np.float64) * gains.reshape(-1, *[1] * (wide.ndim - 1))).reshape(len(values), -1)
    norms = np.linalg.norm(exact, axis=1)
    off = np.linalg.norm(rounded.astype(np.float64).reshape(exact.shape) - exact, axis=1)
    return rounded, np.divide(off, norms, out=np.zeros_like(off), where=norms > 0)


def _header(path: Path) -> tuple[int, dict]:
    """Where the data of a safetensors file begin, and its entries by name."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
