"""LayerFactors: the file that a search leaves and every other verb reads (`factors.json`, format lpes-factors/1)."""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax.errors import UserError
from lpes_jax.json_files import is_array, kind_of, read_json
from lpes_jax.rope import GRANULARITIES, Granularity

FORMAT = "lpes-factors/1"
_RANK = {"layer": 1, "layer_band": 2, "layer_group": 2, "layer_group_band": 3}
_ZOO = Path(__file__).parent / "models" / "zoo"


@dataclass(frozen=True)
class LayerFactors:
    """Scaling factors of a model: layer l rotates by angle (position / factor) x inverse frequency.

    `factors` is `[L]`, `[L, bands]`, `[L, K]` or `[L, K, bands]`, as `granularity` says (`lpes_jax.rope.scale_layers`). The
    other fields record where they come from: the model (name, num_layers, sha256), the curve, the model's RoPE, the search
    and its held-out evaluation.
    """

    factors: np.ndarray
    granularity: Granularity = "layer"
    model: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, Any] | None = None
    rope: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", _checked(self.factors, self.granularity))

    @classmethod
    def uniform(cls, factor: float, num_layers: int) -> "LayerFactors":
        """One factor in every layer: position interpolation."""
        return cls(np.full(num_layers, factor))

    @property
    def num_layers(self) -> int:
        return len(self.factors)

    def for_model(self, num_layers: int, num_kv_heads: int, head_dim: int, where: str = "factors") -> "LayerFactors":
        """Itself, if it fits a model of these sizes; else UserError."""
        if self.num_layers != num_layers:
            raise UserError(
                f"{where}: {self.num_layers} layers of factors, but the model has {num_layers}; use factors found for it"
            )
        if "group" in self.granularity and self.factors.shape[1] != num_kv_heads:
            raise UserError(f"{where}: {self.factors.shape[1]} KV groups of factors, but the model has {num_kv_heads}")
        if "band" in self.granularity and (head_dim // 2) % self.factors.shape[-1]:
            raise UserError(
                f"{where}: {self.factors.shape[-1]} bands do not divide the model's {head_dim // 2} frequencies a head"
            )
        return self

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON file, whole or not at all."""
        record = {"format": FORMAT, "applies_to": "position / factor", **asdict(self)}
        record["factors"] = self.factors.tolist()
        write_json(Path(path), record)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LayerFactors":
        """Read a JSON file, or factors of the zoo by name: `MODEL/NAME`, or `NAME` where only one model has such.

        A name of the zoo always means the zoo's. Raises UserError where the file is missing, not JSON, of another format, or
        holds unusable factors.
        """
        path = _zoo_file(Path(path)) or Path(path)
        record = read_json(path, finite=False)
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise UserError(f"{path}: not a {FORMAT} file; give the factors.json that a search wrote")
        if "factors" not in record:
            raise UserError(f"{path}: factors are missing; give the factors.json that a search wrote")
        _check_described(record, path)
        try:
            factors = _checked(record["factors"], record.get("granularity", "layer"))
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
        others = ("granularity", "model", "curve", "rope", "search", "evaluation")
        return cls(factors, **{name: record[name] for name in others if name in record})


def _zoo_file(name: Path) -> Path | None:
    """The file of factors in the zoo; None for what is no name there. UserError for a name that is not there, or twice."""
    zoo = {f"{file.parent.parent.name}/{file.stem}": file for file in sorted(_ZOO.glob("*/factors/*.json"))}
    found = [key for key in zoo if name.as_posix() in (key, key.partition("/")[2])]
    if len(found) > 1:
        raise UserError(f"factors {name} are there for several models; say which: {', '.join(found)}")
    if not found and not name.suffix and not name.exists():
        raise UserError(f"{name}: no such factors.json, and no factors of the zoo; it has: {', '.join(zoo)}")
    return zoo[found[0]] if found else None


def write_json(path: Path, record: Any) -> None:
    """Write JSON under a temporary name and rename it when it is on the disk, so that no reader ever sees half a file."""
    temporary, text = path.with_name(path.name + ".part"), json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False)
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _check_described(record: dict[str, Any], path: Path) -> None:
    """Raise UserError where what describes the factors is of another kind than it should be, or factors are no numbers."""
    for name in ("model", "rope", "search", "evaluation", "curve"):
        if not isinstance(value := record.get(name, {}), dict) and not (name == "curve" and value is None):
            raise UserError(
                f"{path}: {name} must be an object in JSON, got {kind_of(value)}; give the file that a search wrote"
            )
    curve = record.get("curve") or {}
    points, layers = curve.get("control_points"), curve.get("layers")
    if not isinstance(curve.get("type", ""), str):
        raise UserError(f"{path}: the curve's type must be a string, got {kind_of(curve['type'])}")
    if points is not None and not is_array(points):
        raise UserError(f"{path}: control_points of the curve must be lists of finite numbers, got {points!r:.60}")
    if layers is not None and not (is_array(layers) and len(layers) == 2 and all(isinstance(it, int) for it in layers)):
        raise UserError(f"{path}: layers of the curve must be the first and the last one, got {layers!r:.60}")
    if isinstance(record["factors"], list) and not is_array(record["factors"], finite=False):
        raise UserError(f"{path}: factors must be numbers, the same count in every layer")
    try:
        json.dumps({name: value for name, value in record.items() if name != "factors"}, allow_nan=False)
    except ValueError as error:
        raise UserError(
            f"{path}: holds NaN or an infinity, which are no numbers in JSON; give the file that a search wrote"
        ) from error


def _checked(factors: Any, granularity: Any) -> np.ndarray:
    if granularity not in GRANULARITIES:
        raise UserError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    try:
        array = np.asarray(factors, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError("factors must be numbers, the same count in every layer") from error
    if array.ndim != _RANK[granularity] or not array.size:
        raise UserError(f"granularity {granularity} needs factors of {_RANK[granularity]} axes, got shape {list(array.shape)}")
    if not (np.isfinite(array) & (array > 0)).all():
        bad = array[~(np.isfinite(array) & (array > 0))][0]
        raise UserError(f"factors must be finite and above 0, got {bad}")
    return array
