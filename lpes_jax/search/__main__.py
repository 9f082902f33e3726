"""Search a model's layer factors.

Examples:
  python -m lpes_jax.search --preset quick
      minutes on two cores
  python -m lpes_jax.search --model DIR --num-pairs 50 --preset paper --output-path RUN
      the paper's search (Tables 9 and 12) on 200 examples, reported on 500 others
  python -m lpes_jax.search --model DIR --num-pairs 50 100 --preset best --text BOOK.txt --output-path RUN
      by gradient, finer than per layer, on two lengths, with a plain text that must not become less likely
  python -m lpes_jax.search --model DIR --mixture TASKS.toml --preset best --text BOOK.txt --text-window 512 2048
      on several tasks together (experiments/mixtures has such files), with text in windows of two lengths
  python -m lpes_jax.search --model DIR --num-pairs 50 --preset paper --output-path RUN --resume
      resume an interrupted run
  python -m lpes_jax.search --model DIR --output-path RUN --coordinator-address HOST:PORT --num-processes 2 --process-id 0
      on two hosts: use --process-id 1 on the other; under srun or mpirun, use --distributed instead of the three

The folder gets factors.json (give it to evaluate), results.json, results.md, samples.jsonl, history.jsonl and two plots.
"""

import sys
from collections.abc import Sequence

from lpes_jax import process, search
from lpes_jax.cli import run_verb
from lpes_jax.settings.search import SearchSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(
        SearchSettings(),
        lambda flags: search.run_search(flags),
        __doc__ or "",
        arguments,
        "search",
        check=lambda flags: search.check_inputs(flags),
        many_hosts=True,
    )


if __name__ == "__main__":
    sys.exit(process.ended(main()))
