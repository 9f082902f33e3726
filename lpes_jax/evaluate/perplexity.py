"""Perplexity of a text for each candidate: over all scored tokens, and by position in the window."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lpes_jax.evaluation import Candidate, environment
from lpes_jax.factors import LayerFactors
from lpes_jax.models.llama import Loaded
from lpes_jax.models.llama.model import Llama, hidden_states, output_logits
from lpes_jax.report.tables import console
from lpes_jax.rope import RopeTable
from lpes_jax.tasks.perplexity import Perplexity, Window, perplexity, perplexity_by_position
from lpes_jax.tasks.prompts import Split

_POSITIONS_AT_ONCE = 256  # logits of all positions together would not fit


@partial(jax.jit, static_argnames="chunk")
def token_nll(
    model: Llama, tokens: Int[Array, "B T"], table: RopeTable, chunk: int = _POSITIONS_AT_ONCE
) -> Float[Array, "B T"]:
    """-log p of each token in nats, float32; 0 for a row's first, which nothing predicts."""
    hidden = hidden_states(model, tokens, table)[:, :-1]
    batch, length, width = hidden.shape
    padding = -length % chunk
    hidden = jnp.pad(hidden, ((0, 0), (0, padding), (0, 0))).reshape(batch, -1, chunk, width).swapaxes(0, 1)
    wanted = jnp.pad(tokens[:, 1:], ((0, 0), (0, padding))).reshape(batch, -1, chunk).swapaxes(0, 1)

    def nll(hidden_and_wanted: tuple[Array, Array]) -> Array:
        hidden, wanted = hidden_and_wanted
        logits = output_logits(model, hidden)
        return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]

    values = jax.lax.map(nll, (hidden, wanted)).swapaxes(0, 1).reshape(batch, -1)[:, :length]
    return jnp.pad(values, ((0, 0), (1, 0)))


def measure_perplexity(
    task: Perplexity,
    loaded: Loaded,
    candidates: Sequence[Candidate],
    split: Split,
    limit: int | None,
    batch_size: int | None = None,
) -> dict[str, Any]:
    """`results.json` of the task, printed as well, of at most `limit` windows.

    Windows longer than the model's are allowed: that is how extrapolation is measured. Raises UserError for a text that is
    too short.
    """
    everything = task.windows(loaded.tokenizer, split)
    windows = everything[:limit]
    methods: dict[str, Any] = {}
    out = console()
    for candidate in candidates:
        nlls = text_nlls(loaded.model, windows, candidate.factors, batch_size or 1)
        by_position = perplexity_by_position(windows, nlls)
        methods[candidate.name] = {
            "perplexity,none": perplexity(windows, nlls),
            "nll_per_token,none": float(np.log(perplexity(windows, nlls))),
            "perplexity_by_position": {str(start): value for start, value in by_position},
        }
        shown = ", ".join(f"{start}: {value:.2f}" for start, value in by_position)
        out.print(f"{candidate.name}: perplexity {methods[candidate.name]['perplexity,none']:.3f}; from position {shown}")
    last = methods[candidates[-1].name]
    tokens = sum(len(window.ids) - window.scored for window in windows)
    return {
        "results": {task.name: {"alias": task.name, **last}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(everything), "effective": len(windows)}},
        "scored_tokens": tokens,
        **environment(),
    }


def text_nlls(
    model: Llama, windows: Sequence[Window], factors: LayerFactors | None, batch_size: int = 1
) -> list[Float[np.ndarray, "T"]]:
    """-log p of each token of each window, with factors or without."""
    longest = max(len(window.ids) for window in windows)
    scaled = None if factors is None else jnp.asarray(factors.factors, jnp.float32)
    table = model.config.rope_table(longest, scaled, "layer" if factors is None else factors.granularity)
    nlls: list[np.ndarray] = []
    for start in range(0, len(windows), batch_size):
        ids = [window.ids for window in windows[start : start + batch_size]]
        rows = ids + [ids[0]] * (batch_size - len(ids))  # the last batch is as large as the others: one compilation
        nlls += list(np.asarray(token_nll(model, jnp.array(rows, jnp.int32), table)))[: len(ids)]
    return nlls
