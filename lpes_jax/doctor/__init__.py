"""The parsed config of a model, and self-checks: `run_doctor(DoctorSettings.of(...))`, or `python -m lpes_jax.doctor`.

`run.py` has the checks of the model; `checks.py` has the checks that need no model. Names are imported when they are first
used.
"""

from typing import TYPE_CHECKING

from lpes_jax import lazy

if TYPE_CHECKING:
    from lpes_jax.doctor.__main__ import main
    from lpes_jax.doctor.checks import check, check_inputs
    from lpes_jax.doctor.run import Check, example_tokens, new_tokens, parsed_config, run_doctor
    from lpes_jax.settings.doctor import DoctorSettings
else:
    __getattr__, __dir__ = lazy.names(
        __name__,
        {
            "Check": "lpes_jax.doctor.run",
            "DoctorSettings": "lpes_jax.settings.doctor",
            "check": "lpes_jax.doctor.checks",
            "main": "lpes_jax.doctor.__main__",
            "check_inputs": "lpes_jax.doctor.checks",
            "example_tokens": "lpes_jax.doctor.run",
            "new_tokens": "lpes_jax.doctor.run",
            "run_doctor": "lpes_jax.doctor.run",
            "parsed_config": "lpes_jax.doctor.run",
        },
    )

__all__ = [
    "Check",
    "DoctorSettings",
    "check",
    "check_inputs",
    "example_tokens",
    "main",
    "new_tokens",
    "run_doctor",
    "parsed_config",
]
