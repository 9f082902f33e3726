"""Weights of the layers in 8 bits, for products with activations in 8 bits: int8, or fp8 (float8_e4m3fn).

    scoring_model = with_eight_bits(model, "int8")    # in model.py: a copy; embedding, head and norms are the same arrays

The weights of an output channel share a scale, and are rounded once, when the copy is made. The activations of a token share a
scale, which is computed in every pass. Products are summed in int32 or float32 and then multiplied by both scales. Everything
between these products keeps the model's dtype: attention, softmax, RoPE, norms, residual states, and the logits.

What XLA makes of a product on an NVIDIA GPU (read in its `gemm_rewriter.cc`, 2025 and 2026):

- fp8: it calls cuBLASLt (`__cublas$lt$matmul$f8`) from compute capability 8.9 on (Ada, Hopper) for a dot whose operands are
  both float8 as they are, or `convert(float8) * scale` with a scalar scale. A scale per token or channel on an operand does not
  match: the product is then computed in the wider type, without a message. So the dot here has bare float8 operands, and its
  result is scaled, in the fusion that reads it. The result may be bfloat16, float16 or float32.
- int8: it calls cuBLAS for int8 x int8 -> int32.
- Before Blackwell, cuBLASLt's fp8 kernels need the contracted axis of both operands to be contiguous, and XLA otherwise
  transposes them in each call. So the weights are stored as [out, in].

`jax.nn.scaled_matmul` is not used: its scales are those of blocks (MXFP8, NVFP4), which need Blackwell. qwix (0.1.8 on PyPI) is
not used: `qwix.quantize_model` replaces the products inside calls of Flax modules, and this decoder is a function of a pytree;
`qwix.dot_general` computes the same product and composes with scan and vmap, but adds nothing to these lines.

Letters: L layers, I inputs and O outputs of a weight.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from lpes_jax.errors import UserError
from lpes_jax.models.llama.packed import Weights, dense

EightBits = Literal["int8", "fp8"]
PROJECTIONS = ("query", "key", "value", "output", "gate", "up", "down")
_DTYPES = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
_FP8_CAPABILITY = 8.9  # Ada; Hopper has 9.0


class EightBitWeights(nnx.Module):
    """A weight in 8 bits: value [o, i] x scale [o]. The weights of all layers have a leading axis L."""

    def __init__(self, values: Shaped[Array, "*L O I"], scales: Float[Array, "*L O"]):
        self.values, self.scales = nnx.Param(values), nnx.Param(scales)

    def product(self, x: Float[Array, "*any I"]) -> Float[Array, "*any O"]:
        """x times the weight, with x rounded to 8 bits per token, in x's dtype. A token that is not finite gives NaN."""
        values, scales = rounded(x, self.values.dtype)
        if self.values.dtype == jnp.int8:
            kind = jnp.int32
        else:
            kind = x.dtype if x.dtype.itemsize == 2 else jnp.float32
        axes = ((x.ndim - 1,), (1,)), ((), ())
        product = jax.lax.dot_general(values, self.values[...], axes, preferred_element_type=kind)
        return (product.astype(jnp.float32) * scales[..., None] * self.scales[...]).astype(x.dtype)


def rounded(x: Float[Array, "*any I"], dtype: jnp.dtype) -> tuple[Shaped[Array, "*any I"], Float[Array, "*any"]]:
    """x in 8 bits, and float32 scales of its last axis: x is about value x scale. NaN and infinity make the scale NaN."""
    most = 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)
    wide = x.astype(jnp.float32)
    largest = jnp.abs(wide).max(axis=-1)
    scales = jnp.where(largest == 0, 1.0, jnp.where(jnp.isfinite(largest), largest, jnp.nan) / most)
    scaled = wide / scales[..., None]
    return (jnp.round(scaled) if dtype == jnp.int8 else scaled).astype(dtype), scales


@partial(jax.jit, static_argnames=("kind", "dtype"))
def stacked(
    weights: Weights | Float[Array, "L I O"], kind: EightBits, dtype: DTypeLike = jnp.float32
) -> tuple[Shaped[Array, "L O I"], Float[Array, "L O"]]:
    """A weight of all layers in 8 bits, layer by layer, because unpacked or float32 copies of all would need much memory.

    `dtype` is that of unpacked weights.
    """
    return jax.lax.map(lambda layer: rounded(dense(layer, dtype).T, jnp.dtype(_DTYPES[kind])), weights)


def check_eight_bits(kind: EightBits, flag: str = "--score-dtype") -> None:
    """Raise UserError if this process's devices have no products of this kind."""
    device = jax.local_devices()[0]
    capability = str(getattr(device, "compute_capability", ""))
    if kind == "int8" or (capability.replace(".", "", 1).isdigit() and float(capability) >= _FP8_CAPABILITY):
        return
    what = "the CPU" if device.platform == "cpu" else f"this device ({device.device_kind})"
    raise UserError(f"{flag} fp8: {what} has no fp8 products, which need an NVIDIA GPU from Ada or Hopper on; use {flag} int8")
