"""Gains in the weights of safetensors files: query weights and biases are multiplied, and all other bytes are unchanged.

A file with such tensors is copied, and the tensors are overwritten in the copy. Precision, order, names, shards and metadata
are unchanged. The source is never written, not even through links.
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
    """The changes: the number of tensors by dtype, and the rounding error of their rows against row x gain.

    The error of a row is relative: the norm of the difference over the norm of row x gain.
    """

    tensors: dict[str, int]
    mean: float
    most: float

    def line(self) -> str:
        """The changes in words."""
        kinds = ", ".join(f"{count} of type {kind}" for kind, count in self.tensors.items())
        return (
            f"gains: in {sum(self.tensors.values())} tensors ({kinds}); rounding moves a row by {self.mean:.2g} of its norm on "
            f"average, {self.most:.2g} at most"
        )


def fold_files(folder: Path, config: LlamaConfig, factors: LayerFactors, where: str = "factors") -> Folded:
    """Fold the gains into the safetensors files of a folder with the model of `config`. Links are replaced by copies.

    Raises UserError for gains that do not fit the model, or that overflow the dtype of a tensor.
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
        if not (names := sorted(header.keys() & changes.keys())):
            continue
        if path.is_symlink():
            source = path.resolve()
            path.unlink()
            shutil.copyfile(source, path)
        with open(path, "r+b") as file:
            for name in names:
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
    """Rows x gains in float32 (float64 for float64 rows), rounded to the rows' dtype; and the relative error of each row."""
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
    """The offset of the data of a safetensors file, and its entries by name."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header
