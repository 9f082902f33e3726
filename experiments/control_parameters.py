"""Ways to give a model n new numbers in each layer: `CONTROLS[name](model, its table, values) -> (model, table)`.

    rotary       divide the layer's positions, one value per frequency band: our method
    temperature  multiply the layer's attention logits, by one value, or each band's part of q . k by one
    both         the first half are rotary factors, the second half temperatures
    norm_gain    multiply the channels of the layer's norm before attention, in n equal blocks
    adapter      add sum_i c_i u_i v_i^T |W| to the layer's query weights W, with fixed random unit vectors u_i and v_i

At `START` the model is unchanged, bit for bit. All are differentiable in the values, which may be traced.

Letters: L layers, n numbers per layer, R rotated part of a head dim D, E embedding, H heads.
"""

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.errors import UserError
from lpes_jax.gains import by_tensor, multiplied
from lpes_jax.models.llama.model import Llama, with_weights
from lpes_jax.rope import RopeTable, gains_of_head

Control = Literal["rotary", "temperature", "both", "norm_gain", "adapter"]
Applied = tuple[Llama, RopeTable]


def rotary(model: Llama, own: RopeTable, values: Float[Array, "L n"]) -> Applied:
    """Each layer's frequencies, in n bands, divided by its values."""
    return model, own.scaled(values, "layer_band")


def temperature(model: Llama, own: RopeTable, values: Float[Array, "L n"]) -> Applied:
    """Each layer's attention logits times its value; with n values, band b's part of q . k times value b.

    The queries are scaled: their norm if they have one, because it comes after the weights, else weights and bias. Dimensions i
    and i + R/2 rotate together and share a band. Dimensions that are not rotated are scaled only for n = 1.
    """
    config = model.config
    half, bands = config.rotary_dim // 2, values.shape[1]
    if half % bands:
        raise UserError(f"--counts {bands} must divide the {half} frequencies of a head")
    by_pair = jnp.repeat(values, half // bands, axis=1)
    by_channel = gains_of_head(by_pair[:, None], config.head_dim)  # [L, 1, D], 1 where nothing is rotated
    if bands == 1:
        by_channel = jnp.broadcast_to(values[:, :, None], by_channel.shape)
    return multiplied(model, by_tensor(by_channel, config)), own


def both(model: Llama, own: RopeTable, values: Float[Array, "L n"]) -> Applied:
    """`rotary` with the first n/2 values of a layer and `temperature` with the rest."""
    if values.shape[1] % 2:
        raise UserError(f"--counts {values.shape[1]} must be even for `both`: half are factors, half are temperatures")
    factors, temperatures = jnp.split(values, 2, axis=1)
    _, table = rotary(model, own, factors)
    return temperature(model, table, temperatures)


def norm_gain(model: Llama, own: RopeTable, values: Float[Array, "L n"]) -> Applied:
    """The channels of each layer's attention norm, in n equal blocks, times its values."""
    width, blocks = model.config.hidden_size, values.shape[1]
    if width % blocks:
        raise UserError(f"--counts {blocks} must divide the {width} channels of the model")
    return multiplied(model, {"attention_norm": jnp.repeat(values, width // blocks, axis=1)}), own


def adapter(model: Llama, own: RopeTable, values: Float[Array, "L n"], seed: int = 0) -> Applied:
    """W_q + |W_q| sum_i c_i u_i v_i^T in each layer; u_i and v_i are unit vectors drawn from `seed`, |W| Frobenius's norm."""
    query, rank = model.layers.query[...], values.shape[1]
    layers, inputs, outputs = query.shape
    rng = np.random.default_rng(seed)
    u, v = (rng.standard_normal((layers, rank, size)) for size in (inputs, outputs))
    u, v = (jnp.asarray(part / np.linalg.norm(part, axis=2, keepdims=True), values.dtype) for part in (u, v))
    wide = query.astype(values.dtype)
    scale = jnp.linalg.norm(wide, axis=(1, 2), keepdims=True)
    change = jnp.einsum("ln,lni,lno->lio", values, u, v, precision=jax.lax.Precision.HIGHEST)
    return with_weights(model, query=(wide + scale * change).astype(query.dtype)), own


CONTROLS: dict[Control, Callable[..., Applied]] = {
    "rotary": rotary,
    "temperature": temperature,
    "both": both,
    "norm_gain": norm_gain,
    "adapter": adapter,
}
START: dict[Control, float] = {"rotary": 1.0, "temperature": 1.0, "both": 1.0, "norm_gain": 1.0, "adapter": 0.0}
