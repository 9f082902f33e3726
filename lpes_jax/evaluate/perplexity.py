"""Perplexity of a text for each candidate: over all scored tokens, and by position in the window."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lpes_jax.evaluation import Candidate, environment
from lpes_jax.mesh import mesh_of
from lpes_jax.models.llama import Loaded
from lpes_jax.models.llama.method import of_table
from lpes_jax.models.llama.model import Llama
from lpes_jax.tasks.perplexity import Perplexity, Window, perplexity, perplexity_by_position
from lpes_jax.tasks.prompts import Split
from lpes_jax.text_nll import token_nll


def measure_perplexity(
    task: Perplexity,
    loaded: Loaded,
    candidates: Sequence[Candidate],
    split: Split,
    limit: int | None,
    batch_size: int | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """`results.json` of the task, of at most `limit` windows, and a line for each candidate.

    Windows longer than the model's are allowed: that is how extrapolation is measured. Raises UserError for a text that is
    too short.
    """
    everything = task.windows(loaded.tokenizer, split)
    windows = everything[:limit]
    methods: dict[str, Any] = {}
    lines: list[str] = []
    for candidate in candidates:
        nlls = text_nlls(loaded.model, windows, candidate, batch_size or 1)
        by_position = perplexity_by_position(windows, nlls)
        methods[candidate.name] = {
            "perplexity,none": perplexity(windows, nlls),
            "nll_per_token,none": float(np.log(perplexity(windows, nlls))),
            "perplexity_by_position": {str(start): value for start, value in by_position},
        }
        shown = ", ".join(f"{start}: {value:.2f}" for start, value in by_position)
        lines.append(f"{candidate.name}: perplexity {methods[candidate.name]['perplexity,none']:.3f}; from position {shown}")
    last = methods[candidates[-1].name]
    tokens = sum(len(window.ids) - window.scored for window in windows)
    record = {
        "results": {task.name: {"alias": task.name, **last}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(everything), "effective": len(windows)}},
        "scored_tokens": tokens,
        **environment(),
    }
    return record, lines


def text_nlls(
    model: Llama, windows: Sequence[Window], candidate: Candidate, batch_size: int = 1
) -> list[Float[np.ndarray, "T"]]:
    """-log p of each token of each window. `batch_size` is windows a pass and device."""
    mesh = mesh_of(model)
    places = 1 if mesh is None else mesh.shape["population"]
    batch_size = min(batch_size, -(-len(windows) // places)) * places
    longest = max(len(window.ids) for window in windows)
    method = of_table(model.config.rope_table(longest, candidate.factors))
    if candidate.method is not None:
        method = candidate.method(model.config, longest)
    nlls: list[np.ndarray] = []
    for start in range(0, len(windows), batch_size):
        ids = [window.ids for window in windows[start : start + batch_size]]
        rows = ids + [ids[0]] * (batch_size - len(ids))  # the last batch is as large as the others: one compilation
        nlls += list(np.asarray(token_nll(model, jnp.array(rows, jnp.int32), method)))[: len(ids)]
    return nlls
