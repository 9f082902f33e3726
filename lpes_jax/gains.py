"""Gains put into the weights: a model that answers with plain tables as the given one does with gains.

A gain multiplies its frequency's part of q . k. The queries are linear in their weights and bias, and in the weight of their
norm where they have one, so the gains of their elements go there: nothing is left to do at inference.

Letters: L layers, G = 1 or K KV groups, H heads, D head dim, E embedding.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import gains_of_head


def fold_gains(model: Llama, factors: LayerFactors, where: str = "factors") -> Llama:
    """The model with the gains of `factors` in its weights; the given one stays as it is.

    They are multiplied in float32 and rounded to the weights' dtype. Layers without RoPE and elements that are not rotated
    stay. Raises UserError where the gains do not fit the model, and for KV groups with gains of their own where one norm is of
    the queries of all heads (qwen3).
    """
    config = model.config
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    of_head = head_gains(factors, config)
    changes: dict[str, Float[Array, "..."]] = {}
    if model.layers.query_norm is not None:
        changes["query_norm"] = _scaled(model.layers.query_norm[...], norm_gains(of_head, where))
    else:
        of_heads = query_gains(of_head, config)
        changes["query"] = _scaled(model.layers.query[...], of_heads[:, None, :])
        if model.layers.query_bias is not None:
            changes["query_bias"] = _scaled(model.layers.query_bias[...], of_heads)
    folded = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    for name, value in changes.items():
        setattr(folded.layers, name, nnx.Param(value))
    return folded


def head_gains(factors: LayerFactors, config: LlamaConfig) -> Float[np.ndarray, "L G D"]:
    """The gain of each element of a head, float32, by the layer's KV groups where they differ."""
    return np.asarray(gains_of_head(config.rope_table(1, factors).gains, config.head_dim), np.float32)


def query_gains(of_head: Float[np.ndarray, "L G D"], config: LlamaConfig) -> Float[np.ndarray, "L rows"]:
    """The gain of each row of the query weights, [L, H D]."""
    return np.repeat(of_head, config.num_heads // of_head.shape[1], axis=1).reshape(config.num_layers, -1)


def norm_gains(of_head: Float[np.ndarray, "L G D"], where: str = "factors") -> Float[np.ndarray, "L D"]:
    """The gain of each element of a norm that the queries of all heads share. UserError where KV groups differ."""
    if (of_head != of_head[:, :1]).any():
        raise UserError(
            f"{where}: gains of KV groups cannot go into the weights of this model, whose heads share one norm of their "
            "queries; use gains of granularity layer or layer_band"
        )
    return of_head[:, 0]


def _scaled(weights: Float[Array, "..."], gains: Float[np.ndarray, "..."]) -> Float[Array, "..."]:
    return (weights.astype(jnp.float32) * gains).astype(weights.dtype)
