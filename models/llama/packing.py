"""Blocks of quantised weights from files, for `packed.py`: every type of GGUF that is made of codes and scales, and int8.

    blocks = from_gguf(data, kind)      # uint8 [rows, bytes] of a file -> Blocks
    blocks = rounded(tensor)            # any matrix, to int8 in blocks of 32
    packed = pack([...])                # blocks of all layers -> Packed

The tensors of one matrix may be of different types in different layers: llama.cpp's Q4_K_M files have Q6_K in half of the
layers. All layers then have the layout of the widest one, which holds every value exactly.

Letters: L layers, R rows (outputs), I inputs, B blocks of a row, S their groups.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from jaxtyping import Float, Int8, UInt8

from lpes_jax.models.llama.packed import GROUP, Packed


@dataclass(frozen=True)
class Layout:
    """How a matrix is packed.

    Attributes:
        bits: Of a code: 4, 5, 6 or 8.
        group: Inputs that share 16-bit numbers.
        block: Inputs that share 8-bit numbers; None: there are none.
        minimum: Whether blocks have a minimum.
    """

    bits: int
    group: int
    block: int | None = None
    minimum: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory per weight, with scales."""
        numbers = 1 + self.minimum
        return self.bits + numbers * (16 / self.group + (0 if self.block is None else 8 / self.block))


@dataclass(frozen=True)
class Blocks:
    """A matrix as codes and scales: value = scale (code - offset) - minimum, with the attributes of `Packed`.

    `codes` are uint8 from 0 to 2^bits - 1, or int8 with offset 0 (8 bits).
    """

    layout: Layout
    codes: UInt8[np.ndarray, "R I"] | Int8[np.ndarray, "R I"]
    offset: int
    scale: Float[np.ndarray, "R S"]
    subscale: Int8[np.ndarray, "R B"] | None = None
    minimum: Float[np.ndarray, "R S"] | None = None
    subminimum: Int8[np.ndarray, "R B"] | None = None


# The layout of each type in memory. Codes of 2 and 3 bits take 4.
LAYOUTS = {
    GGMLQuantizationType.Q4_0: Layout(4, 32),
    GGMLQuantizationType.Q4_1: Layout(4, 32, minimum=True),
    GGMLQuantizationType.Q5_0: Layout(5, 32),
    GGMLQuantizationType.Q5_1: Layout(5, 32, minimum=True),
    GGMLQuantizationType.Q8_0: Layout(8, 32),
    GGMLQuantizationType.Q2_K: Layout(4, 256, 16, minimum=True),
    GGMLQuantizationType.Q3_K: Layout(4, 256, 16),
    GGMLQuantizationType.Q4_K: Layout(4, 256, 32, minimum=True),
    GGMLQuantizationType.Q5_K: Layout(5, 256, 32, minimum=True),
    GGMLQuantizationType.Q6_K: Layout(6, 256, 16),
}
INT8 = Layout(8, 32)


def int8_layout(inputs: int) -> Layout:
    """The layout of `rounded`: blocks of 32, or whole rows if these cannot be divided so."""
    return INT8 if inputs % 32 == 0 else Layout(8, inputs)


def combined(layouts: Sequence[Layout]) -> Layout:
    """The layout that holds the values of all of these exactly."""
    groups, blocks = [layout.group for layout in layouts], [layout.block for layout in layouts if layout.block is not None]
    block = math.gcd(*blocks, *groups) if blocks else None
    group = math.gcd(*groups)
    minimum = any(layout.minimum for layout in layouts)
    return Layout(max(layout.bits for layout in layouts), group, block, minimum)


def from_gguf(data: UInt8[np.ndarray, "R bytes"], kind: GGMLQuantizationType) -> Blocks:
    """The blocks of rows of a GGUF tensor; `kind` is one of `LAYOUTS`."""
    blocks = data.reshape(len(data), -1, GGML_QUANT_SIZES[kind][1])
    parts = _K_PARTS[kind](blocks) if kind in _K_PARTS else _plain(blocks, kind)
    by_row = {name: values.reshape(len(data), -1) for name, values in parts.items()}
    for name in ("subscale", "subminimum"):  # from -128 to 127, or from 0 to 63
        by_row |= {name: by_row[name].view(np.int8)} if name in by_row else {}
    return Blocks(LAYOUTS[kind], offset=_OFFSETS.get(kind, 0), **by_row)


def rounded(tensor: Float[np.ndarray, "R I"]) -> Blocks:
    """The matrix in int8, each block with the smallest float16 scale that its largest weight allows."""
    layout = int8_layout(tensor.shape[1])
    blocks = tensor.astype(np.float32).reshape(len(tensor), -1, layout.group)
    needed = np.abs(blocks).max(axis=2) / 127
    scale = needed.astype(np.float16)
    scale = np.where(scale < needed, np.nextafter(scale, np.float16(np.inf)), scale)
    wide = scale.astype(np.float32)
    inverse = np.divide(1, wide, out=np.zeros_like(wide), where=wide > 0)
    codes = np.clip(np.rint(blocks * inverse[..., None]), -127, 127).astype(np.int8)
    return Blocks(layout, codes.reshape(tensor.shape), 0, scale)


def part_shapes(layout: Layout, shape: tuple[int, int, int]) -> dict[str, tuple[tuple[int, ...], type[np.generic]]]:
    """Shape and dtype of each part of a packed matrix of all layers, L, R, I."""
    layers, rows, inputs = shape
    narrow, groups = layout.bits < 8, inputs // layout.group
    parts: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "codes": ((layers, rows, inputs // 2 if narrow else inputs), np.uint8 if narrow else np.int8),
        "offset": ((layers,), np.int8),
        "scale": ((layers, rows, groups), np.float16),
    }
    if narrow and layout.bits > 4:
        parts["high"] = (layers, rows, inputs * (layout.bits - 4) // 8), np.uint8
    if layout.minimum:
        parts["minimum"] = (layers, rows, groups), np.float16
    if layout.block is not None:
        for name in ("subscale", "subminimum") if layout.minimum else ("subscale",):
            parts[name] = (layers, rows, inputs // layout.block), np.int8
    return parts


class Stack:
    """Host memory for a matrix of all layers, which is filled layer by layer.

    Args:
        layout: Of all layers.
        shape: L, R, I.
    """

    def __init__(self, layout: Layout, shape: tuple[int, int, int]):
        self.layout = layout
        # What a narrower layer lacks: offset and minimum 0, factors of scales 1.
        empty = {"offset": 0, "minimum": 0, "subscale": 1, "subminimum": 1}
        self.parts: dict[str, np.ndarray] = {
            name: np.full(part, empty[name], kind) if name in empty else np.empty(part, kind)
            for name, (part, kind) in part_shapes(layout, shape).items()
        }

    def fill(self, layer: int, blocks: Blocks) -> None:
        """Store the blocks of a layer in the layout of all."""
        parts, layout, own = self.parts, self.layout, blocks.layout
        if layout.bits == 8:
            codes = blocks.codes
            parts["codes"][layer] = codes if codes.dtype == np.int8 else codes.astype(np.int8) - np.int8(blocks.offset)
        else:
            parts["codes"][layer] = _gather(blocks.codes & np.uint8(15), 4)
            parts["offset"][layer] = blocks.offset
            if "high" in parts:
                parts["high"][layer] = _gather(blocks.codes >> np.uint8(4), layout.bits - 4)
        parts["scale"][layer] = blocks.scale.repeat(own.group // layout.group, axis=1)
        if blocks.minimum is not None:
            parts["minimum"][layer] = blocks.minimum.repeat(own.group // layout.group, axis=1)
        for name, values in (("subscale", blocks.subscale), ("subminimum", blocks.subminimum)):
            if values is not None and own.block is not None and layout.block is not None:
                parts[name][layer] = values.repeat(own.block // layout.block, axis=1)


def pack(layers: Sequence[Blocks]) -> Packed:
    """Blocks of all layers, on the default device."""
    stack = Stack(combined([blocks.layout for blocks in layers]), (len(layers), *layers[0].codes.shape))
    for layer, blocks in enumerate(layers):
        stack.fill(layer, blocks)
    return Packed(**jax.device_put(stack.parts))


def _gather(codes: UInt8[np.ndarray, "R I"], bits: int) -> UInt8[np.ndarray, "R bytes"]:
    """Codes of few bits in bytes, in the order of `Packed`."""
    groups = codes.reshape(len(codes), -1, 8 // bits, GROUP * bits // 8)
    gathered = groups[:, :, 0].copy()
    for index in range(1, 8 // bits):
        gathered |= groups[:, :, index] << np.uint8(bits * index)
    return gathered.reshape(len(codes), -1)


def _plain(blocks: UInt8[np.ndarray, "R S bytes"], kind: GGMLQuantizationType) -> dict[str, np.ndarray]:
    """Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0: a scale, perhaps a minimum (stored with the other sign), perhaps fifth bits, codes."""
    layout, begin = LAYOUTS[kind], 2
    parts = {"scale": _float16(blocks, 0)}
    if layout.minimum:
        parts["minimum"], begin = -_float16(blocks, 2), 4
    if layout.bits == 8:
        return parts | {"codes": blocks[:, :, begin:].view(np.int8)}
    codes = _bits(blocks[:, :, -16:], 4, 16)
    if layout.bits == 5:
        fifth = np.unpackbits(blocks[:, :, begin : begin + 4], axis=2, bitorder="little")
        codes = codes | fifth.reshape(codes.shape) << np.uint8(4)
    return parts | {"codes": codes}


def _q2_k(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    both, codes = blocks[:, :, :16], _bits(blocks[:, :, 16:80], 2, 32)
    scales = {"subscale": both & np.uint8(15), "subminimum": both >> np.uint8(4)}
    return scales | {"codes": codes, "scale": _float16(blocks, 80), "minimum": _float16(blocks, 82)}


def _q3_k(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    high, low = _bits(blocks[:, :, :32], 1, 32), _bits(blocks[:, :, 32:96], 2, 32)
    subscale = _bits(blocks[:, :, 96:104], 4, 8) | _bits(blocks[:, :, 104:108], 2, 4) << np.uint8(4)
    return {
        "codes": low | high << np.uint8(2),
        "scale": _float16(blocks, 108),
        "subscale": subscale.view(np.int8) - np.int8(32),
    }


def _q4_k(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    return _q4_q5_scales(blocks) | {"codes": _bits(blocks[:, :, 16:], 4, 32)}


def _q5_k(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    codes = _bits(blocks[:, :, 48:], 4, 32) | _bits(blocks[:, :, 16:48], 1, 32) << np.uint8(4)
    return _q4_q5_scales(blocks) | {"codes": codes}


def _q4_q5_scales(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    """16-bit scale and minimum, then eight scales and eight minima of 6 bits: the first four whole, the others in two parts."""
    first, second, rest = (blocks[:, :, begin : begin + 4] for begin in (4, 8, 12))
    low, high = np.uint8(15), np.uint8(0x30)
    subscale = [first & np.uint8(63), (rest & low) | (first >> np.uint8(2) & high)]
    subminimum = [second & np.uint8(63), (rest >> np.uint8(4)) | (second >> np.uint8(2) & high)]
    parts = {"subscale": np.concatenate(subscale, axis=2), "subminimum": np.concatenate(subminimum, axis=2)}
    return parts | {"scale": _float16(blocks, 0), "minimum": _float16(blocks, 2)}


def _q6_k(blocks: UInt8[np.ndarray, "R S bytes"]) -> dict[str, np.ndarray]:
    codes = _bits(blocks[:, :, :128], 4, 64) | _bits(blocks[:, :, 128:192], 2, 32) << np.uint8(4)
    return {"codes": codes, "scale": _float16(blocks, 208), "subscale": blocks[:, :, 192:208].view(np.int8)}


_K_PARTS: dict[GGMLQuantizationType, Callable[[np.ndarray], dict[str, np.ndarray]]] = {
    GGMLQuantizationType.Q2_K: _q2_k,
    GGMLQuantizationType.Q3_K: _q3_k,
    GGMLQuantizationType.Q4_K: _q4_k,
    GGMLQuantizationType.Q5_K: _q5_k,
    GGMLQuantizationType.Q6_K: _q6_k,
}
_OFFSETS = {
    GGMLQuantizationType.Q4_0: 8, GGMLQuantizationType.Q5_0: 16, GGMLQuantizationType.Q3_K: 4, GGMLQuantizationType.Q6_K: 32,
}  # fmt: skip


def _float16(blocks: UInt8[np.ndarray, "R S bytes"], begin: int) -> Float[np.ndarray, "R S"]:
    return np.ascontiguousarray(blocks[:, :, begin : begin + 2]).view("<f2")[:, :, 0]


def _bits(values: UInt8[np.ndarray, "R S bytes"], bits: int, width: int) -> UInt8[np.ndarray, "R S codes"]:
    """Codes of `bits` bits: the lowest of `width` bytes, then the next of the same bytes, and so on."""
    rows, groups, _ = values.shape
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    spread = values.reshape(rows, groups, -1, 1, width) >> shifts & np.uint8(2**bits - 1)
    return spread.reshape(rows, groups, -1)
