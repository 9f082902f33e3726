"""Fold gains into the weights: the new model with plain tables computes the same as the given model with gains.

A gain multiplies its frequency's part of q . k. Queries are linear in their weights and bias, and in the weight of their norm
if they have one. The gains are folded into these, so inference cost is unchanged.

Letters: L layers, G = 1 or K KV groups, H heads, D head dim, E embedding.
"""

from collections.abc import Mapping
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import Mark, refuse_marked
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama, with_weights
from lpes_jax.models.llama.packed import Packed
from lpes_jax.rope import gains_of_head

AnyArray = np.ndarray | Array


def fold_gains(model: Llama, factors: LayerFactors, where: str = "factors") -> Llama:
    """A copy of the model with the gains of `factors` folded into its weights, and marked so (`lpes_jax.mark`).

    Gains are multiplied in float32 and rounded to the weights' dtype. Layers without RoPE and elements that are not rotated are
    unchanged.

    Raises:
        UserError: The model already contains factors, the gains do not fit the model, or KV groups have different gains but
            share one norm of the queries (qwen3).
    """
    refuse_marked(model.config.mark, where)
    folded = multiplied(model, gains_of_tensors(factors, model.config, where))
    folded.config = replace(model.config, mark=Mark(factors.sha256, gains="query weights"))
    return folded


def multiplied(model: Llama, multipliers: Mapping[str, Float[AnyArray, "L rows"]]) -> Llama:
    """A copy of the model with each row of the named layer tensors multiplied.

    Computed in the multipliers' precision and rounded to the weights' dtype. The multipliers may be traced.
    """
    changes = {}
    for name, rows in multipliers.items():
        leaf = getattr(model.layers, name)
        if isinstance(leaf, Packed):
            changes[name] = leaf.with_gains(rows=jnp.asarray(rows))
            continue
        weights = leaf[...]
        rows = rows[:, None, :] if weights.ndim == 3 else rows  # [in, out]
        changes[name] = (weights.astype(rows.dtype) * rows).astype(weights.dtype)
    return with_weights(model, **changes)


def gains_of_tensors(
    factors: LayerFactors, config: LlamaConfig, where: str = "factors"
) -> dict[str, Float[np.ndarray, "L rows"]]:
    """Multipliers, float32, of the rows of the tensors that queries are linear in (see `by_tensor`).

    Raises UserError as `fold_gains` does.
    """
    factors.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim, where)
    tensors = by_tensor(head_gains(factors, config), config, where)
    return {name: np.asarray(rows) for name, rows in tensors.items()}


def by_tensor(
    elements: Float[AnyArray, "L G D"], config: LlamaConfig, where: str = "factors"
) -> Mapping[str, Float[AnyArray, "L rows"]]:
    """Turn gains of the elements of heads into gains of tensor rows, by tensor name in `Layers`.

    Returns:
        `query` and, if present, `query_bias` [L, H D]; or only `query_norm` [L, D].

    Raises:
        UserError: Gains of KV groups differ, but the queries of all heads share a norm.
    """
    if config.qk_norm:
        if elements.shape[1] > 1 and (elements != elements[:, :1]).any():
            raise UserError(
                f"{where}: gains of KV groups cannot be folded into the weights of this model, whose heads share one norm of "
                "their queries; use gains of granularity layer or layer_band"
            )
        return {"query_norm": elements[:, 0]}
    rows = elements.repeat(config.num_heads // elements.shape[1], axis=1).reshape(config.num_layers, -1)
    return {"query": rows, "query_bias": rows} if config.qkv_bias else {"query": rows}


def head_gains(factors: LayerFactors, config: LlamaConfig) -> Float[np.ndarray, "L G D"]:
    """The gain of each element of a head, float32, per KV group if they differ."""
    return np.asarray(gains_of_head(config.rope_table(1, factors).gains, config.head_dim), np.float32)
