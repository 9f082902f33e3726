"""Gains put into the weights: a model that answers with plain tables as the given one does with gains.

A gain multiplies its frequency's part of q . k. The queries are linear in their weights and bias, and in the weight of their
norm where they have one, so the gains of their elements go there: nothing is left to do at inference.

Letters: L layers, G = 1 or K KV groups, H heads, D head dim, E embedding.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import Mark, refuse_marked
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import gains_of_head

Numbers = np.ndarray | Array


def fold_gains(model: Llama, factors: LayerFactors, where: str = "factors") -> Llama:
    """The model with the gains of `factors` in its weights, marked so (`lpes_jax.mark`); the given one stays as it is.

    They are multiplied in float32 and rounded to the weights' dtype. Layers without RoPE and elements that are not rotated
    stay. Raises UserError where the model holds factors already, where the gains do not fit it, and for KV groups with gains of
    their own where one norm is of the queries of all heads (qwen3).
    """
    refuse_marked(model.config.mark, where)
    folded = multiplied(model, gains_of_tensors(factors, model.config, where))
    folded.config = replace(model.config, mark=Mark(factors.sha256, gains="query weights"))
    return folded


def multiplied(model: Llama, of_tensors: Mapping[str, Float[Numbers, "L rows"]]) -> Llama:
    """The model with each row of the named tensors of its layers multiplied; the given one stays as it is.

    In the multipliers' precision, rounded to the weights' dtype. The multipliers may be traced.
    """
    changes = {}
    for name, of_rows in of_tensors.items():
        weights = getattr(model.layers, name)[...]
        of_rows = of_rows[:, None, :] if weights.ndim == 3 else of_rows  # [in, out]
        changes[name] = (weights.astype(of_rows.dtype) * of_rows).astype(weights.dtype)
    return with_weights(model, **changes)


def with_weights(model: Llama, **weights: Array) -> Llama:
    """The model with other tensors in its layers, by their names; the given one stays as it is."""
    changed = jax.tree.map(lambda leaf: leaf, model)  # new modules around the same arrays
    for name, value in weights.items():
        setattr(changed.layers, name, nnx.Param(value))
    return changed


def gains_of_tensors(
    factors: LayerFactors, config: LlamaConfig, where: str = "factors"
) -> dict[str, Float[np.ndarray, "L rows"]]:
    """What each row of the tensors that queries are linear in is multiplied by, float32 (see `by_tensor`).

    Raises UserError as `fold_gains` does.
    """
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    of_tensors = by_tensor(head_gains(factors, config), config, where)
    return {name: np.asarray(of_rows) for name, of_rows in of_tensors.items()}


def by_tensor(
    of_head: Float[Numbers, "L G D"], config: LlamaConfig, where: str = "factors"
) -> Mapping[str, Float[Numbers, "L rows"]]:
    """Gains of the elements of heads as those of the rows of tensors, by the names that `Layers` has.

    `query` and, where there is one, `query_bias` [L, H D], or `query_norm` [L, D] alone. Raises UserError where KV groups
    differ and the queries of all heads share a norm.
    """
    if config.qk_norm:
        if of_head.shape[1] > 1 and (of_head != of_head[:, :1]).any():
            raise UserError(
                f"{where}: gains of KV groups cannot go into the weights of this model, whose heads share one norm of their "
                "queries; use gains of granularity layer or layer_band"
            )
        return {"query_norm": of_head[:, 0]}
    of_rows = of_head.repeat(config.num_heads // of_head.shape[1], axis=1).reshape(config.num_layers, -1)
    return {"query": of_rows, "query_bias": of_rows} if config.qkv_bias else {"query": of_rows}


def head_gains(factors: LayerFactors, config: LlamaConfig) -> Float[np.ndarray, "L G D"]:
    """The gain of each element of a head, float32, by the layer's KV groups where they differ."""
    return np.asarray(gains_of_head(config.rope_table(1, factors).gains, config.head_dim), np.float32)
