"""`--to gguf`: a copy of a .gguf file that contains the factors, for llama.cpp and programs built on it.

    rounding = patch_gguf(Path("model.gguf"), Path("model-lpes.gguf"), factors)

Gains go into the query weights, without quantising again. A block of a quantised tensor has float16 scales that multiply all of
its weights, and a block is within one row. So multiplying the scales of a row by its gain multiplies the row, except for the
rounding of the scales. Only query rows, their bias, or the weights of the queries' norm (qwen3) change.

Factors change RoPE's frequencies. They go into the entries that llama.cpp has for this, which apply to all layers alike:

    llama           rope_freqs.weight: one divisor per frequency
    phi3            rope_factors_long.weight and rope_factors_short.weight, the same
    qwen2, qwen3    rope.scaling.factor: one divisor for all frequencies, if the file has no scaling of its own

Divisors that the file has (Llama 3.1, Phi-3 with a long window) are multiplied.

Header and data are copied as bytes. New keys and tensors are appended to the existing ones, and the tensors move as a whole.
This module makes the copy itself: the writer of the `gguf` package would write every key again from its Python value.

Letters: L layers, H heads, D head dim, E embedding.
"""

import os
import shutil
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from jaxtyping import Float, Shaped, UInt8

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.gains import gains_of_tensors
from lpes_jax.mark import GGUF_KEY, Mark, refuse_marked
from lpes_jax.models.llama.checkpoint import Checkpoint, GgufCheckpoint, check_tensors, load_llama
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.gguf import GgufFile, TensorInfo, align
from lpes_jax.models.llama.gguf_model import permute
from lpes_jax.rope import expand
from lpes_jax.ship.self_test import write_self_test

# Offsets of the float16 scales of a block, in bytes (llama.cpp's ggml-common.h). Not here: IQ1_M (a scale in four pieces),
# MXFP4 and NVFP4 (scales of 8 bits), and types that are never in a file.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,),
    "IQ1_S": (0,), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,), "IQ3_S": (0,), "IQ4_NL": (0,),
    "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
}  # fmt: skip
PLAIN = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
# Tensors by which llama.cpp divides RoPE's frequencies, per architecture. (It uses the long ones for a context beyond the
# trained window.)
_DIVISORS = {"llama": ("rope_freqs.weight",), "phi3": ("rope_factors_long.weight", "rope_factors_short.weight")}
_FACTOR = "rope.scaling.factor"
_TENSORS = {  # the tensors in which queries are linear, by their names in `gains_of_tensors`
    "query": "attn_q.weight", "query_bias": "attn_q.bias", "query_norm": "attn_q_norm.weight", "fused": "attn_qkv.weight",
}  # fmt: skip
_STOPS_ROTATION = 1e14  # a divisor: the angle at any position of any model is 0 in float32
_CHUNK_BYTES, _COPIED_BYTES = 2**20, 2**24
_STRING, _FLOAT32 = 8, 6  # value types of GGUF


def write_gguf_folder(
    checkpoint: Checkpoint,
    tokenizer: Any,
    folder: Path,
    factors: LayerFactors,
    *,
    found_for: dict[str, Any],
    copy: bool = False,
    self_test: bool = True,
) -> list[str]:
    """Fill an empty folder with NAME-lpes.gguf, the patched file, and self_test.json, the expected answers of a server.

    Returns lines to print, with {out} for the folder's final path.
    """
    if not isinstance(checkpoint, GgufCheckpoint):
        raise UserError(
            f"--to gguf copies a .gguf file, and --model {checkpoint.path} is a folder; give --to hf, and convert what it "
            "writes with llama.cpp's convert_hf_to_gguf.py"
        )
    name = f"{checkpoint.path.stem}-lpes.gguf"
    rounding = patch_gguf(checkpoint.path, folder / name, factors, "--factors")
    factors.save(folder / "factors.json")
    lines = [*rounding.lines(), f"to try it with llama.cpp: llama-cli -m {{out}}/{name}"]
    if self_test:
        written, original = (load_llama(source, "float32") for source in (GgufCheckpoint(folder / name), checkpoint))
        lines += write_self_test(folder, written, None, original, factors, tokenizer)
    return lines


@dataclass(frozen=True)
class Rounding:
    """The changes of a patched file: the number of tensors by type, and the rounding error of their rows against row x gain.

    The error of a row is relative: the norm of the difference over the norm of row x gain. `scales_subnormal` is the share of
    the new float16 scales that are subnormal numbers, which have fewer digits.
    """

    types: dict[str, int]
    mean: float
    most: float
    scales_subnormal: float
    rates: str | None

    def lines(self) -> list[str]:
        """The changes in words."""
        tensors = ", ".join(f"{count} of type {kind}" for kind, count in self.types.items())
        lines = []
        if tensors:
            lines.append(
                f"gains: in {sum(self.types.values())} tensors ({tensors}); rounding moves a row by {self.mean:.2g} of its "
                f"norm on average, {self.most:.2g} at most"
            )
        if self.scales_subnormal:
            lines.append(f"note: {100 * self.scales_subnormal:.2g} % of their scales are float16's subnormal numbers")
        if self.rates:
            lines.append(f"rates: in {self.rates}")
        if self.rates == _FACTOR:
            lines.append(f"note: llama.cpp reads {_FACTOR}; ollama's own engine does not, and would answer without the rates")
        return lines


def patch_gguf(source: Path, target: Path, factors: LayerFactors, where: str = "factors") -> Rounding:
    """Write `target`, a copy of the file `source` that contains these factors and their mark (`lpes_jax.mark`).

    Query weights, query bias (or norm) and RoPE's divisors change. All other bytes are copied.

    Raises:
        UserError: lpes_jax does not run the model; it already contains factors; the factors do not fit it, or the file has no
            entry for them; or the type of a tensor has no scales for a gain. Raised before anything is written. Also raised if
            a scale overflows; `target` is removed then.
        FileExistsError: `target` exists, or is a link.
    """
    checkpoint = GgufCheckpoint(source)
    gguf, config = checkpoint.gguf, checkpoint.config
    check_tensors(checkpoint)
    refuse_marked(config.mark, where)
    gains = gains_of_tensors(factors, config, where)
    divisors: dict[str, Float[np.ndarray, "half"]] = {}
    keys: dict[str, str | float] = {}
    rates = None
    if (shared := _shared_rates(factors, config, where)) is not None:
        if gguf.metadata["general.architecture"] in _DIVISORS:
            divisors = _divisors(gguf, config, shared)
            rates = " and ".join(divisors)
        else:
            keys = _linear_scaling(gguf, config, shared, where)
            rates = _FACTOR
    changes = list(_changes(gguf, config, gains))
    keys[GGUF_KEY] = Mark(factors.sha256, gains="query weights" if changes else None, rates=rates).gguf
    try:
        with open(source, "rb") as old, open(target, "xb") as new:
            moved = _copy(gguf, old, new, keys, divisors)
            measured = [_multiply(gguf, tensor, gains, old, new, tensor.offset + moved) for tensor, gains in changes]
            for name in divisors.keys() & gguf.tensors.keys():
                new.seek(gguf.tensors[name].offset + moved)
                new.write(divisors[name].tobytes())
            new.flush()
            os.fsync(new.fileno())
    except FileExistsError:
        raise
    except BaseException:
        target.unlink(missing_ok=True)
        raise
    rows = np.concatenate([rows for rows, _, _ in measured] or [np.zeros(1)])
    scales = sum(count for _, count, _ in measured)
    return Rounding(
        types=dict(Counter(tensor.type.name for tensor, _ in changes)),
        mean=float(rows.mean()),
        most=float(rows.max()),
        scales_subnormal=sum(subnormal for _, _, subnormal in measured) / scales if scales else 0.0,
        rates=rates,
    )


def _shared_rates(factors: LayerFactors, config: LlamaConfig, where: str) -> Float[np.ndarray, "half"] | None:
    """The factor of each frequency, one for all layers; None if all are 1."""
    values = jnp.asarray(factors.factors, jnp.float32)
    rates = np.asarray(expand(values, config.rotary_dim // 2, factors.granularity)).reshape(-1, config.rotary_dim // 2)
    if (rates == 1).all():
        return None
    if (rates != rates[0]).any():
        raise UserError(
            f"{where}: its factors differ by layer or KV group, and a .gguf file has one RoPE for all; give --to hf, which "
            "writes code that has them, --to hf-hook, or only gains (search --learn gains)"
        )
    return rates[0]


def _divisors(gguf: GgufFile, config: LlamaConfig, rates: Float[np.ndarray, "half"]) -> dict[str, Float[np.ndarray, "half"]]:
    """The tensors by which llama.cpp divides the frequencies, times the rates."""
    names = _DIVISORS[gguf.metadata["general.architecture"]]
    own = [name for name in names if name in gguf.tensors]
    if not own and config.rope.rope_type != "default":
        raise UserError(
            f"{gguf.path}: its RoPE is of type {config.rope.rope_type}, with which llama.cpp accepts no divisors of "
            "frequencies; give --to hf"
        )
    for name in own:
        if (kind := gguf.tensors[name].type.name) != "F32":
            raise UserError(f"{gguf.path}: tensor {name} is of type {kind}, and llama.cpp wants F32; convert the model again")
    before = {name: gguf.read(name) if name in own else np.ones_like(rates) for name in names}
    return {name: np.minimum(values * rates, _STOPS_ROTATION).astype("<f4") for name, values in before.items()}


def _linear_scaling(
    gguf: GgufFile, config: LlamaConfig, rates: Float[np.ndarray, "half"], where: str
) -> dict[str, str | float]:
    """The keys of linear scaling, for an architecture whose rope_freqs.weight llama.cpp does not read."""
    architecture = gguf.metadata["general.architecture"]
    if (rates != rates[0]).any():
        raise UserError(
            f"{where}: its factors differ by frequency, and llama.cpp reads no divisors of frequencies for models of type "
            f"{architecture}; give --to hf, --to hf-hook, or only gains (search --learn gains)"
        )
    scaling = f"{architecture}.rope.scal"  # rope.scaling.*, and rope.scale_linear, its older name
    own = [key for key in gguf.metadata if key.startswith(scaling)]
    if config.rope.rope_type != "default" or own:
        named = own[0] if own else f"RoPE of type {config.rope.rope_type}"
        raise UserError(f"{gguf.path}: it has a scaling of its own ({named}), and no place for factors beside it; give --to hf")
    if not np.isfinite(rates[0]):
        raise UserError(f"{where}: its factors stop the rotation, which {_FACTOR} cannot express; give --to hf")
    return {f"{architecture}.rope.scaling.type": "linear", f"{architecture}.{_FACTOR}": float(rates[0])}


def _changes(
    gguf: GgufFile, config: LlamaConfig, gains: Mapping[str, Float[np.ndarray, "L rows"]]
) -> Iterator[tuple[TensorInfo, Float[np.ndarray, "rows"]]]:
    """The tensors to multiply, and the gain of each of their first rows. The rows after these are not queries."""
    for leaf, layer_gains in gains.items():
        name = _TENSORS["fused" if config.fused else leaf]
        if gguf.metadata["general.architecture"] == "llama":
            layer_gains = permute(layer_gains.T, config.num_heads).T
        for layer, row_gains in enumerate(layer_gains):
            tensor = gguf.tensors[f"blk.{layer}.{name}"]
            if (row_gains == 1).all():
                continue
            kind = tensor.type.name
            if kind not in PLAIN and (kind not in SCALES or len(tensor.shape) == 1):
                raise UserError(
                    f"{gguf.path}: tensor {tensor.name} is of type {kind}, whose scales cannot take a gain; give a file with "
                    "queries of type Q4_K, Q5_K, Q6_K, Q8_0, F16 or another with scales of 16 bits, or --to hf"
                )
            yield tensor, row_gains


def _copy(
    gguf: GgufFile,
    old: BinaryIO,
    new: BinaryIO,
    keys: Mapping[str, str | float],
    divisors: Mapping[str, Float[np.ndarray, "half"]],
) -> int:
    """Copy the file with more keys, and with the divisors that it lacks. Returns the number of bytes by which tensors moved.

    New divisors come after all other tensors, so the offsets of these within the data are unchanged.
    """
    layout = gguf.layout
    added = b"".join(_text(key) + _value(value) for key, value in keys.items())
    size = old.seek(0, os.SEEK_END) - layout.data
    new_tensors = {name: values for name, values in divisors.items() if name not in gguf.tensors}
    lines, tail = b"", bytes(align(size, layout.alignment) - size)
    for name, values in new_tensors.items():
        lines += _text(name) + struct.pack("<IQIQ", 1, len(values), GGMLQuantizationType.F32, size + len(tail))
        tail += values.tobytes() + bytes(align(values.nbytes, layout.alignment) - values.nbytes)
    old.seek(0)
    new.write(old.read(8))  # magic number and version
    num_tensors, num_keys = struct.unpack("<QQ", old.read(16))
    new.write(struct.pack("<QQ", num_tensors + len(new_tensors), num_keys + len(keys)))
    new.write(old.read(layout.metadata_end - 24) + added)
    new.write(old.read(layout.header_end - layout.metadata_end) + lines)
    begin = align(new.tell(), layout.alignment)
    new.write(bytes(begin - new.tell()))
    old.seek(layout.data)
    shutil.copyfileobj(old, new, _COPIED_BYTES)
    if new_tensors:
        new.write(tail)
    return begin - layout.data


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | float) -> bytes:
    return struct.pack("<I", _STRING) + _text(value) if isinstance(value, str) else struct.pack("<If", _FLOAT32, value)


def _multiply(
    gguf: GgufFile, tensor: TensorInfo, gains: Float[np.ndarray, "rows"], old: BinaryIO, new: BinaryIO, offset: int
) -> tuple[Float[np.ndarray, "rows"], int, int]:
    """Write a tensor's first rows times their gains. Returns the error of each row, and the numbers of (subnormal) scales."""
    kind, row_bytes = tensor.type.name, tensor.nbytes // tensor.shape[0]
    step = max(1, _CHUNK_BYTES // row_bytes)
    rounding, scales, subnormal = [], 0, 0
    old.seek(tensor.offset)
    new.seek(offset)
    for first in range(0, len(gains), step):
        row_gains = gains[first : first + step]
        rows = np.frombuffer(old.read(row_bytes * len(row_gains)), np.uint8).reshape(len(row_gains), row_bytes)
        changed = rows.copy()
        for numbers in _numbers(changed, kind):
            before = numbers.astype(np.float32)
            with np.errstate(over="ignore", invalid="ignore"):
                after = (before * row_gains[:, None]).astype(numbers.dtype)
            if (np.isfinite(before) & ~np.isfinite(after.astype(np.float32))).any():
                raise UserError(
                    f"{gguf.path}: a gain of {row_gains.max():g} makes tensor {tensor.name} overflow {numbers.dtype.name}; "
                    "give --to hf-hook, or search gains with a lower --max-gain"
                )
            numbers[...] = after
            if kind in SCALES:
                scales += after.size
                subnormal += int(((after != 0) & (np.abs(after) < np.finfo(np.float16).smallest_normal)).sum())
        new.write(changed.tobytes())
        wanted = dequantize(rows, tensor.type).astype(np.float64) * row_gains[:, None]
        length = np.linalg.norm(wanted, axis=1)
        rounding.append(np.linalg.norm(dequantize(changed, tensor.type) - wanted, axis=1) / np.where(length, length, 1))
    return np.concatenate(rounding), scales, subnormal


def _numbers(rows: UInt8[np.ndarray, "rows bytes"], kind: str) -> list[Shaped[np.ndarray, "rows blocks"]]:
    """Views of the numbers to multiply: the scales of each block, or the weights themselves of a plain tensor."""
    if kind in PLAIN:
        return [rows.view(PLAIN[kind])]
    size = next(block_bytes for name, (_, block_bytes) in GGML_QUANT_SIZES.items() if name.name == kind)
    blocks = rows.reshape(len(rows), -1, size)
    return [blocks[:, :, begin : begin + 2].view("<f2")[..., 0] for begin in SCALES[kind]]
