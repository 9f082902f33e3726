"""Where in a model a score became NaN or infinite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.mesh import on_one_device
from lpes_jax.models.llama.attention import causal_attention
from lpes_jax.models.llama.model import Llama, decoder_layer, layer_rows, output_logits, rms_norm, rotated
from lpes_jax.rope import Granularity


def first_bad_layer(
    model: Llama,
    ids: list[int],
    factors: Float[np.ndarray, "L *units"],
    granularity: Granularity,
    gains: Float[np.ndarray, "L *units"] | None = None,
    gains_granularity: Granularity = "layer",
) -> int | str | None:
    """The first layer whose output is not finite on a text; `embedding` or `logits` where it is before or behind the layers.

    None where everything is finite, as the last digits of a text that is run alone may let it be.
    """
    model, config, positions = on_one_device(model), model.config, jnp.arange(len(ids))
    of_gains = None if gains is None else jnp.asarray(gains, jnp.float32)
    table = config.rope_table(len(ids), jnp.asarray(factors, jnp.float32), granularity, of_gains, gains_granularity)
    rows = layer_rows(config, table)
    x = model.embed[...][jnp.array([ids], jnp.int32)]
    if not jnp.isfinite(x).all():
        return "embedding"
    for number, window in enumerate(config.windows(len(ids)).tolist()):
        weights, row = jax.tree.map(lambda leaf, number=number: leaf[number], (model.layers, rows))

        def attend(q: Array, k: Array, v: Array, row: Any = row, window: int = window) -> tuple[Array, None]:
            return causal_attention(*rotated(q, k, row, positions), v, window=window), None

        x, _ = decoder_layer(config, weights, x, attend)
        if not jnp.isfinite(x).all():
            return number
    logits = output_logits(model, rms_norm(x, model.norm[...], config.rms_norm_eps)[:, -1])
    return None if jnp.isfinite(logits).all() else "logits"
