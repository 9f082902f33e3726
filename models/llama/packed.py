"""Matrices that stay quantised in memory: codes and scales of blocks, unpacked when a product needs them.

    value = scale (code - offset) - minimum

A block is a few weights of one row that share a scale. The types of llama.cpp's files differ in the bits of a code (4 to 8), in
the size of a block, and in how a scale is stored: one 16-bit number per block, or one 16-bit number for several blocks times an
8-bit number per block. `Packed` has all of them, so every type has the same program:

    type                Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K  Q3_K Q4_K  Q5_K  Q6_K
    bits in the file    4.5  5    5.5  6    8.5  2.625 3.44 4.5   5.5   6.56
    bits in memory      4.5  5    5.5  6    8.5  5.125 4.56 4.625 5.625 6.56

`packing.py` makes them of files. The values are those of the dequantised file, computed in float32. The weights are constants:
a gradient goes through a product to its input, and unpacks the matrix once more instead of keeping it.

Letters: L layers, O outputs (rows of the matrix), I inputs, B blocks of a row, S their groups (super-blocks).
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from lpes_jax.errors import UserError

GROUP = 32  # inputs whose codes share bytes: no byte has codes of two groups, so rows can be split between groups
PARTS = ("codes", "high", "offset", "scale", "subscale", "minimum", "subminimum", "row_gains", "input_gains")


class Packed(nnx.Module):
    """One matrix of every layer, or of one layer inside a scan (without the axis L).

    In each group of `GROUP` inputs, the codes of inputs 0 to 15 are the low halves of 16 bytes and those of inputs 16 to 31 the
    high halves. `high` has further bits in the same way: with 2 bits, byte j of 8 has those of inputs j, j + 8, j + 16, j + 24.

    Attributes:
        codes: int8 [L, O, I], signed codes; or uint8 [L, O, I / 2], the low 4 bits of codes.
        high: uint8 [L, O, I / 8 or I / 4], the fifth bit, or the fifth and sixth; None if there are none.
        offset: int8 [L].
        scale: float16 [L, O, S].
        subscale: int8 [L, O, B], multiplies the scales of blocks; None: S = B.
        minimum: float16 [L, O, S]; None: 0.
        subminimum: int8 [L, O, B], multiplies the minima; None if `subscale` or `minimum` is.
        row_gains: Multiply the rows, `[L, O]`; None: 1. They are float32 or wider, and the product is rounded to the weights'
            dtype.
        input_gains: The same for the inputs, `[L, I]`.
    """

    codes: nnx.Param
    high: nnx.Param | None
    offset: nnx.Param
    scale: nnx.Param
    subscale: nnx.Param | None
    minimum: nnx.Param | None
    subminimum: nnx.Param | None
    row_gains: nnx.Param | None
    input_gains: nnx.Param | None

    def __init__(self, **parts: Array | None):
        for name in PARTS:
            part = parts.get(name)
            setattr(self, name, None if part is None else nnx.Param(part))

    @property
    def inputs(self) -> int:
        """I."""
        return self.codes.shape[-1] * (2 if self.codes.dtype == jnp.uint8 else 1)

    def unpacked(self, dtype: DTypeLike) -> Float[Array, "*L O I"]:
        """The matrix. Computed in float32, then rounded to `dtype`, as when a file is loaded without packing."""
        codes = self.codes[...]
        codes = _spread(codes, 4) if codes.dtype == jnp.uint8 else codes.astype(jnp.float32)
        inputs = codes.shape[-1]
        if self.high is not None:
            codes = codes + 16 * _spread(self.high[...], 8 * self.high.shape[-1] // inputs)
        codes = codes - self.offset[...].astype(jnp.float32)[..., None, None]
        scale = _of_blocks(self.scale[...].astype(jnp.float32), self.subscale)
        values = codes.reshape(*scale.shape, -1) * scale[..., None]
        if self.minimum is not None:
            values = values - _of_blocks(self.minimum[...].astype(jnp.float32), self.subminimum)[..., None]
        matrix = values.reshape(codes.shape).astype(dtype)
        for gains, axis in ((self.row_gains, -1), (self.input_gains, -2)):
            if gains is not None:
                wide = np.promote_types(matrix.dtype, gains.dtype)
                matrix = (matrix.astype(wide) * jnp.expand_dims(gains[...], axis).astype(wide)).astype(dtype)
        return matrix

    def with_gains(self, *, rows: Float[Array, "L O"] | None = None, inputs: Float[Array, "L I"] | None = None) -> "Packed":
        """The same codes with gains. Raises UserError if there already are such gains: a product is rounded once."""
        parts = {name: part[...] for name in PARTS if (part := getattr(self, name)) is not None}
        new = {name: gains for name, gains in (("row_gains", rows), ("input_gains", inputs)) if gains is not None}
        if parts.keys() & new:
            raise UserError("packed weights can be multiplied once; load the model with --weight-format full")
        return Packed(**parts, **new)


Weights = nnx.Param | Packed  # a matrix [L, I, O], or packed [L, O, I]


def dense(weights: Weights | Float[Array, "*L I O"], dtype: DTypeLike) -> Float[Array, "*L I O"]:
    """The matrix of weights that may be packed; `dtype` is that of unpacked ones."""
    return weights.unpacked(dtype).swapaxes(-1, -2) if isinstance(weights, Packed) else weights[...]


def _spread(array: Array, bits: int) -> Float[Array, "... I"]:
    """float32 values of the packed bits (see `Packed`)."""
    count, width = 8 // bits, GROUP * bits // 8
    shifts = jnp.arange(0, 8, bits, dtype=jnp.uint8)[:, None]
    groups = array.reshape(*array.shape[:-1], -1, 1, width)
    values = (groups >> shifts) & jnp.uint8(2**bits - 1)
    return values.reshape(*array.shape[:-1], count * array.shape[-1]).astype(jnp.float32)


def _of_blocks(scale: Float[Array, "... S"], subscale: nnx.Param | None) -> Float[Array, "... B"]:
    if subscale is None:
        return scale
    values = subscale[...].astype(jnp.float32)
    return (values.reshape(*scale.shape, -1) * scale[..., None]).reshape(values.shape)
