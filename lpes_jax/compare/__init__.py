"""Compare LPES with its rivals: `run_comparison(CompareSettings.of(...))`, or `python -m lpes_jax.compare`.

`run.py` runs the verb and has the table of methods; `checks.py` has the checks that need no model. Names are imported when they
are first used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.compare.__main__ import main
    from lpes_jax.compare.checks import NAMES, check, check_inputs
    from lpes_jax.compare.run import METHODS, PARTS, run_comparison
    from lpes_jax.settings.compare import CompareSettings
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "METHODS": "lpes_jax.compare.run",
            "NAMES": "lpes_jax.compare.checks",
            "PARTS": "lpes_jax.compare.run",
            "CompareSettings": "lpes_jax.settings.compare",
            "check": "lpes_jax.compare.checks",
            "main": "lpes_jax.compare.__main__",
            "check_inputs": "lpes_jax.compare.checks",
            "run_comparison": "lpes_jax.compare.run",
        },
    )

__all__ = ["METHODS", "NAMES", "PARTS", "CompareSettings", "check", "check_inputs", "main", "run_comparison"]
