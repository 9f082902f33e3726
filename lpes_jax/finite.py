"""Logits that are not finite: the error that says so, and the layer of the model in which NaN or infinity arises.

NaN and infinity never become a score. The passes that are made anyway show them: the log-likelihood of an answer or of a token
(one NaN among the logits makes the whole distribution NaN), the largest logit of a step of generation (NaN counts as the
largest), all logits where they are handed out. Only then is a text traced layer by layer: with the model as it is before all
else, so that no factors are blamed for a damaged model.

A logit of -inf that nothing asks for is a token that cannot come, and no error; an answer token with one is an error, as the
log-likelihood is no number. No finite weights give such logits.

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
_CHUNK = 256  # positions whose logits are in memory together
_TRACED = 8  # texts that are traced at most


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
    """The error for logits that are not finite on the token ids `texts`, with `factors` (None: with the model as it is).

    It blames the model where that is not finite without factors, else the factors or the `method`; `name` is whose they are.
    """
    texts = [list(ids) for ids in texts[:_TRACED]]
    first = _first(model, texts)
    found = factors if factors is None or isinstance(factors, LayerFactors) else LayerFactors(np.asarray(factors), granularity)
    as_it_is = found is None or ((found.factors == 1).all() and (found.gains is None or (found.gains == 1).all()))
    if first is not None or not method and as_it_is:
        return NotFinite(f"the model's logits are not finite: first {describe_layer(first)}; {WAY_OUT}")
    if method or found is None:
        return NotFinite(f"the logits are not finite with the method {name}; give it other settings, or --dtype float32")
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
    """The first layer whose output is not finite on a text; `embedding` or `logits` where it is before or behind the layers.

    None where everything is finite, as the last digits of a text that is run alone may let it be.
    """
    model, config = on_one_device(model), model.config
    scaled = jnp.asarray(factors, jnp.float32) if isinstance(factors, np.ndarray) else factors
    scaled_gains = None if gains is None else jnp.asarray(gains, jnp.float32)
    table = config.rope_table(len(ids), scaled, granularity, scaled_gains, gains_granularity)
    tokens = jnp.array([ids], jnp.int32)
    if not jnp.isfinite(model.embed[...][tokens]).all():
        return "embedding"
    x, finite = _states_and_finite_layers(model, tokens, table)
    if not finite.all():
        return int(np.argmin(finite))
    for start in range(0, len(ids), _CHUNK):
        if not jnp.isfinite(output_logits(model, x[:, start : start + _CHUNK])).all():
            return "logits"
    return None


@jax.jit
def _states_and_finite_layers(
    model: Llama, tokens: Int[Array, "B T"], table: RopeTable
) -> tuple[Float[Array, "B T E"], Bool[Array, "L"]]:
    return states_after_layers(model, tokens, table, lambda x: jnp.isfinite(x).all())


def describe_layer(layer: int | str | None) -> str:
    """What `first_bad_layer` found, in words."""
    if layer is None:
        return "in no layer when the text runs alone"
    return f"in layer {layer}" if isinstance(layer, int) else f"in the {layer}"


def shown(factors: Any, most: int = 32) -> str:
    """Factors in one line, the first of many."""
    values = np.asarray(factors).ravel()
    return " ".join(f"{value:g}" for value in values[:most]) + (" ..." if len(values) > most else "")
