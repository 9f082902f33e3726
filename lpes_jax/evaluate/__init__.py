"""Measure a model by the position of the fact: `run_evaluation(EvaluateSettings.of(...))`, or `python -m lpes_jax.evaluate`.

`run.py` runs the verb; `checks.py` has the checks that need no model; `perplexity.py` measures plain text. Names are imported
when they are first used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.evaluate.checks import check, check_inputs
    from lpes_jax.evaluate.run import run_evaluation
    from lpes_jax.settings.evaluate import EvaluateSettings
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "EvaluateSettings": "lpes_jax.settings.evaluate",
            "check": "lpes_jax.evaluate.checks",
            "check_inputs": "lpes_jax.evaluate.checks",
            "run_evaluation": "lpes_jax.evaluate.run",
        },
    )

__all__ = ["EvaluateSettings", "check", "check_inputs", "run_evaluation"]
