"""Print the parsed config of a model, and check that it computes correctly on this machine.

Examples:
  python -m lpes_jax.doctor --model tiny-retriever
      the bundled model
  python -m lpes_jax.doctor --model DIR --dtype bfloat16
      a folder in Hugging Face layout, in the dtype that it will be served in
  python -m lpes_jax.doctor --model model.gguf --compare-with-transformers
      logits and greedy ids against transformers on torch, float32 on the CPU (pip install torch)
  python -m lpes_jax.doctor --model DIR --memory-gb 24 --weight-format int8
      only what search, profile and search --preset best would need on a card of 24 GiB; nothing is loaded

Exit code 0 if every check passes, 1 if one fails, 2 if the model cannot be loaded or its logits are not finite.
"""

import sys
from collections.abc import Sequence

from lpes_jax import doctor, process
from lpes_jax.cli import run_verb
from lpes_jax.settings.doctor import DoctorSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """The verb; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    checks: list[doctor.Check] = []
    code = run_verb(
        DoctorSettings(),
        lambda flags: checks.extend(doctor.run_doctor(flags)),
        __doc__ or "",
        arguments,
        "doctor",
        check=lambda flags: doctor.check_inputs(flags),
        needs_torch=lambda flags: flags.checks.compare_with_transformers,
    )
    return code or int(not all(check.passed for check in checks))


if __name__ == "__main__":
    sys.exit(process.ended(main()))
