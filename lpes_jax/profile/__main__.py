"""Measure the prompt length up to which a model reads reliably, and the positions where it loses facts. Takes minutes, offline.

Examples:
  python -m lpes_jax.profile --model tiny-retriever --minutes 3 --output-path OUT
      the bundled model
  python -m lpes_jax.profile --model DIR --lengths 1024 2048 4096 8192 --output-path OUT
      a model of your own, at these lengths
  python -m lpes_jax.profile --model DIR --factors RUN/factors.json --output-path OUT
      without and with factors, on the same questions, with paired tests

OUT gets profile.json (effective_length first), profile.md, report.html, which begins with the conclusion, and a heat map per
task. The effective length is the longest prompt length at which the accuracy at every position is above 85.6 % (RULER's number)
of the accuracy without a haystack, with 95 % confidence."""

import sys
from collections.abc import Sequence

from lpes_jax import process, profile
from lpes_jax.cli import run_verb
from lpes_jax.settings.profile import ProfileSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    return run_verb(
        ProfileSettings(),
        lambda flags: profile.run_profile(flags),
        __doc__ or "",
        arguments,
        "profile",
        check=lambda flags: profile.check_inputs(flags),
    )


if __name__ == "__main__":
    sys.exit(process.ended(main()))
