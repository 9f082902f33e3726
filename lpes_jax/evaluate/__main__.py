"""Measure a model, with or without factors, by the position of the fact.

Examples:
  python -m lpes_jax.evaluate --num-pairs 36 --key-length 8 --limit 100 --output-path OUT
      without factors: the U curve of the model
  python -m lpes_jax.evaluate --num-pairs 36 --key-length 8 --limit 100 --factors RUN/factors.json --output-path OUT
      with and without factors, with a paired test
  python -m lpes_jax.evaluate --model DIR --data kv-retrieval-75_keys.jsonl.gz --num-pairs 75 --split all --output-path OUT
      lost-in-the-middle's own file

OUT gets results.json (lm-evaluation-harness's layout), results.md, samples.jsonl and the plot positions.{png,svg}.
"""

import sys
from collections.abc import Sequence

from lpes_jax import evaluate, process
from lpes_jax.cli import run_verb
from lpes_jax.settings.evaluate import EvaluateSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(
        EvaluateSettings(),
        lambda flags: evaluate.run_evaluation(flags),
        __doc__ or "",
        arguments,
        "evaluate",
        check=lambda flags: evaluate.check_inputs(flags),
        many_hosts=True,
    )


if __name__ == "__main__":
    sys.exit(process.ended(main()))
