"""Checks of arrays given to Python functions. For traced arrays (`jax.jit`, `jax.grad`, `jax.vmap`) only the shape is checked.

Letters: B batch, T tokens, P population.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mark import refuse_marked
from lpes_jax.models.llama.config import LlamaConfig
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.rope import Granularity, is_traced


def checked_tokens(model: Llama, tokens: Any, what: str = "tokens") -> Int[Array, "B T"]:
    """Token ids `[B, T]` as an array. Raises UserError for another shape or type, no rows, or ids outside the vocabulary."""
    if not isinstance(tokens, jax.Array):
        try:
            tokens = np.asarray(tokens)
        except ValueError:
            raise UserError(f"{what}: the rows have different lengths; pad them on the right") from None
    if tokens.ndim != 2 or not tokens.size or not np.issubdtype(tokens.dtype, np.integer):
        raise UserError(
            f"{what} must be whole numbers [B, T], at least one row of at least one; got shape {list(tokens.shape)} of "
            f"{tokens.dtype}"
        )
    if not is_traced(tokens):
        check_ids(model, np.asarray(tokens), f"{what} contain")
    return jnp.asarray(tokens, jnp.int32)


def checked_factors(
    config: LlamaConfig, factors: Any, granularity: Granularity, *, population: bool = False, what: str = "factors"
) -> None:
    """Raise UserError for factors that are out of range or do not fit the model.

    A model that already contains factors accepts only factors of 1 (and traced populations, which a search scores).

    Args:
        config: The model's config.
        factors: A `LayerFactors`, an array, or None.
        granularity: Granularity of an array.
        population: Whether the array has a leading axis of individuals.
        what: "factors" or "gains".
    """
    if factors is None:
        return
    if isinstance(factors, LayerFactors):
        individuals = [factors]
    else:
        try:
            values = np.ones(factors.shape) if is_traced(factors) else np.asarray(factors)
        except ValueError:
            raise UserError(f"{what} must be numbers, the same count in every layer") from None
        if population and (values.ndim < 2 or not len(values)):
            raise UserError(f"{what} must have a leading axis of individuals, at least one; got shape {list(values.shape)}")
        rows = values if population else [values]
        if what == "gains":
            individuals = [
                LayerFactors(np.ones(config.num_layers), "layer", np.asarray(individual), granularity) for individual in rows
            ]
        else:
            individuals = [LayerFactors(np.asarray(individual), granularity) for individual in rows]
    if not population if is_traced(factors) else not all(individual.changes_nothing for individual in individuals):
        refuse_marked(config.mark, what)
    for individual in individuals:
        individual.for_model(config.num_layers, config.num_kv_heads, config.rotary_dim)
