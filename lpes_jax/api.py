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
from lpes_jax.tasks.prompts import token_ids


def logits(
    model: Llama,
    tokens: Int[Array, "B T"],
    factors: LayerFactors | Float[Array, "L *finer"] | None = None,
    granularity: Granularity = "layer",
    gains: Float[Array, "L *finer"] | None = None,
    gains_granularity: Granularity = "layer",
) -> Float[Array, "B T V"]:
    """float32 logits at every position; rows may be padded on the right.

    `factors` is a `LayerFactors`, with its own gains, or an array of `granularity` (`lpes_jax.scale_layers`) beside an array of
    `gains`, in both of which the logits are differentiable; None leaves the model as it is, and so do factors and gains of 1,
    bit for bit. Of use in a jitted training step of
    your own, with the model and the factors as its arguments. RoPE of the types `dynamic` and `longrope` goes by T (see
    `lpes_jax.rope`). Raises UserError for LayerFactors that do not fit the model.
    """
    if isinstance(factors, LayerFactors):
        factors.for_model(model.config.num_layers, model.config.num_kv_heads, model.config.rotary_dim)
    table = model.config.rope_table(tokens.shape[1], factors, granularity, gains, gains_granularity)
    return _logits(model, tokens, table)


def generate(
    model: Llama,
    tokenizer: Any,
    prompts: Sequence[str],
    factors: LayerFactors | Float[Array, "L"] | None = None,
    max_new_tokens: int = 100,
) -> list[str]:
    """The greedy continuation of each prompt, up to the end-of-text token or `max_new_tokens`.

    Raises UserError for factors that do not fit the model.
    """
    layer_factors = factors if factors is None or isinstance(factors, LayerFactors) else LayerFactors(np.asarray(factors))
    if layer_factors is not None:
        layer_factors.for_model(model.config.num_layers, model.config.num_kv_heads, model.config.rotary_dim)
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
