"""Outcomes as JSON, and back. An interrupted comparison continues from these."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from lpes_jax.evaluation import Candidate, Outcome

_PLAIN = ("compilations", "prompt_tokens", "counts", "outputs", "output_tokens")  # fields of an Outcome that are JSON already


def record_of(outcome: Outcome) -> dict[str, Any]:
    """An outcome as a JSON object, without its candidate and its prompts."""
    likelihood, begun = outcome.log_likelihood, outcome.prefix_of_outputs
    return {
        "scores": {metric: values.tolist() for metric, values in outcome.scores.items()},
        "log_likelihood": None if likelihood is None else [[str(value) for value in row] for row in likelihood],  # may be -inf
        "prefix_of_outputs": None if begun is None else begun.tolist(),
        **{name: getattr(outcome, name) for name in _PLAIN},
    }


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The outcome of a record. `evaluate` adds its candidate and prompts.

    Raises:
        KeyError, TypeError, ValueError: The record is damaged.
    """
    likelihood, begun = record["log_likelihood"], record["prefix_of_outputs"]
    scores = {metric: np.array(values, np.float64) for metric, values in record["scores"].items()}
    found = [*scores.values()]
    found += [] if likelihood is None else [np.array(likelihood, np.float32)]
    found += [] if begun is None else [np.array(begun, bool)]
    outputs, tokens, prompt_tokens = (record[name] for name in ("outputs", "output_tokens", "prompt_tokens"))
    if not scores or any(values.shape != found[0].shape or values.ndim != 2 for values in found):
        raise ValueError("scores of different shapes")
    if any(len(values) != found[0].size for values in (outputs, tokens, prompt_tokens) if values is not None):
        raise ValueError("the numbers of outputs and scores differ")
    if not all(isinstance(output, str) for output in outputs or ()):
        raise TypeError("outputs that are not texts")
    if not all(isinstance(count, int) for count in [record["compilations"], *record["counts"].values()]):
        raise TypeError("counts that are not numbers")
    return Outcome(
        Candidate(""),
        [],
        scores,
        None if likelihood is None else np.array(likelihood, np.float32),
        prefix_of_outputs=None if begun is None else np.array(begun, bool),
        **{name: record[name] for name in _PLAIN},
    )
