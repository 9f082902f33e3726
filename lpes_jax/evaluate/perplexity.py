"""Perplexity of a text for each candidate: over all scored tokens, and by position in the window."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from lpes_jax.errors import UserError
from lpes_jax.evaluation import Candidate
from lpes_jax.factors import LayerFactors
from lpes_jax.finite import not_finite
from lpes_jax.mesh import mesh_of
from lpes_jax.models.llama import Loaded
from lpes_jax.models.llama.method import table_method
from lpes_jax.models.llama.model import Llama, check_ids
from lpes_jax.tasks.perplexity import Perplexity, Window, mean_nll, perplexity, perplexity_by_position
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
    """Measure the perplexity of each candidate. Windows may be longer than the model's, to measure extrapolation.

    Args:
        task: The task.
        loaded: The model and its tokenizer.
        candidates: What is measured.
        split: The part of the text.
        limit: The most windows; None means all.
        batch_size: Windows per pass and device; None means 1.

    Returns:
        The figures of `results.json`, and a line of text for each candidate.

    Raises:
        UserError: The text is too short, the model does not have an id, or logits are not finite.
    """
    everything = task.windows(loaded.tokenizer, split)
    windows = everything[:limit]
    methods: dict[str, Any] = {}
    lines: list[str] = []
    for candidate in candidates:
        nlls = text_nlls(loaded.model, windows, candidate, 1 if batch_size is None else batch_size)
        by_position = perplexity_by_position(windows, nlls)
        methods[candidate.name] = {
            "perplexity,none": _finite(total := perplexity(windows, nlls)),
            "nll_per_token,none": mean_nll(windows, nlls),
            "perplexity_by_position": {str(start): _finite(value) for start, value in by_position},
        }
        shown = ", ".join(f"{start}: {value:.2f}" for start, value in by_position)
        lines.append(f"{candidate.name}: perplexity {total:.3f}; from position {shown}")
    last = methods[candidates[-1].name]
    tokens = sum(len(window.ids) - window.scored for window in windows)
    record = {
        "results": {task.name: {"alias": task.name, **last}},
        "methods": methods,
        "n-samples": {task.name: {"original": len(everything), "effective": len(windows)}},
        "scored_tokens": tokens,
    }
    return record, lines


def _finite(perplexity: float) -> float | None:
    """The value for JSON: None if it is infinite."""
    return perplexity if math.isfinite(perplexity) else None


def text_nlls(
    model: Llama, windows: Sequence[Window], candidate: Candidate, batch_size: int = 1
) -> list[Float[np.ndarray, "T"]]:
    """-log p of each token of each window. `batch_size` is the number of windows per pass and device.

    Raises UserError if the model does not have an id, if a window has no tokens, or if logits are not finite.
    """
    if batch_size < 1:
        raise UserError(f"batch_size must be at least 1, got {batch_size}")
    check_ids(model, [window.ids for window in windows])
    mesh = mesh_of(model)
    shards = 1 if mesh is None else mesh.shape["population"]
    batch_size = min(batch_size, -(-len(windows) // shards)) * shards
    longest = max(len(window.ids) for window in windows)
    method = table_method(model.config.rope_table(longest, candidate.factors))
    if candidate.method is not None:
        method = candidate.method(model.config, longest)
    nlls: list[np.ndarray] = []
    for start in range(0, len(windows), batch_size):
        ids = [window.ids for window in windows[start : start + batch_size]]
        rows = ids + [ids[0]] * (batch_size - len(ids))  # pads the last batch, so that there is one compilation
        values = np.asarray(token_nll(model, jnp.array(rows, jnp.int32), method))[: len(ids)]
        if bad := [row_ids for row_ids, nll in zip(ids, values, strict=True) if not np.isfinite(nll).all()]:
            used, method = candidate.factors or LayerFactors.uniform(1.0, model.config.num_layers), candidate.method is not None
            raise not_finite(model, bad, used, name=candidate.name, method=method)
        nlls += list(values)
    return nlls
