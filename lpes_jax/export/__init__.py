"""Write a model together with its factors as files for other libraries: `run_export(ExportSettings.of(...))`, or `python -m
lpes_jax.export`.

`run.py` writes the folder atomically; `lpes_jax.ship` has one module per format. `checks.py` has the checks that need no model.
Names are imported when they are first used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.export.__main__ import main
    from lpes_jax.export.checks import check, check_inputs
    from lpes_jax.export.run import run_export
    from lpes_jax.settings.export import ExportSettings
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "ExportSettings": "lpes_jax.settings.export",
            "check": "lpes_jax.export.checks",
            "main": "lpes_jax.export.__main__",
            "check_inputs": "lpes_jax.export.checks",
            "run_export": "lpes_jax.export.run",
        },
    )

__all__ = ["ExportSettings", "check", "check_inputs", "main", "run_export"]
