"""Compare LPES with its rivals: accuracy by position, costs, and significance of the differences.

Examples:
  python -m lpes_jax.compare --num-pairs 36 --key-length 8 --methods baseline uniform ntk_by_base --output-path OUT
      three methods on the bundled model
  python -m lpes_jax.compare --model DIR --num-pairs 50 --methods all --factors RUN/factors.json --output-path OUT
      all, LPES with the factors that a search found
  python -m lpes_jax.compare --model DIR --task mdqa --data nq-open-oracle.jsonl.gz --distractors random --factors FILE
      the same on multi-document questions

A method with settings is tuned: at most --budget settings are tried on --limit search questions, and the most accurate one is
measured on --test-limit other questions, the same for all methods. Costs are measured in this process on the same prompts: the
median time of --repeats rounds, in which all methods take turns, and the memory of the method's program besides weights and
prompts.

OUT gets results.json, results.md, samples.jsonl, the plot positions.{png,svg}, and report.html, a page with all of them.
--resume continues an interrupted comparison; methods that were tuned and measured are not repeated. (MoICE's router and SEAL's
scales are learnt again, positional channels and ZeroTuning's heads are searched again; if the setting differs, that method is
tuned again.)
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
