"""LayerFactors: the file that a search writes and every other verb reads (`factors.json`, format lpes-factors/2).

    factors              numbers by layer, as `granularity` says; null: the frequency does not rotate (an infinite factor)
    granularity          layer, layer_band, layer_group or layer_group_band
    gains                multipliers of each frequency's part of q . k, of a granularity of their own; null: 1
    gains_granularity    as above; null if there are no gains
    model, curve, rope, search, evaluation    the source of the factors

Format lpes-factors/1 is read too; it has no gains, and no null among its factors.
"""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lpes_jax.choices import GRANULARITIES, Granularity
from lpes_jax.errors import UserError
from lpes_jax.json_files import is_array, kind_of, read_json
from lpes_jax.store.files import write_json

FORMAT, APPLIES_TO = "lpes-factors/2", "position / factor"
_FORMATS = ("lpes-factors/1", FORMAT)
LEAST, MOST = 1e-20, 1e20  # positions and frequencies divided by these stay well within the range of float32
_RANK = {"layer": 1, "layer_band": 2, "layer_group": 2, "layer_group_band": 3}
_ZOO = Path(__file__).parent / "models" / "zoo"


@dataclass(frozen=True)
class LayerFactors:
    """Scaling factors of a model: layer l rotates by angle (position / factor) x inverse frequency.

    Attributes:
        factors: `[L]`, `[L, bands]`, `[L, K]` or `[L, K, bands]`, as `granularity` says (`lpes_jax.rope.scale_layers`). A
            frequency with an infinite factor does not rotate.
        granularity: Whether layers, bands or KV groups have factors of their own.
        gains: Multipliers of each frequency's part of q . k (`lpes_jax.rope.RopeTable`); None means 1.
        gains_granularity: Granularity of the gains (default: layer).
        model: Name, sha256, sizes and tokenizer of the model that the factors were found for (`lpes_jax.same_model`).
        curve: The curve that they come from.
        rope: The model's RoPE.
        search: The search that found them.
        evaluation: Their held-out evaluation.
    """

    factors: np.ndarray
    granularity: Granularity = "layer"
    gains: np.ndarray | None = None
    gains_granularity: Granularity | None = None
    model: dict[str, Any] = field(default_factory=dict)
    curve: dict[str, Any] | None = None
    rope: dict[str, Any] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    evaluation: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", _checked(self.factors, self.granularity, infinite=True))
        granularity = None if self.gains is None else self.gains_granularity or "layer"
        gains = None if granularity is None else _checked(self.gains, granularity, "gains")
        if gains is not None and len(gains) != len(self.factors):
            raise UserError(f"gains of {len(gains)} layers do not match factors of {len(self.factors)}")
        object.__setattr__(self, "gains", gains)
        object.__setattr__(self, "gains_granularity", granularity)

    @classmethod
    def uniform(cls, factor: float, num_layers: int) -> "LayerFactors":
        """One factor in every layer: position interpolation."""
        return cls(np.full(num_layers, factor))

    @property
    def num_layers(self) -> int:
        return len(self.factors)

    @property
    def mean(self) -> float:
        """The mean factor, which position interpolation uses. With infinite factors: 1 / the mean multiplier."""
        if np.isfinite(self.factors).all():
            return float(self.factors.mean())
        multiplier = float((1 / self.factors).mean())
        return 1 / multiplier if multiplier else float("inf")

    @property
    def changes_nothing(self) -> bool:
        """Whether all factors and gains are 1."""
        return bool((self.factors == 1).all()) and (self.gains is None or bool((self.gains == 1).all()))

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that affects the model's output: equal keys, equal outputs. Gains of 1 count as no gains."""
        key = self.granularity, self.factors.shape, self.factors.tobytes()
        if self.gains is None or (self.gains == 1).all():
            return key
        return *key, self.gains_granularity, self.gains.shape, self.gains.tobytes()

    @property
    def content(self) -> list[Any]:
        """Granularity and factors, plus those of any gains, as JSON values; identifies the factors in records."""
        content = [self.granularity, json_of(self.factors)]
        return content if len(self.key) == 3 else [*content, self.gains_granularity, self.numbers["gains"]]

    @property
    def sha256(self) -> str:
        """The hash of the factors' bytes, or of the whole `key` if there are gains."""
        key = self.key
        return hashlib.sha256(key[2] if len(key) == 3 else repr(key).encode()).hexdigest()

    @property
    def numbers(self) -> dict[str, Any]:
        """Factors and gains with their granularities, as JSON values."""
        return {
            "factors": json_of(self.factors),
            "granularity": self.granularity,
            "gains": None if self.gains is None else self.gains.tolist(),
            "gains_granularity": self.gains_granularity,
        }

    def for_model(self, num_layers: int, num_kv_heads: int, head_dim: int, where: str = "factors") -> "LayerFactors":
        """Return self if its shape fits a model of these sizes (`head_dim`: rotated part of a head); else raise UserError."""
        if self.num_layers != num_layers:
            raise UserError(
                f"{where}: {self.num_layers} layers of factors, but the model has {num_layers}; use factors found for it"
            )
        for what, values, granularity in (
            ("factors", self.factors, self.granularity),
            ("gains", self.gains, self.gains_granularity),
        ):
            if values is None or granularity is None:
                continue
            if "group" in granularity and values.shape[1] != num_kv_heads:
                raise UserError(f"{where}: {values.shape[1]} KV groups of {what}, but the model has {num_kv_heads}")
            if "band" in granularity and (head_dim // 2) % values.shape[-1]:
                bands = f"{values.shape[-1]} bands" + (" of gains" if what == "gains" else "")
                raise UserError(f"{where}: {bands} do not divide the model's {head_dim // 2} frequencies per head")
        return self

    def save(self, path: str | os.PathLike) -> None:
        """Write the JSON file atomically."""
        write_json(Path(path), {"format": FORMAT, "applies_to": APPLIES_TO, **asdict(self), **self.numbers})

    @classmethod
    def load(cls, path: str | os.PathLike) -> "LayerFactors":
        """Read a JSON file, or factors of the zoo by name: `MODEL/NAME`, or `NAME` if only one model has it.

        A name of the zoo takes precedence over a file. `lpes_jax.same_model` checks whether factors belong to a model.

        Raises:
            UserError: The file is missing, not JSON, of another format, or contains unusable factors.
        """
        path = _zoo_file(Path(path)) or Path(path)
        if path.is_dir():
            inside = path / "factors.json"
            raise UserError(f"{path}: a folder; give {inside if inside.is_file() else 'the factors.json of a search'}")
        record = read_json(path, finite=False, hint="; give the factors.json that a search wrote")
        if not isinstance(record, dict) or record.get("format") not in _FORMATS:
            raise UserError(f"{path}: not a {FORMAT} file; give the factors.json that a search wrote")
        if "factors" not in record:
            raise UserError(f"{path}: factors are missing; give the factors.json that a search wrote")
        if (applies_to := record.get("applies_to", APPLIES_TO)) != APPLIES_TO:
            raise UserError(f"{path}: applies_to {applies_to!r:.60} is not supported; factors apply to {APPLIES_TO!r} here")
        _check_described(record, path)
        try:
            new = record["format"] == FORMAT
            factors = _read(record["factors"], record.get("granularity", "layer"), nulls=new)
            gains, gains_granularity = (record.get("gains"), record.get("gains_granularity")) if new else (None, None)
            gains = None if gains is None else _checked(gains, gains_granularity or "layer", "gains")
            others = ("granularity", "model", "curve", "rope", "search", "evaluation")
            more = {name: record[name] for name in others if record.get(name) is not None}
            return cls(factors, gains=gains, gains_granularity=None if gains is None else gains_granularity, **more)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error


def _zoo_file(name: Path) -> Path | None:
    """The file of factors in the zoo; None if the zoo has no such name. UserError for an unknown or ambiguous name."""
    zoo = {f"{file.parent.parent.name}/{file.stem}": file for file in sorted(_ZOO.glob("*/factors/*.json"))}
    found = [key for key in zoo if name.as_posix() in (key, key.partition("/")[2])]
    if len(found) > 1:
        raise UserError(f"several models have factors {name}; give one of {', '.join(found)}")
    if not found and name.suffix != ".json" and not os.path.exists(name):
        raise UserError(f"{name}: no such factors.json, and no factors of the zoo, which has {', '.join(zoo)}")
    return zoo[found[0]] if found else None


def _check_described(record: dict[str, Any], path: Path) -> None:
    """Raise UserError if an entry that describes the factors has the wrong type, or the factors are not numbers."""
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
    if layers is not None and not (is_array(layers) and len(layers) == 2 and all(isinstance(end, int) for end in layers)):
        raise UserError(f"{path}: layers of the curve must be the first and the last one, got {layers!r:.60}")
    new = record["format"] == FORMAT
    for name in ("factors", "gains") if new else ("factors",):
        numbers = _each(lambda number: 1.0 if number is None and new else number, record.get(name))
        if isinstance(numbers, list) and not is_array(numbers, finite=False):
            raise UserError(f"{path}: {name} must be numbers, the same count in every layer")
    try:
        json.dumps({name: value for name, value in record.items() if name not in ("factors", "gains")}, allow_nan=False)
    except ValueError as error:
        raise UserError(
            f"{path}: holds NaN or an infinity, which are not numbers in JSON; give the file that a search wrote"
        ) from error


def json_of(factors: np.ndarray) -> list:
    """Factors as JSON values, with null for an infinite one."""
    return _each(lambda factor: None if factor == np.inf else factor, factors.tolist())


def array_of(factors: list) -> np.ndarray:
    """The inverse of `json_of`."""
    return np.array(_each(lambda factor: np.inf if factor is None else factor, factors), np.float64)


def _each(change: Callable[[Any], Any], values: Any) -> Any:
    """Apply `change` to each value of nested lists."""
    return [_each(change, value) for value in values] if isinstance(values, list) else change(values)


def _read(factors: Any, granularity: Any, *, nulls: bool) -> np.ndarray:
    """The factors of a file. With `nulls`, null means an infinite factor; all numbers must be finite."""
    if not nulls:
        return _checked(factors, granularity)
    finite = _checked(_each(lambda factor: 1.0 if factor is None else factor, factors), granularity)
    return np.where(np.array(_each(lambda factor: factor is None, factors)), np.inf, finite)


def _checked(values: Any, granularity: Any, what: str = "factors", *, infinite: bool = False) -> np.ndarray:
    if granularity not in GRANULARITIES:
        raise UserError(f"granularity {granularity!r} is not one of {', '.join(GRANULARITIES)}")
    try:
        array = np.asarray(values, np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{what} must be numbers, the same count in every layer") from error
    if array.ndim != _RANK[granularity] or not array.size:
        raise UserError(f"granularity {granularity} needs {what} of {_RANK[granularity]} axes, got shape {list(array.shape)}")
    finite = np.isfinite(array) | (infinite & (array == np.inf))
    good = finite & ((array >= 0) if what == "gains" else (array > 0))
    if not good.all():
        bounds = "not below 0" if what == "gains" else "above 0"
        raise UserError(f"{what} must be finite and {bounds}, got {array[~good][0]}")
    unbounded = array == (0 if what == "gains" else np.inf)  # a gain of 0, or a frequency that does not rotate
    if not (usable := unbounded | ((array >= LEAST) & (array <= MOST))).all():
        raise UserError(f"{what} must be from {LEAST:g} to {MOST:g}, which float32 can divide by; got {array[~usable][0]:g}")
    return array
