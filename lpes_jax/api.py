"""Logits and text of a model with factors, for use from Python."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.factors import LayerFactors
from lpes_jax.generation import generate_ids
from lpes_jax.models.llama.model import Llama, hidden_states, output_logits
from lpes_jax.rope import Granularity, RopeTable
from lpes_jax.same_model import check_model
from lpes_jax.tasks.prompts import token_ids


def logits(
    model: Llama,
    tokens: Int[Array, "B T"],
    factors: LayerFactors | Float[Array, "L *finer"] | None = None,
    granularity: Granularity = "layer",
    gains: Float[Array, "L *finer"] | None = None,
    gains_granularity: Granularity = "layer",
    *,
    other_model: bool = False,
) -> Float[Array, "B T V"]:
    """float32 logits at every position; rows may be padded on the right.

    `factors` is a `LayerFactors`, with its own gains, or an array of `granularity` (`lpes_jax.scale_layers`) beside an array of
    `gains`, in both of which the logits are differentiable; None leaves the model as it is, and so do factors and gains of 1,
    bit for bit. Of use in a jitted training step of
    your own, with the model and the factors as its arguments. RoPE of the types `dynamic` and `longrope` goes by T (see
    `lpes_jax.rope`). Raises UserError for LayerFactors that do not fit the model, and, unless `other_model`, for those found
    for one of other sizes or another RoPE.
    """
    if isinstance(factors, LayerFactors):
        check_model(factors, model.config, other_model=other_model, quiet=True)
    table = model.config.rope_table(tokens.shape[1], factors, granularity, gains, gains_granularity)
    return _logits(model, tokens, table)


def generate(
    model: Llama,
    tokenizer: Any,
    prompts: Sequence[str],
    factors: LayerFactors | Float[Array, "L"] | None = None,
    max_new_tokens: int = 100,
    *,
    other_model: bool = False,
) -> list[str]:
    """The greedy continuation of each prompt, up to the end-of-text token or `max_new_tokens`.

    Raises UserError for factors that do not fit the model, and, unless `other_model`, for LayerFactors found for one of other
    sizes, another RoPE or another tokenizer. (Other weights of the same sizes are not seen here; `evaluate` warns of them.)
    """
    layer_factors = factors if factors is None or isinstance(factors, LayerFactors) else LayerFactors(np.asarray(factors))
    if layer_factors is not None:
        check_model(layer_factors, model.config, tokenizer=tokenizer, other_model=other_model, quiet=True)
    ids = generate_ids(
        model,
        token_ids(tokenizer, list(prompts)),
        factors=layer_factors,
        max_new_tokens=max_new_tokens,
        stop=[] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id],
    )
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


@jax.jit
def _logits(model: Llama, tokens: Int[Array, "B T"], table: RopeTable) -> Float[Array, "B T V"]:
    return output_logits(model, hidden_states(model, tokens, table))
