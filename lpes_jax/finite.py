"""Logits that are not finite: the error, and the layer of the model in which NaN or infinity first appears.

NaN and infinity never become a score. They are detected in results that are computed anyway: the log-likelihood of an answer or
a token (a single NaN logit makes the whole distribution NaN), the largest logit of a generation step (NaN counts as the
largest), and all logits where these are returned. Only then is a text traced layer by layer. The trace starts with the model
without factors, so that factors are not blamed for a damaged model.

A logit of -inf that is not read is a token of probability 0, and no error. An answer token of -inf is an error, because the
log-likelihood is not a number. Finite weights never give such logits.

Letters: B batch, T tokens, E embedding, L layers.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lpes_jax.errors import UserError
from lpes_jax.factors import LayerFactors
from lpes_jax.mesh import on_one_device
from lpes_jax.models.llama.model import Llama, output_logits, states_after_layers
from lpes_jax.rope import Granularity, RopeTable

WAY_OUT = "try --dtype float32, or fetch its files again"
_CHUNK = 256  # positions whose logits are in memory at once
_TRACED = 8  # at most this many texts are traced


class NotFinite(UserError):
    """Logits are NaN or infinite."""


def not_finite(
    model: Llama,
    texts: Sequence[Sequence[int]],
    factors: LayerFactors | Float[np.ndarray, "L *units"] | None = None,
    granularity: Granularity = "layer",
    *,
    name: str = "",
    method: bool = False,
) -> NotFinite:
    """The error for logits that are not finite.

    It blames the model if its logits are not finite without factors either, otherwise the factors or the method.

    Args:
        model: The model, without factors.
        texts: Token ids of the texts.
        factors: The factors in use; None for the plain model.
        granularity: Granularity of an array of factors.
        name: The candidate that the factors belong to.
        method: Whether a method is in use in place of factors.
    """
    texts = [list(ids) for ids in texts[:_TRACED]]
    first = _first(model, texts)
    found = factors if factors is None or isinstance(factors, LayerFactors) else LayerFactors(np.asarray(factors), granularity)
    unchanged = found is None or ((found.factors == 1).all() and (found.gains is None or (found.gains == 1).all()))
    if first is not None or not method and unchanged:
        return NotFinite(f"the model's logits are not finite: first {describe_layer(first)}; {WAY_OUT}")
    if method or found is None:
        return NotFinite(f"the logits are not finite with the method {name}; use other settings, or --dtype float32")
    first, whose = _first(model, texts, found), f"{name}: " if name else ""
    gains = "" if found.gains is None else f", gains {shown(found.gains)}"
    return NotFinite(
        f"the logits are not finite with these factors ({whose}{shown(found.factors)}{gains}): first {describe_layer(first)}; "
        "use factors nearer to 1, or --dtype float32"
    )


def _first(model: Llama, texts: Sequence[Sequence[int]], *factors: Any) -> int | str | None:
    found = (first_bad_layer(model, ids, *factors) for ids in texts)
    return next((layer for layer in found if layer is not None), None)


def first_bad_layer(
    model: Llama,
    ids: Sequence[int],
    factors: LayerFactors | Float[np.ndarray, "L *units"] | None = None,
    granularity: Granularity = "layer",
    gains: Float[np.ndarray, "L *units"] | None = None,
    gains_granularity: Granularity = "layer",
) -> int | str | None:
    """The first layer whose output is not finite on a text; `embedding` or `logits` if it is before or after the layers.

    None if everything is finite. That can happen, because a text that is run by itself may round differently.
    """
    model, config = on_one_device(model), model.config
    scaled = jnp.asarray(factors, jnp.float32) if isinstance(factors, np.ndarray) else factors
    query_gains = None if gains is None else jnp.asarray(gains, jnp.float32)
    table = config.rope_table(len(ids), scaled, granularity, query_gains, gains_granularity)
    tokens = jnp.array([ids], jnp.int32)
    embedding, layers, x = _finite_until_logits(model, tokens, table)
    if not embedding:
        return "embedding"
    if not layers.all():
        return int(np.argmin(layers))
    for start in range(0, len(ids), _CHUNK):
        if not _finite_logits(model, x[:, start : start + _CHUNK]):
            return "logits"
    return None


@jax.jit
def _finite_until_logits(
    model: Llama, tokens: Int[Array, "B T"], table: RopeTable
) -> tuple[Bool[Array, ""], Bool[Array, "L"], Float[Array, "B T E"]]:
    """Whether the embedding and the output of each layer are finite; and the last layer's output."""
    x, layers = states_after_layers(model, tokens, table, lambda x: jnp.isfinite(x).all())
    return jnp.isfinite(model.embed[...][tokens]).all(), layers, x


@jax.jit
def _finite_logits(model: Llama, x: Float[Array, "B C E"]) -> Bool[Array, ""]:
    return jnp.isfinite(output_logits(model, x)).all()


def describe_layer(layer: int | str | None) -> str:
    """The result of `first_bad_layer` in words."""
    if layer is None:
        return "in no layer when the text is run by itself"
    return f"in layer {layer}" if isinstance(layer, int) else f"in the {layer}"


def shown(factors: Any, most: int = 32) -> str:
    """Factors in one line; at most the first `most` of them."""
    values = np.asarray(factors).ravel()
    return " ".join(f"{value:g}" for value in values[:most]) + (" ..." if len(values) > most else "")
