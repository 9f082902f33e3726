"""Factors, gains or both, one per frequency and layer, learnt by `compare` itself: LPES on the rivals' terms.

The factors of `--factors` come from a search with more questions and another budget than the rivals have. These are learnt from
the search questions of the comparison, by gradient descent, as SEAL's scales are.

    learnt_factors    RoPE factors, [L, R/2]
    learnt_gains      gains of q . k, [L, R/2]; they fold into the query weights
    learnt_both       both

Differences from `python -m lpes_jax.search --preset best`: no plain text in the loss, minibatches of 8 prompts, a constant
rate, no box (the logarithms of the numbers are learnt), and `budget` passes over the search questions. A quarter of these is
held back to choose the pass.

Letters: L layers, R rotated elements per head.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from lpes_jax.factors import LayerFactors
from lpes_jax.mark import refuse_marked
from lpes_jax.methods import Choice, Tuning
from lpes_jax.methods.tables import lpes
from lpes_jax.models.llama.model import Llama
from lpes_jax.rope import RopeTable

Logarithms = dict[str, Float[Array, "L n"]]
_RATE = 0.03  # that of the verb search


def factors_choices(tuning: Tuning) -> list[Choice]:
    """Factors, learnt in as many passes as the budget allows."""
    return _learnt("learnt_factors", ("factors",), tuning)


def gains_choices(tuning: Tuning) -> list[Choice]:
    """Gains, likewise."""
    return _learnt("learnt_gains", ("gains",), tuning)


def both_choices(tuning: Tuning) -> list[Choice]:
    """Factors and gains, likewise."""
    return _learnt("learnt_both", ("factors", "gains"), tuning)


def with_table(model: Llama, logarithms: Logarithms, length: int) -> tuple[Llama, RopeTable]:
    """The model, and its RoPE table with the factors and gains; differentiable in the logarithms."""
    numbers = {name: jnp.exp(values) for name, values in logarithms.items()}
    factors = numbers.get("factors", jnp.ones_like(numbers["gains"]) if "gains" in numbers else None)
    table = model.config.rope_table(length, factors, "layer_band", numbers.get("gains"), "layer_band")
    return model, table


def _learnt(name: str, kinds: tuple[str, ...], tuning: Tuning) -> list[Choice]:
    config, passes = tuning.model.config, tuning.budget
    refuse_marked(config.mark, name)
    start = {kind: jnp.zeros((config.num_layers, config.rotary_dim // 2), jnp.float32) for kind in kinds}
    found: dict[str, np.ndarray] = jax.tree.map(
        lambda values: np.exp(np.asarray(values)), tuning.learn(name, with_table, start, passes, _RATE)
    )
    gains = found.get("gains")
    factors = LayerFactors(
        found.get("factors", np.ones((config.num_layers, config.rotary_dim // 2), np.float32)),
        granularity="layer_band",
        gains=gains,
        gains_granularity=None if gains is None else "layer_band",
    )
    return [Choice(f"{passes} pass{'es' * (passes > 1)}", lpes(factors))]
