"""Compare LPES with its rivals: accuracy by position, costs, and significance of the differences.

Examples:
  python -m lpes_jax.compare --num-pairs 36 --key-length 8 --methods baseline uniform ntk_by_base --output-path OUT
      three methods on the bundled model
  python -m lpes_jax.compare --model DIR --num-pairs 50 --methods all --factors RUN/factors.json --output-path OUT
      all, LPES with the factors that a search found
  python -m lpes_jax.compare --model DIR --task mdqa --data nq-open-oracle.jsonl.gz --distractors random --factors FILE
      the same on multi-document questions
  python -m lpes_jax.compare --model DIR --num-pairs 20 --factors FILE --other-tasks experiments/mixtures/other_ruler.toml
      all methods as tuned on 20 pairs, measured also on tasks on which nothing was tuned

A method with settings is tuned: at most --budget settings are tried on --limit search questions, and the most accurate one is
measured on --test-limit other questions, the same for all methods. Costs are measured in this process on the same prompts: the
median time of --repeats rounds, in which all methods take turns, and the memory of the method's program besides weights and
prompts.

--other-tasks names a TOML file with a block [[task]] for each other task: task = its name, its flags by their names, and
optionally its own test_limit. Every method is measured there as it was tuned on --task. Holm's correction covers the methods of
one task. A method that cannot be measured on a task is named with the reason, and stays in the comparison of the others.

OUT gets results.json, results.md, samples.jsonl, the plot positions.{png,svg}, and report.html, a page with all of them.
--resume continues an interrupted comparison; what was learnt, tuned and measured is not repeated.
"""

import sys
from collections.abc import Sequence

from lpes_jax import compare, process
from lpes_jax.cli import run_verb
from lpes_jax.settings.compare import CompareSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(
        CompareSettings(),
        lambda flags: compare.run_comparison(flags),
        __doc__ or "",
        arguments,
        "compare",
        check=lambda flags: compare.check_inputs(flags),
    )


if __name__ == "__main__":
    sys.exit(process.ended(main()))
