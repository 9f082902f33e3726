"""Gains put into the weights: a model that answers with plain tables as the given one does with gains.

A gain multiplies its frequency's part of q . k. The queries are linear in their weights and bias, and in the weight of their
norm where they have one, so the gains of their elements go there: nothing is left to do at inference.

Letters: L layers, G = 1 or K KV groups, H heads, D head dim, E embedding.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import Mark, refuse_marked
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import gains_of_head


def fold_gains(model: Llama, factors: LayerFactors, where: str = "factors") -> Llama:
    """The model with the gains of `factors` in its weights, marked so (`lpes_jax.mark`); the given one stays as it is.

    They are multiplied in float32 and rounded to the weights' dtype. Layers without RoPE and elements that are not rotated
    stay. Raises UserError where the model holds factors already, where the gains do not fit it, and for KV groups with gains of
    their own where one norm is of the queries of all heads (qwen3).
    """
    refuse_marked(model.config.mark, where)
    folded = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    for name, gains in gains_of_tensors(factors, model.config, where).items():
        weights = getattr(model.layers, name)[...]
        gains = gains[:, None, :] if weights.ndim == 3 else gains  # [in, out]
        setattr(folded.layers, name, nnx.Param((weights.astype(jnp.float32) * gains).astype(weights.dtype)))
    folded.config = replace(model.config, mark=Mark(factors.sha256, gains="query weights"))
    return folded


def gains_of_tensors(
    factors: LayerFactors, config: LlamaConfig, where: str = "factors"
) -> dict[str, Float[np.ndarray, "L rows"]]:
    """What each row of the tensors that queries are linear in is multiplied by, float32, by the names that `Layers` has.

    `query` and, where there is one, `query_bias` [L, H D], or `query_norm` [L, D] alone. Raises UserError as `fold_gains` does.
    """
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    of_head = head_gains(factors, config)
    if config.qk_norm:
        return {"query_norm": norm_gains(of_head, where)}
    of_heads = query_gains(of_head, config)
    return {"query": of_heads, "query_bias": of_heads} if config.qkv_bias else {"query": of_heads}


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
